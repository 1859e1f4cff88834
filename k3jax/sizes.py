"""Size arithmetic of a config: parameters, bytes, cache per token, state per request. Allocates nothing."""

import dataclasses
import math

from k3jax.checkpoint_map import Entry, entries
from k3jax.config import K3Config
from k3jax.params import param_specs


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the stored checkpoint: counts, and bytes by kind ("MXFP4 experts", "BF16", "F32")."""

    tensors: int
    parameters: int
    text_parameters: int
    active_parameters: int  # per token, text model with both vocabulary tables
    active_without_embedding: int
    nbytes: int
    bytes_by_kind: dict[str, int]
    parameters_by_part: dict[str, int]


def sizes(cfg: K3Config) -> Sizes:
    """Counted from the name table, so A_log's padding is included as it is on disk (spec model 11.1)."""
    table = entries(cfg, param_specs(cfg))
    by_part: dict[str, int] = {}
    by_kind: dict[str, int] = {}
    for entry in table:
        part = _part(cfg, entry)
        by_part[part] = by_part.get(part, 0) + parameters(entry)
        kind = _kind(entry)
        by_kind[kind] = by_kind.get(kind, 0) + nbytes(entry)
    total, vision, routed = (
        sum(by_part.values()),
        by_part.get("vision and projector", 0),
        by_part.get("routed experts", 0),
    )
    idle = routed * (cfg.num_experts - cfg.num_experts_per_token) // cfg.num_experts
    active = total - vision - idle
    return Sizes(
        tensors=sum(len(e.names) for e in table),
        parameters=total,
        text_parameters=total - vision,
        active_parameters=active,
        active_without_embedding=active - cfg.vocab_size * cfg.hidden_size,
        nbytes=sum(by_kind.values()),
        bytes_by_kind=by_kind,
        parameters_by_part=by_part,
    )


def parameters(entry: Entry) -> int:
    """Weights that an entry stands for: two per packed byte, none for scales."""
    if entry.path.endswith(".scale"):
        return 0
    stored = len(entry.names) * math.prod(entry.stored_shape)
    return 2 * stored if entry.path.endswith(".packed") else stored


def nbytes(entry: Entry) -> int:
    return len(entry.names) * math.prod(entry.stored_shape) * itemsize(entry)


def itemsize(entry: Entry) -> int:
    return entry.spec.nbytes // entry.spec.size


def _kind(entry: Entry) -> str:
    if entry.path.endswith((".packed", ".scale")):
        return "MXFP4 experts"
    return "F32" if itemsize(entry) == 4 else "BF16"


def _part(cfg: K3Config, entry: Entry) -> str:
    path = entry.path
    if path.startswith("vision."):
        return "vision and projector"
    if path in ("embed", "lm_head"):
        return "embedding and head"
    for piece, part in (
        (".ffn.w", "routed experts"),
        (".ffn.shared.", "shared experts"),
        (".ffn.latent_", "latent projections"),
        (".ffn.router", "router"),
        (".ffn.", "dense MLP"),
    ):
        if piece in path:
            return part
    if ".attn." in path:
        return "KDA" if cfg.layer_types[int(path.split(".")[1])] == "kda" else "MLA"
    return "norms and residual mixing"


def kv_bytes_per_token(cfg: K3Config, itemsize: int = 2) -> int:
    """MLA cache of one token over all layers (spec model 11.3)."""
    return len(cfg.mla_layers) * cfg.mla_cache_width * itemsize


def recurrent_bytes_per_request(cfg: K3Config, itemsize: int = 4) -> int:
    """KDA recurrent state of one request over all layers and ranks (spec model 11.2)."""
    return len(cfg.kda_layers) * cfg.kda_num_heads * cfg.kda_head_dim**2 * itemsize


def conv_bytes_per_request(cfg: K3Config, itemsize: int = 2) -> int:
    """Short-convolution window of one request over all layers and ranks."""
    return len(cfg.kda_layers) * (cfg.short_conv_kernel_size - 1) * 3 * cfg.kda_width * itemsize
