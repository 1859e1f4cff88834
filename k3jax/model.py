"""The forward pass. `step` runs the rows of one ragged step; `forward` is the rectangle [B, T] for research."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.attn_res import Residual, starts_block
from k3jax.cache import Cache, KdaCache, LayerCaches, MlaCache, check_cache, init_cache
from k3jax.config import K3Config
from k3jax.kda_layer import kda_layer
from k3jax.layers import linear, mlp
from k3jax.mla_layer import mla_layer
from k3jax.moe_layer import moe_layer
from k3jax.params import Kda, Layer, Moe, Params
from k3jax.rows import Rows, rectangle
from k3jax.vision.splice import Media
from pallas_kernels.norm import rms_norm

Taps = dict[str, Any]


def step[C: LayerCaches](
    cfg: K3Config,
    params: Params,
    tokens: jax.Array,
    rows: Rows,
    cache: C,
    taps: Taps | None = None,
    media: Media | None = None,
) -> tuple[jax.Array, C]:
    """One ragged step: tokens [M] int32 of the requests in `rows` -> hidden [M, D] after the final norm, cache.

    The cache may be dense or live in a server's pool. `taps`, when given, collects intermediates by name (see
    `forward_with_intermediates`). `media` replaces the embeddings of image tokens.
    """
    x = jnp.take(params.embed, tokens, axis=0).astype(cfg.dtype)
    if media is not None:
        x = jnp.where(media.present[:, None], media.rows.astype(cfg.dtype), x)
    residual = Residual(prefix=x)
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer{i}"):
            residual, new = _layer(cfg, i, layer, residual, rows, cache.read(i), cache.length, taps)
            cache = cache.write(i, new, rows)
    mixed = residual.read(cfg, params.out_res)
    hidden = rms_norm(mixed, params.norm, cfg.rms_norm_eps)
    if taps is not None:
        taps |= {"final_mix": mixed, "final_norm": hidden}
    return hidden, cache.advance(rows.count)


def _layer(
    cfg: K3Config,
    i: int,
    p: Layer,
    residual: Residual,
    rows: Rows,
    cache: KdaCache | MlaCache,
    length: jax.Array,
    taps: Taps | None,
) -> tuple[Residual, KdaCache | MlaCache]:
    x = rms_norm(residual.read(cfg, p.attn_res), p.attn_norm, cfg.rms_norm_eps)
    if starts_block(cfg, i):
        residual = residual.start_block()
    if isinstance(p.attn, Kda):
        assert isinstance(cache, KdaCache)
        attn_out, cache = kda_layer(cfg, p.attn, x, rows, cache)
    else:
        assert isinstance(cache, MlaCache)
        attn_out, cache = mla_layer(cfg, p.attn, x, rows, cache, length)
    residual = residual.add(attn_out)

    x = rms_norm(residual.read(cfg, p.ffn_res), p.ffn_norm, cfg.rms_norm_eps)
    if isinstance(p.ffn, Moe):
        ffn_out, ids, weights = moe_layer(cfg, p.ffn, x)
        if taps is not None:
            taps |= {f"layers.{i}.router_ids": ids, f"layers.{i}.router_weights": weights}
    else:
        ffn_out = mlp(cfg, p.ffn, x)
    residual = residual.add(ffn_out)
    if taps is not None:
        taps |= {
            f"layers.{i}.attn_out": attn_out,
            f"layers.{i}.ffn_out": ffn_out,
            f"layers.{i}.prefix": residual.prefix,
        }
        if residual.bank:
            taps[f"layers.{i}.bank"] = jnp.stack(residual.bank, axis=1)
    return residual, cache


def logits_of(params: Params, hidden: jax.Array) -> jax.Array:
    """hidden [..., D] -> logits [..., vocab] float32."""
    return linear(hidden, params.lm_head, jnp.float32)


@functools.partial(jax.jit, static_argnames=("cfg", "collect"))
def _forward(
    cfg: K3Config,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    collect: bool,
    media: Media | None = None,
):
    B, T = tokens.shape
    taps: Taps | None = {} if collect else None
    hidden, cache = step(cfg, params, tokens.reshape(B * T), rectangle(lengths, T), cache, taps, media)
    logits = logits_of(params, hidden).reshape(B, T, -1)
    shaped = {name: x.reshape(B, T, *x.shape[1:]) for name, x in (taps or {}).items()}
    return logits, cache, shaped


def forward(
    cfg: K3Config,
    params: Params,
    tokens: jax.Array,
    *,
    lengths: jax.Array | None = None,
    cache: Cache | None = None,
    media: Media | None = None,
) -> tuple[jax.Array, Cache]:
    """tokens [B, T] int32 -> (logits [B, T, vocab] float32 for every position, cache).

    With `cache` the tokens continue it. `lengths` [B] counts each row's real tokens when rows are padded on the
    right: padding never enters a state, and logits there mean nothing. `media` replaces the embeddings of image tokens
    (rows of B * T, see `vision.media_chunk`). Differentiable; jitted once per shape.
    Raises ValueError for ids outside the vocabulary or a cache without room (checked when values are concrete).
    """
    tokens, lengths, cache = _checked(cfg, params, tokens, lengths, cache)
    logits, cache, _ = _forward(cfg, params, tokens, lengths, cache, False, media)
    return logits, cache


def forward_with_intermediates(
    cfg: K3Config,
    params: Params,
    tokens: jax.Array,
    *,
    lengths: jax.Array | None = None,
    cache: Cache | None = None,
    media: Media | None = None,
) -> tuple[jax.Array, Cache, Taps]:
    """`forward` plus a dict of `layers.{i}.{attn_out,ffn_out,prefix,bank,router_ids,router_weights}`, `final_mix`
    and `final_norm`, each [B, T, ...]. `bank` stacks the finished blocks; router ids are in order of score."""
    tokens, lengths, cache = _checked(cfg, params, tokens, lengths, cache)
    return _forward(cfg, params, tokens, lengths, cache, True, media)


def _checked(
    cfg: K3Config, params: Params, tokens: Any, lengths: Any, cache: Cache | None
) -> tuple[jax.Array, jax.Array, Cache]:
    if not isinstance(params, Params) or len(params.layers) != cfg.num_hidden_layers:
        raise ValueError(
            f"params do not belong to a config of {cfg.num_hidden_layers} layers; pass those of this config"
        )
    if params.embed.shape != (cfg.vocab_size, cfg.hidden_size):
        raise ValueError(
            f"params embed {params.embed.shape}, the config ({cfg.vocab_size}, {cfg.hidden_size}); pass its own"
        )
    tokens = _integers("tokens", tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens has shape {tokens.shape}, expected a non-empty array [B, T]; add the batch axis")
    B, T = tokens.shape
    lengths = np.full(B, T) if lengths is None else _integers("lengths", lengths)
    if lengths.shape != (B,):
        raise ValueError(f"lengths has shape {lengths.shape}, expected ({B},); give one length per row")
    if cache is None:
        cache = init_cache(cfg, B, T)
    check_cache(cfg, cache, B)
    if isinstance(tokens, np.ndarray) and (tokens.min() < 0 or tokens.max() >= cfg.vocab_size):
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"token id {bad} is outside the vocabulary 0..{cfg.vocab_size - 1}; check the tokenizer")
    if isinstance(lengths, np.ndarray):
        if lengths.min() < 0 or lengths.max() > T:
            raise ValueError(f"lengths {lengths.tolist()} must lie in 0..{T}; count only the tokens given")
        if not isinstance(cache.length, jax.core.Tracer):
            need, room = int((np.asarray(cache.length) + lengths).max()), cache.capacity()
            if need > (cfg.max_position_embeddings if room is None else room):
                raise ValueError(
                    f"{need} tokens do not fit the cache of {room or cfg.max_position_embeddings};"
                    f" use init_cache(cfg, batch, max_len={need}) or more, up to {cfg.max_position_embeddings}"
                )
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), cache


def _integers(name: str, values: Any) -> Any:
    """A numpy array whose values can be checked (nothing wraps yet), or a tracer; ValueError for what is no integer."""
    try:
        array = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths; pad them and pass lengths") from None
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype}, expected integers of at most 64 bits; pass whole numbers")
    return array
