"""Pieces of OpenAI's objects that several routes need."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from k3jax.chat.tokenizer import Tokenizer
from serve.http.outputs import Output, TokenLogprob
from serve.http.schemas import StreamOptions
from serve.http.service import Service

EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}  # of a streaming route, for the OpenAPI document


def service_of(request: Request) -> Service:
    return request.app.state.service


def full_usage(prompt_tokens: int, outputs: Sequence[Output]) -> dict[str, Any]:
    """Usage of choices that share a prompt, or of one that has its own."""
    completion = sum(output.completion_tokens for output in outputs)
    reasoning = sum(output.reasoning_tokens for output in outputs)
    cached = max(output.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt_tokens)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "reasoning_tokens": reasoning,
    }


def usage_wanted(options: StreamOptions | None) -> tuple[bool, bool]:
    """(at the end of a stream, in every chunk): at the end unless switched off."""
    if options is None:
        return True, False
    wanted = options.include_usage is not False
    return wanted, wanted and bool(options.continuous_usage_stats)


def token_text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.token_bytes(id).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Every generated token, also those of the think channel and of markers."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, id),
            "bytes": list(tokenizer.token_bytes(id)),
            "logprob": logprob,
        }

    return {
        "content": [
            {
                **entry(token.id, token.logprob),
                "top_logprobs": [entry(*item) for item in sorted(token.top.items(), key=lambda item: -item[1])],
            }
            for token in tokens
        ]
    }
