"""The decode loop that everything shares: prefill in chunks, then a multi-token loop on the device.

Shapes come from the bucket lists below, so a process compiles each of them once (`warmup` does it ahead of time).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cache import Cache, init_cache
from k3jax.config import K3Config, short
from k3jax.model import logits_of, step
from k3jax.params import Params
from k3jax.rows import rectangle
from k3jax.sample import Sampling, sample, sampling
from k3jax.vision.splice import Images, Media, media_chunk, prompt_images

CHUNKS = (16, 64, 256)  # rows of one prefill step; boundaries stay on multiples of 64
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = tuple(2**n for n in range(8, 21))  # cache capacity: 256 .. 1,048,576 tokens


def bucket(n: int, sizes: Sequence[int], what: str) -> int:
    """Smallest of `sizes` that holds n; ValueError names `what` when none does."""
    for size in sizes:
        if n <= size:
            return size
    raise ValueError(f"{what} {n} exceeds the largest bucket {sizes[-1]}; split it")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch between two steps. `logits` predict each row's next token; the buffers hold what was generated."""

    cache: Cache
    logits: jax.Array  # [B, vocab] float32
    tokens: jax.Array  # [B, N] int32, N is the cache capacity
    logprobs: jax.Array  # [B, N] float32, nats
    count: jax.Array  # [B] int32, tokens generated
    limit: jax.Array  # [B] int32, most tokens to generate
    stopped: jax.Array  # [B] bool, a stop id was drawn (it is the last generated token)

    @property
    def active(self) -> jax.Array:
        return ~self.stopped & (self.count < self.limit)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache", "logits"))
def prefill_chunk(
    cfg: K3Config,
    params: Params,
    tokens: jax.Array,
    count: jax.Array,
    cache: Cache,
    logits: jax.Array,
    media: Media | None = None,
) -> tuple[Cache, jax.Array]:
    """Absorb tokens [B, C] of which count [B] are real; `logits` [B, vocab] is replaced where a row had any."""
    rows = rectangle(count, tokens.shape[1])
    hidden, cache = step(cfg, params, tokens.reshape(-1), rows, cache, media=media)
    fresh = logits_of(params, rows.last(hidden))
    return cache, jnp.where((count > 0)[:, None], fresh, logits)


def prefill(
    cfg: K3Config,
    params: Params,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    logits: jax.Array | None = None,
    images: Sequence[Images] | None = None,
) -> tuple[Cache, jax.Array]:
    """Absorb ragged prompts, one per cache row (an empty one leaves its row alone), chunk by chunk.

    `images` gives each prompt the rows of its placeholder tokens. Returns the cache and the logits [B, vocab] after
    each row's last token. Donates `cache` and `logits`.
    """
    seen = prompt_images(cfg, prompts, images)
    lengths = np.array([len(p) for p in prompts], np.int32)
    if logits is None:
        logits = jnp.zeros((len(prompts), cfg.vocab_size), jnp.float32)
    done = 0
    while done < lengths.max():
        size = next((c for c in CHUNKS if lengths.max() - done <= c), CHUNKS[-1])
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            part = prompt[done : done + size]
            row[: len(part)] = part
        count = np.clip(lengths - done, 0, size).astype(np.int32)
        media = media_chunk(seen, done, size)
        cache, logits = prefill_chunk(cfg, params, jnp.asarray(tokens), jnp.asarray(count), cache, logits, media)
        done += size
    return cache, logits


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("state",))
def decode(
    cfg: K3Config,
    params: Params,
    state: DecodeState,
    how: Sampling,
    stop_ids: jax.Array,
    steps: jax.Array,
) -> DecodeState:
    """Run up to `steps` tokens of every active row on the device, ending early when none is active.

    stop_ids [K] int32 (pad with -1). Rows that are done take no part: their state and cache stay as they are.
    """

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, s = carry
        active = s.active
        token, logprob = sample(s.logits, how, s.cache.length)
        row = jnp.arange(token.shape[0])
        at = jnp.where(active, s.count, s.tokens.shape[1])  # out of range: dropped
        rows = rectangle(active.astype(jnp.int32), 1)
        hidden, cache = step(cfg, params, token, rows, s.cache)
        return i + 1, dataclasses.replace(
            s,
            cache=cache,
            logits=jnp.where(active[:, None], logits_of(params, hidden), s.logits),
            tokens=s.tokens.at[row, at].set(token, mode="drop"),
            logprobs=s.logprobs.at[row, at].set(logprob, mode="drop"),
            count=s.count + active,
            stopped=s.stopped | (active & jnp.isin(token, stop_ids)),
        )

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        return (carry[0] < steps) & jnp.any(carry[1].active)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns, one entry per prompt; a drawn stop id is not part of `tokens`."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # nats, of the unmodified distribution
    finish_reasons: list[str]  # "stop" or "length"


def start(
    cfg: K3Config,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    images: Sequence[Images] | None = None,
) -> DecodeState:
    """Check and absorb the prompts; the state holds a bucketed batch whose extra rows are done from the start."""
    ids = [_token_list(i, p) for i, p in enumerate(prompts)]
    limits: list = [max_new_tokens] * len(ids) if np.ndim(max_new_tokens) == 0 else [*max_new_tokens]  # type: ignore[misc]
    if images is not None and len(images) != len(ids):
        raise ValueError(f"images has {len(images)} entries for {len(ids)} prompts; give one list per prompt")
    longest = _check_prompts(cfg, ids, limits)
    capacity = min(bucket(longest, LENGTHS, "prompt plus new tokens"), cfg.max_position_embeddings)
    batch = bucket(len(ids), BATCHES, "batch of prompts")
    padding = batch - len(ids)
    cache = init_cache(cfg, batch, capacity)
    spliced = None if images is None else [*images, *[[]] * padding]
    cache, logits = prefill(cfg, params, ids + [[]] * padding, cache, images=spliced)
    return DecodeState(
        cache=cache,
        logits=logits,
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        logprobs=jnp.zeros((batch, capacity), jnp.float32),
        count=jnp.zeros(batch, jnp.int32),
        limit=jnp.asarray(limits + [0] * padding, jnp.int32),
        stopped=jnp.zeros(batch, bool),
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _token_list(i: int, prompt: object) -> list[int]:
    """Plain integers; ValueError for a prompt that is no flat list of whole numbers."""
    if isinstance(prompt, jax.Array | np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"prompt {i} is {short(prompt)}, not a list of token ids; pass a list of such lists")
    bad = next((t for t in prompt if not _is_integer(t)), None)
    if bad is not None:
        raise ValueError(f"prompt {i} holds {short(bad)}, not a token id; pass whole numbers")
    return [int(t) for t in prompt]


def _check_prompts(cfg: K3Config, prompts: list[list[int]], limits: list[int]) -> int:
    """Longest prompt plus its new tokens; ValueError on the first bad value."""
    if not prompts:
        raise ValueError("no prompts were given, the minimum is 1; pass a list of token lists")
    if len(limits) != len(prompts):
        raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts; give one per prompt")
    longest = 0
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {i} is empty, the minimum is 1 token; give some text")
        bad = next((t for t in prompt if not 0 <= t < cfg.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"prompt {i} has token id {short(bad)}, the vocabulary is 0..{cfg.vocab_size - 1}; check the tokenizer"
            )
        if not _is_integer(limit) or limit < 1:
            raise ValueError(f"max_new_tokens is {short(limit)}, the minimum is 1; ask for at least one token")
        if len(prompt) + limit > cfg.max_position_embeddings:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and asks for {limit} more, the limit is"
                f" {cfg.max_position_embeddings} together; shorten the prompt or lower max_new_tokens"
            )
        longest = max(longest, len(prompt) + limit)
    return longest


def generate(
    cfg: K3Config,
    params: Params,
    tokens: Sequence[Sequence[int]] | jax.Array,
    *,
    max_new_tokens: int | Sequence[int] = 32,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    key: jax.Array | None = None,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    images: Sequence[Images] | None = None,
) -> Generation:
    """Continue ragged prompts (token lists, or an array [B, T]) and return the new tokens.

    Each row gives the tokens it would give alone. Temperature 0 is greedy; above it pass `key`, or a `seed` for all
    rows or per row (64-bit; the lower 32 bits count).
    `stop_ids` defaults to the config's end of message; pass () to run to the limit. `images` lists for
    each prompt its images' rows (`vision.embed_pictures`), one row per placeholder token.
    """
    if not isinstance(tokens, list | tuple | jax.Array | np.ndarray):
        raise ValueError(f"tokens is {short(tokens)}, not a list of prompts; pass a list of token lists")
    prompts = list(np.asarray(tokens)) if isinstance(tokens, jax.Array | np.ndarray) else list(tokens)
    rows = len(prompts)
    how = sampling(
        rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=_seeds(rows, temperature, key, seed),
        batch=bucket(rows, BATCHES, "batch of prompts"),
    )
    stops = stop_array(cfg, stop_ids)
    state = start(cfg, params, prompts, max_new_tokens, images)
    state = decode(cfg, params, state, how, stops, jnp.int32(state.tokens.shape[1]))
    return collect(state, rows)


def stream(
    cfg: K3Config,
    params: Params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop_ids: Sequence[int] | None = None,
    every: int = 4,
    images: Images | None = None,
) -> Iterator[tuple[list[int], str | None]]:
    """`generate` of one prompt that hands over tokens every few steps: (new tokens, finish reason or None).

    The tokens together are those of `generate`; the last pair carries the finish reason.
    """
    if not _is_integer(every) or not 1 <= every < 2**31:
        raise ValueError(f"every is {short(every)}, the minimum is 1; hand over tokens every few steps")
    seeds = _seeds(1, temperature, None, seed)
    how = sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seeds)
    stops = stop_array(cfg, stop_ids)
    state = start(cfg, params, [prompt], max_new_tokens, None if images is None else [images])
    sent, done = 0, False
    while not done:
        state = decode(cfg, params, state, how, stops, jnp.int32(every))
        out = collect(state, 1)
        done = bool(state.stopped[0]) or int(state.count[0]) >= max_new_tokens
        yield out.tokens[0][sent:], out.finish_reasons[0] if done else None
        sent = len(out.tokens[0])


def _seeds(rows: int, temperature, key: jax.Array | None, seed) -> np.ndarray:
    if key is not None and seed is not None:
        raise ValueError("both key and seed were given, they say the same thing; pass one")
    if key is not None:
        return np.asarray(jax.random.bits(key, (BATCHES[-1],), jnp.uint32))[:rows]
    if seed is None and np.any(np.asarray(temperature) > 0):
        raise ValueError(f"temperature {temperature} needs randomness; pass key=jax.random.key(0) or seed=0")
    seeds = [0] if seed is None else list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed]
    if len(seeds) not in (1, rows):
        raise ValueError(f"seed has {len(seeds)} entries for {rows} prompts; give one, or one per prompt")
    bad = next((s for s in seeds if not _is_integer(s) or not -(2**63) <= s < 2**63), None)
    if bad is not None:
        raise ValueError(f"seed is {short(bad)}, allowed are 64-bit integers; choose one of them")
    return np.broadcast_to(np.array([int(s) & 0xFFFFFFFF for s in seeds], np.int64), (rows,))


STOP_IDS = 32  # stop ids a batch can have


def stop_array(cfg: K3Config, stop_ids: Sequence[int] | None) -> jax.Array:
    """[STOP_IDS] int32 padded with -1; None means the config's end of message."""
    if stop_ids is None:
        stop_ids = () if cfg.eos_token_id is None else (cfg.eos_token_id,)
    stop_ids = list(stop_ids) if np.ndim(stop_ids) == 1 or isinstance(stop_ids, range) else [stop_ids]  # type: ignore[list-item]
    bad = next((t for t in stop_ids if not _is_integer(t) or not 0 <= t < cfg.vocab_size), None)
    if bad is not None:
        raise ValueError(f"stop id {short(bad)} is outside the vocabulary 0..{cfg.vocab_size - 1}; check the tokenizer")
    if len(stop_ids) > STOP_IDS:
        raise ValueError(f"{len(stop_ids)} stop ids were given, the limit is {STOP_IDS}; pass fewer")
    return jnp.asarray([*stop_ids, *[-1] * (STOP_IDS - len(stop_ids))], jnp.int32)


def collect(state: DecodeState, rows: int) -> Generation:
    """Bring the generated tokens of the first `rows` rows to the host."""
    tokens, logprobs, count, stopped = jax.device_get((state.tokens, state.logprobs, state.count, state.stopped))
    kept = [int(n) - int(s) for n, s in zip(count[:rows], stopped[:rows], strict=True)]
    return Generation(
        tokens=[tokens[i, :n].tolist() for i, n in enumerate(kept)],
        logprobs=[logprobs[i, :n].tolist() for i, n in enumerate(kept)],
        finish_reasons=["stop" if s else "length" for s in stopped[:rows]],
    )


def warmup(cfg: K3Config, params: Params, *, batch: int = 1, max_len: int = 256) -> int:
    """Compile what `generate` uses for up to `batch` text prompts of up to `max_len` tokens, new ones included.

    Returns the number of shapes. Afterwards no call within those sizes compiles.
    """
    batches = [b for b in BATCHES if b <= bucket(batch, BATCHES, "batch of prompts")]
    lengths = [n for n in LENGTHS if n <= bucket(max_len, LENGTHS, "length")]
    shapes = [(b, n, chunk) for b in batches for n in lengths for chunk in CHUNKS]
    for b, n, chunk in shapes:
        capacity = min(n, cfg.max_position_embeddings)
        prompt = [0] * min(chunk, capacity - 1)
        new = max(1, capacity // 2 + 1 - len(prompt))  # lands in this length bucket, however short the prompt
        generate(cfg, params, [prompt] * b, max_new_tokens=[new] + [1] * (b - 1), stop_ids=range(0))
    return len(shapes)
