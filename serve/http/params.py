"""Sampling parameters of a request, checked against the model and, if asked, against K3's own ranges."""

import secrets
from collections.abc import Iterable

from k3jax.chat.tokenizer import Tokenizer
from serve.http.backend import Limits, Sampling
from serve.http.errors import ApiError, bad
from serve.http.options import Options
from serve.http.schemas import SamplingFields

K3_TOP_P = 0.95


def check_strict(fields: SamplingFields, options: Options) -> None:
    """With `strict_k3_params`, only the parameters that K3 is meant for (spec serving 10.1)."""
    if not options.strict_k3_params:
        return
    allowed = {"top_p": K3_TOP_P, "presence_penalty": 0, "frequency_penalty": 0, "n": 1}
    for name, value in allowed.items():
        given = getattr(fields, name)
        if given is not None and given != value:
            raise bad(name, f"{name} is {given}, K3 takes {value} only; leave {name} out")
    if fields.temperature is not None and fields.temperature > 1:
        raise bad("temperature", f"temperature is {fields.temperature}, K3 takes 0 to 1; lower it or leave it out")


def sampling_of(
    fields: SamplingFields,
    tokenizer: Tokenizer,
    options: Options,
    limits: Limits,
    *,
    prompt_tokens: int,
    max_new_tokens: int | None,
    min_new_tokens: int | None,
    seed: int | None,
    logprobs: int | None,
) -> Sampling:
    """What the backend gets; `max_new_tokens` is cut to what fits behind the prompt, None asks for all of that.

    A request without a seed draws one here, so that it gives the same tokens after the engine moved or restarted it.
    """
    check_strict(fields, options)
    room = limits.longest - prompt_tokens
    longest = room if max_new_tokens is None else min(max_new_tokens, room)
    shortest = min_new_tokens or 0
    if max_new_tokens is not None and shortest > max_new_tokens:
        raise bad("min_tokens", f"min_tokens is {shortest}, above the {max_new_tokens} of max_tokens; lower it")
    stop_ids = [
        *(() if fields.ignore_eos else tokenizer.stop_ids),
        *_in_vocabulary("stop_token_ids", fields.stop_token_ids or (), tokenizer.vocab_size),
    ]
    default_top_p = K3_TOP_P if options.strict_k3_params else options.top_p
    return Sampling(
        max_new_tokens=longest,
        temperature=_or(fields.temperature, options.temperature),
        top_k=max(fields.top_k or 0, 0),
        top_p=_or(fields.top_p, default_top_p),
        min_p=fields.min_p or 0.0,
        seed=secrets.randbits(32) if seed is None else fold_seed(seed),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=logprobs,
        logit_bias=_bias(fields.logit_bias or {}, tokenizer.vocab_size),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        ignore_eos=bool(fields.ignore_eos),
        min_new_tokens=min(shortest, longest),
    )


def check_length(prompt_tokens: int, limits: Limits, param: str) -> None:
    """A prompt has at least one token and leaves room for one more."""
    if prompt_tokens < 1:
        raise bad(param, f"{param} has no tokens, the minimum is 1; give some text")
    if prompt_tokens >= limits.longest:
        raise ApiError(
            400,
            f"{param} has {prompt_tokens} tokens, the limit is {limits.longest - 1} so that one more fits;"
            " shorten the prompt",
            param,
            "context_length_exceeded",
        )


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Every id is one of the vocabulary."""
    _in_vocabulary(param, ids, vocab_size)


def fold_seed(seed: int) -> int:
    """A signed 64-bit seed as 32 bits; small ones stay as they are."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low ^ (high * 0x9E3779B1 & 0xFFFFFFFF)


def _in_vocabulary(param: str, ids: Iterable[int], vocab_size: int) -> Iterable[int]:
    for id in ids:
        if not 0 <= id < vocab_size:
            raise bad(param, f"{param} has {id}, the vocabulary is 0 to {vocab_size - 1}; use ids of this model")
    return ids


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in bias:
        if not key.isdecimal() or len(key) > 10:
            raise bad("logit_bias", f"logit_bias has the key {key[:40]!r}, which is no token id; use ids as keys")
    ids = {int(key): value for key, value in bias.items()}
    check_ids("logit_bias", ids, vocab_size)
    return ids


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
