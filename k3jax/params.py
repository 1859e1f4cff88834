"""The parameter tree: dataclasses of arrays, and what each leaf is before it exists.

Weights are `[in, out]` in memory. `param_specs(cfg)` builds the same tree with `ParamSpec` leaves;
initialisation, loading, saving, counting and sharding all read that one description.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import MXFP4_BLOCK, K3Config
from pallas_kernels.mxfp4 import Mxfp4


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, dtype, logical axis names and initialiser of one weight."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = jnp.bfloat16
    init: str = "normal"

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} has {len(self.shape)} dims, axes {self.axes} has {len(self.axes)}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mlp:
    """Gated feed-forward: `down(act(gate x, up x))`."""

    gate: jax.Array  # [D, F]
    up: jax.Array  # [D, F]
    down: jax.Array  # [F, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moe:
    """Routed experts (latent when `latent_down` is set) plus one shared MLP."""

    router: jax.Array  # [D, E]
    router_bias: jax.Array  # [E] float32, selection only
    w1: jax.Array | Mxfp4  # gate, [E, D, F]; packed [E, F, D/2]
    w3: jax.Array | Mxfp4  # up
    w2: jax.Array | Mxfp4  # down, [E, F, D]; packed [E, D, F/2]
    shared: Mlp
    latent_down: jax.Array | None  # [D, latent]
    latent_norm: jax.Array | None  # [latent]
    latent_up: jax.Array | None  # [latent, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kda:
    """Kimi Delta Attention; H heads of K = V channels, P = H * K."""

    q_proj: jax.Array  # [D, P]
    k_proj: jax.Array  # [D, P]
    v_proj: jax.Array  # [D, P]
    conv: jax.Array  # [3, H, K, W] float32: q, k, v; tap W-1 is the current token
    a_log: jax.Array  # [H] float32
    dt_bias: jax.Array  # [H, K] float32
    f_a: jax.Array  # [D, K]
    f_b: jax.Array  # [K, P]
    b_proj: jax.Array  # [D, H]
    g_proj: jax.Array | None  # [D, P], full-rank output gate
    g_a: jax.Array | None  # [D, K], low-rank output gate
    g_b: jax.Array | None  # [K, P]
    o_norm: jax.Array  # [K] float32
    o_proj: jax.Array  # [P, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mla:
    """Multi-head latent attention without positions; N nope dims, R shared key dims, L latent."""

    q_proj: jax.Array | None  # [D, H*(N+R)] when there is no query latent
    q_a: jax.Array | None  # [D, Q]
    q_a_norm: jax.Array | None  # [Q]
    q_b: jax.Array | None  # [Q, H*(N+R)]
    kv_a: jax.Array  # [D, L+R]
    kv_a_norm: jax.Array  # [L]
    kv_b: jax.Array  # [L, H*(N+V)]
    g_proj: jax.Array | None  # [D, H*V]
    o_proj: jax.Array  # [H*V, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttnRes:
    """One attention-residual read: norm gain and score direction."""

    norm: jax.Array  # [D]
    proj: jax.Array  # [D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    attn_res: AttnRes | None
    attn_norm: jax.Array  # [D]
    attn: Kda | Mla
    ffn_res: AttnRes | None
    ffn_norm: jax.Array  # [D]
    ffn: Mlp | Moe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    embed: jax.Array  # [vocab, D]
    layers: tuple[Layer, ...]
    out_res: AttnRes | None
    norm: jax.Array  # [D]
    lm_head: jax.Array  # [D, vocab]
    vision: dict[str, jax.Array] | None  # checkpoint name -> array in checkpoint layout


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def leaf_paths(params: Params) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every parameter or `ParamSpec`, in tree order."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_spec)[0]:
        yield ".".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in keys), leaf


def param_specs(cfg: K3Config) -> Params:
    """The parameter tree of `cfg` with `ParamSpec` leaves; allocates nothing."""
    D = cfg.hidden_size
    return Params(
        embed=_spec((cfg.vocab_size, D), ("vocab", "embed")),
        layers=tuple(_layer(cfg, i) for i in range(cfg.num_hidden_layers)),
        out_res=_attn_res(cfg),
        norm=_norm(D),
        lm_head=_spec((D, cfg.vocab_size), ("embed", "vocab")),
        vision=_vision(cfg),
    )


def _spec(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any = jnp.bfloat16, init: str = "normal") -> Any:
    """A spec that stands where the array will be, hence Any."""
    return ParamSpec(shape, axes, dtype, init)


def _norm(width: int, dtype: Any = jnp.bfloat16) -> Any:
    return _spec((width,), (None,), dtype, "ones")


def _attn_res(cfg: K3Config) -> AttnRes | None:
    if cfg.attn_res_block_size is None:
        return None
    return AttnRes(norm=_norm(cfg.hidden_size), proj=_spec((cfg.hidden_size,), (None,)))


def _layer(cfg: K3Config, i: int) -> Layer:
    return Layer(
        attn_res=_attn_res(cfg),
        attn_norm=_norm(cfg.hidden_size),
        attn=_kda(cfg) if cfg.layer_types[i] == "kda" else _mla(cfg),
        ffn_res=_attn_res(cfg),
        ffn_norm=_norm(cfg.hidden_size),
        ffn=_moe(cfg) if cfg.is_moe(i) else _mlp(cfg.hidden_size, cfg.intermediate_size),
    )


def _kda(cfg: K3Config) -> Kda:
    D, H, K, P = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim, cfg.kda_width
    wide = _spec((D, P), ("embed", "heads"))
    low = _spec((D, K), ("embed", None)), _spec((K, P), (None, "heads"))
    full = cfg.use_full_rank_gate
    return Kda(
        q_proj=wide,
        k_proj=wide,
        v_proj=wide,
        conv=_spec((3, H, K, cfg.short_conv_kernel_size), (None, "heads", None, None), jnp.float32, "conv"),
        a_log=_spec((H,), ("heads",), jnp.float32, "a_log" if cfg.gate_lower_bound is None else "zeros"),
        dt_bias=_spec((H, K), ("heads", None), jnp.float32, "dt_bias"),
        f_a=low[0],
        f_b=low[1],
        b_proj=_spec((D, H), ("embed", "heads")),
        g_proj=wide if full else None,
        g_a=None if full else low[0],
        g_b=None if full else low[1],
        o_norm=_norm(K, jnp.float32),
        o_proj=_spec((P, D), ("heads", "embed")),
    )


def _mla(cfg: K3Config) -> Mla:
    D, H, L, Q = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.q_lora_rank
    query, value = H * cfg.qk_head_dim, H * cfg.v_head_dim
    return Mla(
        q_proj=_spec((D, query), ("embed", "heads")) if Q is None else None,
        q_a=None if Q is None else _spec((D, Q), ("embed", None)),
        q_a_norm=None if Q is None else _norm(Q),
        q_b=None if Q is None else _spec((Q, query), (None, "heads")),
        kv_a=_spec((D, cfg.mla_cache_width), ("embed", None)),
        kv_a_norm=_norm(L),
        kv_b=_spec((L, H * (cfg.qk_nope_head_dim + cfg.v_head_dim)), (None, "heads")),
        g_proj=_spec((D, value), ("embed", "heads")) if cfg.mla_use_output_gate else None,
        o_proj=_spec((value, D), ("heads", "embed")),
    )


def _mlp(width: int, inner: int) -> Mlp:
    up = _spec((width, inner), ("embed", "ffw"))
    return Mlp(gate=up, up=up, down=_spec((inner, width), ("ffw", "embed")))


def _moe(cfg: K3Config) -> Moe:
    D, E, F, latent = (
        cfg.hidden_size,
        cfg.num_experts,
        cfg.moe_intermediate_size,
        cfg.routed_expert_hidden_size,
    )
    W = cfg.expert_width

    def matrix(inner: int, outer: int):
        axes = ("experts", "expert_in", "expert_out")
        if not cfg.mxfp4_experts:
            return _spec((E, inner, outer), axes)
        packed = _spec((E, outer, inner // 2), ("experts", "expert_out", "expert_in"), jnp.uint8, "mxfp4")
        scale = _spec(
            (E, outer, inner // MXFP4_BLOCK),
            ("experts", "expert_out", "expert_in"),
            jnp.uint8,
            "mxfp4_scale",
        )
        return Mxfp4(packed=packed, scale=scale)

    return Moe(
        router=_spec((D, E), ("embed", None)),
        router_bias=_spec((E,), (None,), jnp.float32, "zeros"),
        w1=matrix(W, F),
        w3=matrix(W, F),
        w2=matrix(F, W),
        shared=_mlp(D, cfg.num_shared_experts * F),
        latent_down=None if latent is None else _spec((D, latent), ("embed", None)),
        latent_norm=_norm(latent) if latent is not None and cfg.latent_moe_use_norm else None,
        latent_up=None if latent is None else _spec((latent, D), (None, "embed")),
    )


def _vision(cfg: K3Config) -> dict[str, Any] | None:
    """MoonViT3d and projector under their checkpoint names and layout (spec model 9.7)."""
    v = cfg.vision
    if v is None:
        return None
    D, F = v.vt_hidden_size, v.vt_intermediate_size
    merged = v.mm_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]

    def weight(*shape: int) -> Any:
        return _spec(shape, (None,) * len(shape))

    specs = {
        "vision_tower.patch_embed.proj.weight": weight(D, 3, v.patch_size, v.patch_size),
        "vision_tower.patch_embed.pos_emb.weight": weight(v.init_pos_emb_height, v.init_pos_emb_width, D),
        "vision_tower.encoder.final_layernorm.weight": _norm(D),
        "mm_projector.proj.0.weight": weight(merged, merged),
        "mm_projector.proj.2.weight": weight(cfg.hidden_size, merged),
        "mm_projector.post_norm.weight": _norm(cfg.hidden_size),
    }
    for b in range(v.vt_num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{b}."
        specs |= {
            block + "norm0.weight": _norm(D),
            block + "norm1.weight": _norm(D),
            block + "wqkv.weight": weight(3 * v.qkv_hidden_size, D),
            block + "wo.weight": weight(D, v.qkv_hidden_size),
            block + "mlp.fc0.weight": weight(F, D),
            block + "mlp.fc1.weight": weight(D, F),
        }
    return specs
