"""/v1/completions: text or token ids in, continuations out."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from k3jax.chat.deltas import Content
from serve.http.answer_grammar import text_matcher
from serve.http.backend import Generate
from serve.http.errors import bad
from serve.http.format import EVENTS, full_usage, service_of, token_text, usage_wanted
from serve.http.outputs import Step, TextOutput, TokenLogprob
from serve.http.params import check_ids, check_length, fold_seed, sampling_of
from serve.http.schemas import MAX_CHOICES, Completion, CompletionRequest
from serve.http.service import Service, merge
from serve.http.sse import plain_response, stream_response

router = APIRouter(tags=["OpenAI"])


@dataclass(frozen=True)
class Job:
    """A checked request: choice i continues `prompts[i // n]`."""

    id: str
    created: int
    body: CompletionRequest
    model: str
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    requests: list[Generate]
    outputs: list[TextOutput]

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        per = len(self.outputs) // len(self.prompts)
        usage = full_usage(sum(map(len, self.prompts)), self.outputs)
        cached = sum(
            max(output.cached_tokens for output in self.outputs[at : at + per])
            for at in range(0, len(self.outputs), per)
        )
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached, usage["prompt_tokens"])}
        return usage

    def echo(self, index: int) -> str:
        return self.echoes[index // (len(self.outputs) // len(self.prompts))]


@router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue text, without the chat encoding."""
    service = service_of(request)
    job = await _prepare(service, body, int(request.headers.get("content-length", 0)))
    if body.stream:
        return await stream_response(request, _chunks(service, job), service.options.keep_alive)
    return await plain_response(request, _completion(service, job))


def prompts_of(prompt: str | Sequence[Any], service: Service, param: str) -> list[tuple[int, ...]]:
    """Token ids of one text, several texts, one list of ids, or several; at least one prompt, each of a fit length."""
    tokenizer = service.tokenizer
    parts: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not 1 <= len(parts) <= MAX_CHOICES:
        raise bad(param, f"{param} holds {len(parts)} prompts, allowed are 1 to {MAX_CHOICES}; send fewer at a time")
    prompts = [tuple(tokenizer.encode(part) if isinstance(part, str) else part) for part in parts]
    for ids in prompts:
        check_ids(param, ids, tokenizer.vocab_size)
        check_length(len(ids), service.limits, param)
    return prompts


async def _prepare(service: Service, body: CompletionRequest, size: int) -> Job:
    n = body.n or 1
    if body.suffix:
        raise bad("suffix", "suffix asks for text in the middle, which this model cannot write; leave suffix out")
    if body.best_of is not None and body.best_of != n:
        raise bad("best_of", f"best_of is {body.best_of}, only n ({n}) is supported; leave best_of out")
    if body.echo and body.logprobs is not None:
        raise bad("echo", "echo with logprobs needs log-probabilities of the prompt; leave one of them out")
    adapter = service.adapter_of(body.model, body.lora_path)
    prompts = await service.offload(size, lambda: prompts_of(body.prompt, service, "prompt"))
    if len(prompts) * n > MAX_CHOICES:
        raise bad("n", f"n is {n} for {len(prompts)} prompts, the limit is {MAX_CHOICES} together; send fewer")
    matcher = await text_matcher(service, body)
    requests, outputs = [], []
    for prompt in prompts:
        sampling = sampling_of(
            body,
            service.tokenizer,
            service.options,
            service.limits,
            prompt_tokens=len(prompt),
            max_new_tokens=body.max_tokens,
            min_new_tokens=body.min_tokens,
            seed=body.seed,
            logprobs=body.logprobs,
        )
        for i in range(n):
            own = replace(sampling, seed=fold_seed(sampling.seed + i))
            requests.append(Generate(prompt, own, body.priority or 0, adapter, matcher.copy() if matcher else None))
            outputs.append(TextOutput(service.tokenizer, own, stop=body.stop or (), skip_special=True))
    id, model = f"cmpl-{uuid.uuid4().hex}", body.model or service.options.model_name
    echoes = [service.tokenizer.decode(ids) if body.echo else "" for ids in prompts]
    return Job(id, int(time.time()), body, model, prompts, echoes, requests, outputs)


async def _completion(service: Service, job: Job) -> Response:
    steps: list[list[Step]] = [[] for _ in job.outputs]
    with service.entered():
        streams = [service.stream(*pair) for pair in zip(job.requests, job.outputs, strict=True)]
        async with aclosing(merge(streams)) as merged:
            async for index, step in merged:
                steps[index].append(step)
    choices = []
    for i, (output, own) in enumerate(zip(job.outputs, steps, strict=True)):
        tokens = [token for step in own for token in step.tokens]
        choices.append(
            {
                "index": i,
                "text": job.echo(i) + "".join(text_of(step) for step in own),
                "logprobs": _logprobs(output, tokens, 0) if job.body.logprobs is not None else None,
                "finish_reason": output.finish_reason,
                "matched_stop": output.matched_stop,
            }
        )
    return JSONResponse({**job.head(), "choices": choices, "usage": job.usage()})


async def _chunks(service: Service, job: Job) -> AsyncGenerator[Mapping[str, Any], None]:
    wanted, continuous = usage_wanted(job.body.stream_options)
    unfinished = len(job.outputs)
    offsets = [0] * len(job.outputs)
    echoed: set[int] = set()
    with service.entered():
        streams = [service.stream(*pair) for pair in zip(job.requests, job.outputs, strict=True)]
        async with aclosing(merge(streams)) as merged:
            async for index, step in merged:
                output = job.outputs[index]
                text = text_of(step)
                if index not in echoed:
                    echoed.add(index)
                    text = job.echo(index) + text
                unfinished -= step.ended
                if not (text or step.tokens or step.ended):
                    continue
                choice: dict[str, Any] = {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": output.finish_reason if step.ended else None,
                    "matched_stop": output.matched_stop if step.ended else None,
                }
                if job.body.logprobs is not None:
                    choice["logprobs"] = _logprobs(output, step.tokens, offsets[index])
                    offsets[index] += sum(len(token) for token in choice["logprobs"]["tokens"])
                if step.ended and wanted and not unfinished:
                    choice["usage"] = job.usage()
                yield {**job.head(), "choices": [choice], **({"usage": job.usage()} if continuous else {})}
        if wanted:
            yield {**job.head(), "choices": [], "usage": job.usage()}


def text_of(step: Step) -> str:
    return "".join(delta.text for delta in step.deltas if isinstance(delta, Content))


def _logprobs(output: TextOutput, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """OpenAI's four lists; offsets are in characters of the tokens' own texts."""
    texts = [token_text(output.tokenizer, token.id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {token_text(output.tokenizer, id): logprob for id, logprob in token.top.items()} for token in tokens
        ],
        "text_offset": offsets,
    }
