"""MoonViT3d and the projector: patches to rows of the text model's width (spec model 9.3 to 9.5).

Parameters are `params.vision`: checkpoint name -> array in checkpoint layout, linears [out, in]. Activations have the
config's dtype; norms, softmax, rotary, GELU and positions are float32.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from k3jax.config import K3Config, VisionConfig
from k3jax.params import Params
from k3jax.vision.attention import item_attention
from k3jax.vision.pack import Packed, batches, pack
from k3jax.vision.picture import Picture
from k3jax.vision.position import rotary_angles, rotate, table_embedding, time_embedding
from pallas_kernels.norm import rms_norm

Weights = Mapping[str, jax.Array]
NORM_EPS = 2.0**-23  # of the tower; the released modules take torch's default for float32


def patch_embed(v: VisionConfig, p: Weights, packed: Packed, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[N, D]: linear map of each patch plus its position."""
    pixels = packed.pixels.reshape(len(packed.pixels), -1).astype(dtype)
    weight = p["vision_tower.patch_embed.proj.weight"]
    x = _linear(pixels, weight.reshape(weight.shape[0], -1), jnp.float32)
    x += table_embedding(p["vision_tower.patch_embed.pos_emb.weight"], packed.place, packed.grid)
    if packed.source.shape[1] > 1:  # there are videos
        x += time_embedding(v.init_pos_emb_time, v.vt_hidden_size, packed.place, packed.grid)
    return x.astype(dtype)


def encoder(v: VisionConfig, p: Weights, x: jax.Array, packed: Packed) -> jax.Array:
    """x [N, D] -> [N, D] after the final norm."""
    angles = rotary_angles(packed.place, v.qkv_hidden_size // v.vt_num_attention_heads)
    for b in range(v.vt_num_hidden_layers):
        with jax.named_scope(f"vision{b}"):
            x = _block(v, p, f"vision_tower.encoder.blocks.{b}.", x, packed.item, angles)
    return rms_norm(x, p["vision_tower.encoder.final_layernorm.weight"], NORM_EPS)


def merge(x: jax.Array, packed: Packed) -> jax.Array:
    """x [N, D] -> [M, corners, D]: the patches of each token in row-major order, averaged over its frames."""
    parts = x.at[packed.source].get(mode="fill", fill_value=0).astype(jnp.float32)  # [M, F, corners, D]
    mean = parts.sum(1) / packed.frames[:, None, None].astype(jnp.float32)
    return mean.astype(x.dtype)


def projector(v: VisionConfig, p: Weights, x: jax.Array) -> jax.Array:
    """x [M, corners, D] -> [M, text width]."""
    x = _linear(x.reshape(len(x), -1), p["mm_projector.proj.0.weight"])
    x = jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)
    x = _linear(x, p["mm_projector.proj.2.weight"])
    return rms_norm(x, p["mm_projector.post_norm.weight"], v.projector_ln_eps)


def tower(v: VisionConfig, p: Weights, packed: Packed, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[M, corners, D]: the tower's output; tokens that no item has are 0."""
    return merge(encoder(v, p, patch_embed(v, p, packed, dtype), packed), packed)


@functools.partial(jax.jit, static_argnames=("cfg",))
def embed_packed(cfg: K3Config, vision: Weights, packed: Packed) -> jax.Array:
    """[M, text width] in the config's dtype: tokens of all items in order, then 0."""
    assert cfg.vision is not None
    return projector(cfg.vision, vision, tower(cfg.vision, vision, packed, cfg.dtype))


def embed_pictures(cfg: K3Config, params: Params, pictures: Sequence[Picture]) -> list[np.ndarray]:
    """One array [tokens, text width] per picture, in order, on the host; small ones go through the tower together.

    Compiles once per entry of `pack.PATCHES` that occurs. ValueError for a model without vision.
    """
    check_vision(cfg, pictures)
    assert cfg.vision is not None and params.vision is not None
    out: list[np.ndarray] = []
    for group in batches(picture.grid for picture in pictures):
        some = [pictures[i] for i in group]
        packed = pack(cfg.vision, np.concatenate([picture.patches() for picture in some]), [p.grid for p in some])
        rows = np.asarray(embed_packed(cfg, params.vision, packed))
        ends = np.cumsum([picture.tokens for picture in some])
        out += [rows[end - picture.tokens : end].copy() for end, picture in zip(ends, some, strict=True)]
    return out


def check_vision(cfg: K3Config, pictures: Sequence[Picture] = ()) -> VisionConfig:
    """The vision config; ValueError for a model that cannot see, or pictures cut for another tower."""
    if cfg.vision is None or cfg.media_placeholder_token_id is None:
        raise ValueError("this model has no vision tower; leave the images out or use a checkpoint with vision")
    want = (cfg.vision.patch_size, cfg.vision.merge_kernel_size)
    for picture in pictures:
        media = picture.media
        have = (media.patch_size, (media.merge_kernel_size, media.merge_kernel_size))
        if have != want:
            raise ValueError(f"pictures have patch and merge sizes {have}, the tower {want}; use its own MediaConfig")
    return cfg.vision


def _block(v: VisionConfig, p: Weights, name: str, x: jax.Array, item: jax.Array, angles: jax.Array) -> jax.Array:
    N, H = x.shape[0], v.vt_num_attention_heads
    y = rms_norm(x, p[name + "norm0.weight"], NORM_EPS)
    q, k, value = jnp.moveaxis(_linear(y, p[name + "wqkv.weight"]).reshape(N, 3, H, -1), 1, 0)  # [N, H, K] each
    q, k = rotate(q, angles), rotate(k, angles)
    o = item_attention(q, k, value, item, q.shape[-1] ** -0.5)
    x = x + _linear(o.reshape(N, -1), p[name + "wo.weight"])
    y = _linear(rms_norm(x, p[name + "norm1.weight"], NORM_EPS), p[name + "mlp.fc0.weight"])
    y = jax.nn.gelu(y.astype(jnp.float32), approximate=True).astype(x.dtype)
    return x + _linear(y, p[name + "mlp.fc1.weight"])


def _linear(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x [..., in], weight [out, in] as stored; accumulates in float32, rounds once."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x.dtype)
