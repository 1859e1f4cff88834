"""Model configuration: the frozen `K3Config`, read from and written to Hugging Face `config.json`.

Covers both released families: Kimi K3 (nested under `text_config`) and Kimi-Linear-48B (flat). No jax here.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        return _from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary that `from_hf` reads back to an equal config."""
        return _to_hf(self)


# from_hf / to_hf ---------------------------------------------------------------------------------

_PLAIN_KEYS = (  # same name and meaning on both sides
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "mla_use_output_gate", "hidden_act", "activation_situ_beta", "activation_situ_linear_beta",
    "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "latent_moe_use_norm", "moe_renormalize", "routed_scaling_factor",
    "first_k_dense_replace", "moe_layer_freq", "attn_res_block_size", "rms_norm_eps",
)  # fmt: skip
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LINEAR_KEYS = {  # inside linear_attn_config
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "use_full_rank_gate": "use_full_rank_gate",
    "gate_lower_bound": "gate_lower_bound",
}
# Keys whose only supported value is fixed; a config that says otherwise needs code we do not have.
_FIXED = {
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0,),
    "attention_bias": (False,),
}
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts",
    "num_experts_per_token", "moe_intermediate_size", "linear_attn_config",
)  # fmt: skip
_MXFP4 = {"num_bits": 4, "type": "float", "group_size": MXFP4_BLOCK, "symmetric": True}


def _from_hf(config: Mapping[str, Any]) -> K3Config:
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}, expected a JSON object; check config.json")
    wrapped = "text_config" in config
    text = config["text_config"] if wrapped else config
    model_type = config.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type is {model_type!r}, supported are 'kimi_k3' and 'kimi_linear'; use one of these")
    missing = [k for k in _REQUIRED if text.get(k) is None]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}; add the released values")
    for key, allowed in _FIXED.items():
        for where in (text, config):
            if where.get(key) is not None and where[key] not in allowed:
                raise ConfigError(f"{key} is {where[key]!r}, supported is {allowed[0]!r}; this model family has no other")
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} differs from num_attention_heads {heads}; set them equal")

    values = {k: text[k] for k in _PLAIN_KEYS if text.get(k) is not None}
    for key in _TOKEN_KEYS:
        values[key] = text.get(key, config.get(key))
    values["max_position_embeddings"] = (
        text.get("max_position_embeddings") or text.get("model_max_length") or K3Config.max_position_embeddings
    )
    linear = text["linear_attn_config"]
    if not isinstance(linear, Mapping):
        raise ConfigError(f"linear_attn_config is {linear!r}, expected an object; see the released config.json")
    for key, name in _LINEAR_KEYS.items():
        if linear.get(key) is not None:
            values[name] = linear[key]
    values["layer_types"] = _layer_types(linear, text["num_hidden_layers"])
    values["mxfp4_experts"] = _is_mxfp4(text.get("quantization_config"), config.get("quantization_config"))
    values["multimodal_wrapper"] = wrapped
    values["media_placeholder_token_id"] = config.get("media_placeholder_token_id")
    if wrapped and config.get("vision_config"):
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        vision = {k: v for k, v in config["vision_config"].items() if k in names and v is not None}
        if "merge_kernel_size" in vision:
            vision["merge_kernel_size"] = tuple(vision["merge_kernel_size"])
        text_width = config["vision_config"].get("text_hidden_size", text["hidden_size"])
        if text_width != text["hidden_size"]:
            raise ConfigError(
                f"vision_config.text_hidden_size {text_width} differs from hidden_size {text['hidden_size']}; set them equal"
            )
        values["vision"] = VisionConfig(**vision)
    return K3Config(**values)


def _layer_types(linear: Mapping[str, Any], layers: Any) -> tuple[str, ...]:
    """The released lists are 1-based; entries past a truncated config's last layer are dropped."""
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"num_hidden_layers is {layers!r}, the minimum is 1; give a positive integer")
    lists = {}
    for key in ("kda_layers", "full_attn_layers"):
        entries = linear.get(key)
        if not isinstance(entries, list | tuple) or not all(isinstance(i, int) for i in entries):
            raise ConfigError(f"linear_attn_config.{key} is {entries!r}, expected a list of 1-based layer numbers")
        if any(i < 1 for i in entries):
            raise ConfigError(f"linear_attn_config.{key} contains {min(entries)}, layers count from 1; add 1 to every entry")
        lists[key] = {i for i in entries if i <= layers}
    both = lists["kda_layers"] & lists["full_attn_layers"]
    if both:
        raise ConfigError(f"layers {sorted(both)} stand in both kda_layers and full_attn_layers; keep each in one list")
    neither = set(range(1, layers + 1)) - lists["kda_layers"] - lists["full_attn_layers"]
    if neither:
        raise ConfigError(f"layers {sorted(neither)} of 1..{layers} stand in neither kda_layers nor full_attn_layers; add them")
    return tuple("kda" if i in lists["kda_layers"] else "mla" for i in range(1, layers + 1))


def _is_mxfp4(nested: Mapping[str, Any] | None, top: Mapping[str, Any] | None) -> bool:
    if nested is not None and top is not None and nested != top:
        raise ConfigError("text_config.quantization_config and the top-level quantization_config differ; keep one")
    block = nested if nested is not None else top
    if not block:
        return False
    fmt = block.get("format")
    if fmt != "mxfp4-pack-quantized":
        raise ConfigError(f"quantization format is {fmt!r}, supported is 'mxfp4-pack-quantized'; convert the checkpoint first")
    for group in block.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        for key, want in _MXFP4.items():
            if weights.get(key, want) != want:
                raise ConfigError(f"quantization weights.{key} is {weights[key]!r}, supported is {want!r}; convert the checkpoint first")
        if group.get("input_activations") is not None:
            raise ConfigError("quantization input_activations is set, supported is null (weight-only); remove it")
    return True


def _to_hf(cfg: K3Config) -> dict[str, Any]:
    text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    text |= {k: getattr(cfg, k) for k in _PLAIN_KEYS}
    text["num_key_value_heads"] = cfg.num_attention_heads
    text["max_position_embeddings"] = cfg.max_position_embeddings
    text |= {k: allowed[0] for k, allowed in _FIXED.items() if k != "attention_bias"}
    text["use_grouped_topk"] = True
    text |= {k: getattr(cfg, k) for k in _TOKEN_KEYS}
    text["dtype"] = cfg.dtype
    text["linear_attn_config"] = {k: getattr(cfg, name) for k, name in _LINEAR_KEYS.items()} | {
        "kda_layers": [i + 1 for i in cfg.kda_layers],
        "full_attn_layers": [i + 1 for i in cfg.mla_layers],
    }
    if cfg.mxfp4_experts:
        text["quantization_config"] = _quantization_block()
    if not cfg.multimodal_wrapper:
        return text
    out: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "media_placeholder_token_id": cfg.media_placeholder_token_id,
        "tie_word_embeddings": False,
    }
    out |= {k: getattr(cfg, k) for k in _TOKEN_KEYS}
    if cfg.vision is not None:
        out["vision_config"] = dataclasses.asdict(cfg.vision) | {
            "merge_kernel_size": list(cfg.vision.merge_kernel_size),
            "text_hidden_size": cfg.hidden_size,
        }
    return out


def _quantization_block() -> dict[str, Any]:
    weights = _MXFP4 | {"strategy": "group", "dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    ignored = (r"self_attn", r"shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", r"lm_head", r"vision_tower", r"mm_projector")
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": [f"re:.*{name}.*" for name in ignored],
    }


# checks ------------------------------------------------------------------------------------------


def _check(cfg: K3Config) -> None:
    positive = [
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "short_conv_kernel_size", "num_experts", "num_experts_per_token",
        "moe_intermediate_size", "num_shared_experts", "moe_layer_freq", "max_position_embeddings",
    ]  # fmt: skip
    positive += [k for k in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size") if getattr(cfg, k) is not None]
    if cfg.kda_layers:
        positive += ["kda_num_heads", "kda_head_dim"]
    for key in positive:
        value = getattr(cfg, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key} is {value!r}, the minimum is 1; give a positive integer")
    if cfg.first_k_dense_replace < 0:
        raise ConfigError(f"first_k_dense_replace is {cfg.first_k_dense_replace}, the minimum is 0; count dense layers from 0")
    if len(cfg.layer_types) != cfg.num_hidden_layers:
        raise ConfigError(f"layer_types has {len(cfg.layer_types)} entries for num_hidden_layers {cfg.num_hidden_layers}; make them equal")
    if cfg.hidden_act not in ("situ", "silu"):
        raise ConfigError(f"hidden_act is {cfg.hidden_act!r}, supported are 'situ' and 'silu'; use one of these")
    for key in ("activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "routed_scaling_factor"):
        value = getattr(cfg, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key} is {value!r}, it must be above 0; use the released value")
    if cfg.gate_lower_bound is not None and not cfg.gate_lower_bound < 0:
        raise ConfigError(f"gate_lower_bound is {cfg.gate_lower_bound!r}, it must be negative or null; K3 uses -5.0")
    if cfg.num_experts_per_token > cfg.num_experts:
        raise ConfigError(
            f"num_experts_per_token {cfg.num_experts_per_token} exceeds num_experts {cfg.num_experts}; choose at most {cfg.num_experts}"
        )
    if cfg.latent_moe_use_norm and cfg.routed_expert_hidden_size is None:
        raise ConfigError("latent_moe_use_norm is true without routed_expert_hidden_size; set the latent width or drop the norm")
    for key in ("moe_intermediate_size", "expert_width"):
        if cfg.mxfp4_experts and getattr(cfg, key) % MXFP4_BLOCK:
            raise ConfigError(f"{key} {getattr(cfg, key)} is not a multiple of the MXFP4 block {MXFP4_BLOCK}; unpack the experts or pad")
    for key in (*_TOKEN_KEYS, "media_placeholder_token_id"):
        value = getattr(cfg, key)
        if value is not None and not 0 <= value < cfg.vocab_size:
            raise ConfigError(f"{key} {value} is outside the vocabulary 0..{cfg.vocab_size - 1}; fix the id or vocab_size")
    if cfg.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype is {cfg.dtype!r}, supported are 'bfloat16' and 'float32'; use one of these")
    if cfg.vision is not None and not cfg.multimodal_wrapper:
        raise ConfigError("vision_config needs the kimi_k3 wrapper; set model_type 'kimi_k3' with a text_config")


def read_config(folder: str | Path) -> K3Config:
    """Read `config.json` of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a Hugging Face style model folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from None
    return K3Config.from_hf(data)
