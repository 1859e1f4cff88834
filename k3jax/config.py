"""Model configuration: the frozen `K3Config` of both released families, Kimi K3 and Kimi-Linear-48B. No jax here."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3jax.files import read_json

MXFP4_BLOCK = 32  # columns that share one scale


class ConfigError(ValueError):
    """A config that contradicts itself or asks for something this model family does not have."""


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """MoonViT3d tower and projector sizes (spec model 9.1)."""

    vt_hidden_size: int = 1024
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    vt_intermediate_size: int = 4096
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    patch_size: int = 14
    merge_kernel_size: tuple[int, int] = (2, 2)
    mm_hidden_size: int = 1024
    projector_ln_eps: float = 1e-5

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or field.type is int:
                _positive_int(f"vision_config.{field.name}", value)
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ConfigError(
                f"vision_config.qkv_hidden_size {self.qkv_hidden_size} is not a multiple of 4 x vt_num_attention_heads"
                f" {self.vt_num_attention_heads}; the rotary pairs need it"
            )


@dataclasses.dataclass(frozen=True)
class K3Config:
    """Every size and switch of the text model; 0-based layer indices.

    Names follow the released `config.json` (spec model 1.2); `layer_types[i]` is "kda" or "mla".
    `dtype` is the dtype of activations; weights keep the dtype they were stored in.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    intermediate_size: int
    # MLA
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    # KDA
    kda_num_heads: int = 0
    kda_head_dim: int = 0
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = False
    gate_lower_bound: float | None = None
    # feed-forward
    hidden_act: str = "silu"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 1
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    # the rest
    attn_res_block_size: int | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    media_placeholder_token_id: int | None = None
    mxfp4_experts: bool = False
    vision: VisionConfig | None = None
    multimodal_wrapper: bool = False  # `kimi_k3` nesting and the `language_model.` tensor prefix
    dtype: str = "bfloat16"

    def __post_init__(self):
        _check(self)

    # derived sizes
    @property
    def kda_width(self) -> int:
        """P = KDA heads x head dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_cache_width(self) -> int:
        """Numbers cached per token and MLA layer: normalised latent plus the shared key slot."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Width of the routed experts' input and output."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "mla")

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    # Hugging Face format
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "K3Config":
        """Parse the dictionary of a released `config.json` of either family; refuses contradictions by name."""
        from k3jax.config_hf import from_hf

        return from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary that `from_hf` reads back to an equal config."""
        from k3jax.config_hf import to_hf

        return to_hf(self)


MOST = {"num_hidden_layers": 10_000, "num_experts": 100_000}  # beyond any model: refused before names are built


def _positive_int(key: str, value: Any) -> None:
    if not _is_int(value) or value < 1:
        raise ConfigError(f"{key} is {short(value)}, the minimum is 1; give a positive integer")
    most = MOST.get(key, 2**31 - 1)
    if value > most:
        raise ConfigError(f"{key} is {short(value)}, the maximum is {most}; use the released value")


def short(value: Any) -> str:
    """repr for a sentence."""
    try:
        text = repr(value)
    except ValueError:  # integers of thousands of digits
        text = "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A finite one of a sane size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _check(cfg: K3Config) -> None:
    positive = [
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "short_conv_kernel_size", "num_experts",
        "num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "moe_layer_freq",
        "max_position_embeddings",
    ]  # fmt: skip
    optional = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size")
    positive += [k for k in optional if getattr(cfg, k) is not None]
    if "kda" in (cfg.layer_types or ()):
        positive += ["kda_num_heads", "kda_head_dim"]
    for key in positive:
        _positive_int(key, getattr(cfg, key))
    for key in ("mla_use_output_gate", "use_full_rank_gate", "latent_moe_use_norm", "moe_renormalize", "mxfp4_experts"):
        if not isinstance(getattr(cfg, key), bool):
            raise ConfigError(f"{key} is {short(getattr(cfg, key))}, supported are true and false; use one of these")
    if not _is_int(cfg.first_k_dense_replace) or cfg.first_k_dense_replace < 0:
        raise ConfigError(
            f"first_k_dense_replace is {short(cfg.first_k_dense_replace)}, the minimum is 0; count dense layers from 0"
        )
    if not isinstance(cfg.layer_types, tuple) or not set(cfg.layer_types) <= {"kda", "mla"}:
        raise ConfigError(f"layer_types is {short(cfg.layer_types)}, expected a tuple of 'kda' and 'mla'; correct it")
    if len(cfg.layer_types) != cfg.num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(cfg.layer_types)} entries for num_hidden_layers {cfg.num_hidden_layers};"
            " make them equal"
        )
    if cfg.hidden_act not in ("situ", "silu"):
        raise ConfigError(f"hidden_act is {cfg.hidden_act!r}, supported are 'situ' and 'silu'; use one of these")
    for key in (
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "rms_norm_eps",
        "routed_scaling_factor",
    ):
        value = getattr(cfg, key)
        if value is not None and not (_is_number(value) and value > 0):
            raise ConfigError(f"{key} is {short(value)}, it must be finite and above 0; use the released value")
    bound = cfg.gate_lower_bound
    if bound is not None and not (_is_number(bound) and bound < 0):
        raise ConfigError(f"gate_lower_bound is {short(bound)}, it must be finite and negative, or null; K3 uses -5.0")
    if cfg.num_experts_per_token > cfg.num_experts:
        raise ConfigError(
            f"num_experts_per_token {cfg.num_experts_per_token} exceeds num_experts {cfg.num_experts};"
            f" choose at most {cfg.num_experts}"
        )
    if cfg.latent_moe_use_norm and cfg.routed_expert_hidden_size is None:
        raise ConfigError(
            "latent_moe_use_norm is true without routed_expert_hidden_size; set the latent width or drop the norm"
        )
    for key in ("moe_intermediate_size", "expert_width"):
        if cfg.mxfp4_experts and getattr(cfg, key) % MXFP4_BLOCK:
            raise ConfigError(
                f"{key} {getattr(cfg, key)} is not a multiple of the MXFP4 block {MXFP4_BLOCK};"
                " unpack the experts or pad"
            )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        value = getattr(cfg, key)
        if value is not None and not (_is_int(value) and 0 <= value < cfg.vocab_size):
            raise ConfigError(
                f"{key} {short(value)} is outside the vocabulary 0..{cfg.vocab_size - 1}; fix the id or vocab_size"
            )
    if cfg.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype is {cfg.dtype!r}, supported are 'bfloat16' and 'float32'; use one of these")
    if cfg.vision is not None and not cfg.multimodal_wrapper:
        raise ConfigError("vision_config needs the kimi_k3 wrapper; set model_type 'kimi_k3' with a text_config")


def read_config(folder: str | Path) -> K3Config:
    """Read `config.json` of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a Hugging Face style model folder")
    return K3Config.from_hf(read_json(path, ConfigError))
