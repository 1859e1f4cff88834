"""/generate: the engine as it is, with ids in and out; streams are cumulative."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from serve.http.answer_grammar import Constraint, schema_constraint, text_matcher
from serve.http.backend import Generate
from serve.http.completions import prompts_of, text_of
from serve.http.errors import bad
from serve.http.format import EVENTS, service_of
from serve.http.outputs import Step, TextOutput, TokenLogprob
from serve.http.params import fold_seed, sampling_of
from serve.http.schemas import MAX_CHOICES, Generated, GenerateRequest
from serve.http.service import Service, merge
from serve.http.sse import plain_response, stream_response

router = APIRouter(tags=["Engine"])


@dataclass
class Sequence:
    """One continuation and what came of it so far."""

    request: Generate
    output: TextOutput
    started: float
    text: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.text.append(text_of(step))
        self.tokens += step.tokens

    def result(self, id: str) -> dict[str, Any]:
        output = self.output
        meta: dict[str, Any] = {
            "id": id,
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(self.request.prompt),
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "e2e_latency": time.perf_counter() - self.started,
        }
        if output.sampling.logprobs is not None:
            meta["output_token_logprobs"] = [[token.logprob, token.id, None] for token in self.tokens]
            if output.sampling.logprobs:
                meta["output_top_logprobs"] = [
                    [[logprob, id, None] for id, logprob in token.top.items()] for token in self.tokens
                ]
        return {"text": "".join(self.text), "output_ids": output.ids, "meta_info": meta}


@router.post("/generate", responses={200: {"model": Generated | list[Generated], "content": EVENTS}})
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue text or token ids; a list of prompts, or n above 1, gives a list of results."""
    service = service_of(request)
    sequences = await _prepare(service, body, int(request.headers.get("content-length", 0)))
    several = len(sequences) > 1 or isinstance(body.text, list)
    id = body.rid or uuid.uuid4().hex
    if body.stream:
        return await stream_response(request, _chunks(service, sequences, id, several), service.options.keep_alive)
    return await plain_response(request, _result(service, sequences, id, several))


async def _prepare(service: Service, body: GenerateRequest, size: int) -> list[Sequence]:
    if (body.text is None) == (body.input_ids is None):
        raise bad("text", "a request has either text or input_ids; give one of them")
    param, prompt = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    params = body.sampling_params
    adapter = service.adapter_of(None, body.lora_path)
    assert prompt is not None
    prompts = await service.offload(size, lambda: prompts_of(prompt, service, param))
    n = params.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise bad("n", f"n is {n} for {len(prompts)} prompts, the limit is {MAX_CHOICES} together; send fewer")
    matcher = await text_matcher(service, params, _schema(params.json_schema))
    out = []
    for ids in prompts:
        sampling = sampling_of(
            params,
            service.tokenizer,
            service.options,
            service.limits,
            prompt_tokens=len(ids),
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            seed=params.sampling_seed,
            logprobs=body.top_logprobs_num if body.return_logprob else None,
        )
        for i in range(n):
            own = replace(sampling, seed=fold_seed(sampling.seed + i))
            request = Generate(ids, own, body.priority, adapter, matcher.copy() if matcher else None)
            output = TextOutput(service.tokenizer, own, stop=params.stop or (), skip_special=params.skip_special_tokens)
            out.append(Sequence(request, output, time.perf_counter()))
    return out


async def _result(service: Service, sequences: list[Sequence], id: str, several: bool) -> Response:
    async for _ in _run(service, sequences):
        pass
    results = [sequence.result(id) for sequence in sequences]
    return JSONResponse(results if several else results[0])


async def _chunks(
    service: Service, sequences: list[Sequence], id: str, several: bool
) -> AsyncGenerator[Mapping[str, Any], None]:
    async with aclosing(_run(service, sequences)) as indices:
        async for index in indices:
            yield {**sequences[index].result(id), **({"index": index} if several else {})}


async def _run(service: Service, sequences: list[Sequence]) -> AsyncGenerator[int, None]:
    """Index of each sequence that grew, as it grows."""
    with service.entered():
        streams = [service.stream(sequence.request, sequence.output) for sequence in sequences]
        async with aclosing(merge(streams)) as merged:
            async for index, step in merged:
                sequences[index].add(step)
                yield index


def _schema(text: str | None) -> Constraint | None:
    if text is None:
        return None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise bad("json_schema", f"json_schema is {text[:60]!r}, which is no JSON object; give a schema as text")
    return schema_constraint("json_schema", schema, strict=False)


def _finish_reason(output: TextOutput) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": output.completion_tokens}
        case "stop":
            return {"type": "stop", "matched": output.matched_stop}
    return {"type": output.finish_reason}
