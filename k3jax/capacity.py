"""How many requests and tokens fit a group of GPUs (the arithmetic of spec serving 13)."""

import dataclasses
import math

from k3jax.config import K3Config, short
from k3jax.sizes import (
    conv_bytes_per_request,
    kv_bytes_per_token,
    recurrent_bytes_per_request,
    sizes,
)

STATE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_BYTES = {"bfloat16": 2, "fp8": 1}


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A group of GPUs and how the model lies on it; memory in bytes.

    Attention, dense and vocabulary weights are cut over `tp` GPUs and repeated per group of tp; routed experts are
    cut over all GPUs. `dcp` ranks of a tp group share one copy of the MLA cache.
    """

    gpus: int = 8
    gpu_memory: int = 141 * 10**9
    memory_fraction: float = 0.9
    tp: int = 8
    dcp: int = 1
    page: int = 64
    slots: int = 3
    state_dtype: str = "float32"
    kv_dtype: str = "bfloat16"
    workspace: int = 4 * 10**9  # activations, communication buffers, executables, per GPU

    def __post_init__(self):
        for name, most in (
            ("gpus", 10**6),
            ("gpu_memory", 10**15),
            ("tp", 10**6),
            ("dcp", 10**6),
            ("page", 2**20),
            ("slots", 10**6),
        ):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {short(value)}, allowed is 1 to {most}; give a number in that range")
        if not 0 <= self.workspace <= self.gpu_memory:
            raise ValueError(
                f"workspace is {short(self.workspace)}, allowed is 0 to the GPU's memory of {self.gpu_memory} bytes;"
                " give a number in that range"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory fraction is {self.memory_fraction}, allowed is above 0 to 1; choose a value in that range"
            )
        if self.gpus % self.tp:
            raise ValueError(f"tp {self.tp} does not divide {self.gpus} GPUs; choose a divisor")
        if self.tp % self.dcp:
            raise ValueError(f"dcp {self.dcp} does not divide tp {self.tp}; choose a divisor")
        for name, known in (("state_dtype", STATE_BYTES), ("kv_dtype", KV_BYTES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, supported are {', '.join(known)}; use one of these"
                )


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Per GPU unless named otherwise, in bytes and tokens."""

    weights: int
    pool: int  # what is left for states and pages; may be negative
    state_slot: int  # one KDA state with its convolution window
    kv_token: float  # MLA cache per logical token
    request: int  # slots and pages of one request of `length` tokens
    length: int
    requests_per_group: int
    requests: int  # over all groups of tp GPUs
    tokens: int  # cached tokens of those requests, over all groups
    tokens_alone: int  # longest single request
    limit: str  # which part of a request takes most of the pool, or "weights"


def capacity(cfg: K3Config, where: Deployment, length: int) -> Capacity:
    """What fits when every request holds `length` tokens and `where.slots` KDA states."""
    if not 1 <= length <= cfg.max_position_embeddings:
        raise ValueError(
            f"length is {short(length)}, allowed is 1 to {cfg.max_position_embeddings} tokens; choose one there"
        )
    for name, heads in (("KDA heads", cfg.kda_num_heads), ("MLA heads", cfg.num_attention_heads)):
        if heads % where.tp:
            raise ValueError(f"tp {where.tp} does not divide {heads} {name}; choose a divisor")
    if cfg.num_experts % where.gpus:
        raise ValueError(f"{where.gpus} GPUs do not divide {cfg.num_experts} experts; choose a divisor")

    size = sizes(cfg)
    experts = size.bytes_by_kind.get("MXFP4 experts", 2 * size.parameters_by_part.get("routed experts", 0))
    weights = experts // where.gpus + math.ceil((size.nbytes - experts) / where.tp)
    pool = int(where.gpu_memory * where.memory_fraction) - weights - where.workspace

    recurrent = recurrent_bytes_per_request(cfg, STATE_BYTES[where.state_dtype])
    slot = (recurrent + conv_bytes_per_request(cfg)) // where.tp
    kv_token = kv_bytes_per_token(cfg, KV_BYTES[where.kv_dtype]) / where.dcp
    block = where.page * where.dcp  # logical tokens that one page on every rank holds
    kv = math.ceil(math.ceil(length / block) * block * kv_token)
    states = where.slots * slot
    request = states + kv
    fits = max(0, pool // request)
    alone = max(0, int((pool - states) // (block * kv_token))) * block if kv_token else cfg.max_position_embeddings
    groups = where.gpus // where.tp
    return Capacity(
        weights=weights,
        pool=pool,
        state_slot=slot,
        kv_token=kv_token,
        request=request,
        length=length,
        requests_per_group=fits,
        requests=fits * groups,
        tokens=fits * groups * length,
        tokens_alone=min(alone, cfg.max_position_embeddings),
        limit="weights" if pool <= 0 else "KDA states" if states > kv else "MLA pages",
    )
