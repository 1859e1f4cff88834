"""/v1/chat/completions: a chat request to generations, and their outputs to OpenAI's objects."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from k3jax.chat.deltas import CallArguments, CallStart, Content, Delta, Finish, Reasoning, join
from serve.http.answer_grammar import chat_matcher
from serve.http.backend import Generate
from serve.http.errors import bad
from serve.http.format import EVENTS, chat_logprobs, full_usage, service_of, usage_wanted
from serve.http.outputs import ChatOutput, Step
from serve.http.params import check_length, fold_seed, sampling_of
from serve.http.prompt import ChatPrompt, chat_prompt
from serve.http.schemas_chat import ChatCompletion, ChatRequest
from serve.http.service import Service, merge
from serve.http.sse import plain_response, stream_response

router = APIRouter(tags=["OpenAI"])


@dataclass(frozen=True)
class Job:
    """A checked chat request: one generation and one output per choice."""

    id: str
    model: str
    created: int
    body: ChatRequest
    prompt: ChatPrompt
    requests: list[Generate]
    outputs: list[ChatOutput]

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        return full_usage(len(self.prompt.ids) - self.prompt.unbilled, self.outputs)

    def call(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        """A tool call whose id goes on counting where the history stopped."""
        id = f"{name}:{self.prompt.calls_before + index}"
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": EVENTS}})
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    job = await prepare(service, body, int(request.headers.get("content-length", 0)))
    if body.stream:
        return await stream_response(request, chunks(service, job), service.options.keep_alive)
    return await plain_response(request, completion(service, job))


async def prepare(service: Service, body: ChatRequest, size: int) -> Job:
    """Everything that can be refused, before anything is generated; `size` of the request in bytes."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", f"top_logprobs is {body.top_logprobs} without logprobs; set logprobs to true")
    tokenizer, options, limits = service.tokenizer, service.options, service.limits
    adapter = service.adapter_of(body.model, body.lora_path)
    prompt = await service.offload(size, lambda: chat_prompt(body, tokenizer, options))
    check_length(len(prompt.ids), limits, "messages")
    sampling = sampling_of(
        body,
        tokenizer,
        options,
        limits,
        prompt_tokens=len(prompt.ids),
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    outputs = [
        ChatOutput(
            tokenizer,
            sampling,
            thinking=prompt.thinking,
            calls=bool(prompt.functions) and prompt.choice != "none",
            stop=body.stop or (),
            stream_calls=bool(body.stream) and not options.whole_tool_calls,
        )
        for _ in range(body.n or 1)
    ]
    matcher = await chat_matcher(service, body, prompt)
    requests = [
        Generate(
            prompt.ids,
            replace(sampling, seed=fold_seed(sampling.seed + i)),
            body.priority or 0,
            adapter,
            matcher.copy() if matcher else None,
        )
        for i in range(len(outputs))
    ]
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return Job(id, body.model or options.model_name, int(time.time()), body, prompt, requests, outputs)


async def completion(service: Service, job: Job) -> Response:
    """The whole answer."""
    steps: list[list[Step]] = [[] for _ in job.outputs]
    with service.entered():
        streams = [service.stream(*pair) for pair in zip(job.requests, job.outputs, strict=True)]
        async with aclosing(merge(streams)) as merged:
            async for index, step in merged:
                steps[index].append(step)
    choices = [_choice(job, i, own) for i, own in enumerate(steps)]
    return JSONResponse({**job.head("chat.completion"), "choices": choices, "usage": job.usage()})


def _choice(job: Job, index: int, steps: list[Step]) -> dict[str, Any]:
    output = job.outputs[index]
    answer = join([delta for step in steps for delta in step.deltas])
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content,
        "reasoning_content": answer.reasoning or None,
    }
    if answer.tool_calls:
        message["tool_calls"] = [job.call(i, call.name, call.arguments) for i, call in enumerate(answer.tool_calls)]
    tokens = [token for step in steps for token in step.tokens]
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(output.tokenizer, tokens) if job.body.logprobs else None,
        "finish_reason": output.finish_reason,
        "matched_stop": output.matched_stop,
    }


async def chunks(service: Service, job: Job) -> AsyncGenerator[Mapping[str, Any], None]:
    """The answer in pieces: a role, deltas, a finish reason per choice, and the usage."""
    wanted, continuous = usage_wanted(job.body.stream_options)
    open_choices = set(range(len(job.outputs)))

    def chunk(index: int, delta: Mapping[str, Any], logprobs: Any = None, **more: Any) -> dict[str, Any]:
        fields = {"content": None, "reasoning_content": None, **delta}
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": None, **more}
        usage = {"usage": job.usage()} if continuous else {}
        return {**job.head("chat.completion.chunk"), "choices": [choice], **usage}

    with service.entered():
        streams = [service.stream(*pair) for pair in zip(job.requests, job.outputs, strict=True)]
        begun: set[int] = set()
        held: list[list[Any]] = [[] for _ in job.outputs]  # log-probabilities of tokens that gave no delta yet
        async with aclosing(merge(streams)) as merged:
            async for index, step in merged:
                output = job.outputs[index]
                if index not in begun:
                    begun.add(index)
                    yield chunk(index, {"role": "assistant", "content": ""})
                held[index] += step.tokens
                for delta in step.deltas:
                    fields = _delta(job, delta)
                    if fields is not None:
                        tokens, held[index] = held[index], []
                        logprobs = chat_logprobs(output.tokenizer, tokens) if job.body.logprobs else None
                        yield chunk(index, fields, logprobs)
                if step.ended:
                    open_choices.discard(index)
                    more: dict[str, Any] = {
                        "finish_reason": output.finish_reason,
                        "matched_stop": output.matched_stop,
                    }
                    if wanted and not open_choices:
                        more["usage"] = job.usage()
                    rest = chat_logprobs(output.tokenizer, held[index]) if held[index] else None
                    yield chunk(index, {}, rest, **more)
        if wanted:
            yield {**job.head("chat.completion.chunk"), "choices": [], "usage": job.usage()}


def _delta(job: Job, delta: Delta) -> dict[str, Any] | None:
    match delta:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **job.call(index, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case Finish():
            return None
    return None  # Relabel: what was sent as reasoning follows again as content
