"""Hugging Face `config.json` to `K3Config` and back: K3 nests it under `text_config`, the 48B is flat. No jax here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from k3jax.config import MOST, MXFP4_BLOCK, ConfigError, K3Config, VisionConfig, short

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
_FIXED: dict[str, tuple] = {
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


def from_hf(config: Mapping[str, Any]) -> K3Config:
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}, expected a JSON object; check config.json")
    wrapped = "text_config" in config
    text = config["text_config"] if wrapped else config
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is a {type(text).__name__}, expected a JSON object; check config.json")
    model_type = config.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type is {model_type!r}, supported are 'kimi_k3' and 'kimi_linear'; use one of these")
    missing = [k for k in _REQUIRED if text.get(k) is None]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}; add the released values")
    for key, allowed in _FIXED.items():
        for where in (text, config):
            if where.get(key) is not None and where[key] not in allowed:
                raise ConfigError(
                    f"{key} is {where[key]!r}, supported is {allowed[0]!r}; this model family has no other"
                )
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} differs from num_attention_heads {heads}; set them equal")

    values = {k: text[k] for k in _PLAIN_KEYS if text.get(k) is not None}
    for key in _TOKEN_KEYS:
        values[key] = _first(text.get(key), config.get(key))
    lengths = (text.get("max_position_embeddings"), text.get("model_max_length"))
    values["max_position_embeddings"] = _first(*lengths, K3Config.max_position_embeddings)
    if text.get("dtype") in ("float32", "bfloat16"):
        values["dtype"] = text["dtype"]
    if text.get("hidden_act") is None and text.get("activation_situ_beta") is not None:
        raise ConfigError("activation_situ_beta is set without hidden_act; set hidden_act to 'situ' or drop the beta")
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
        _object("vision_config", config["vision_config"])
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        vision = {k: v for k, v in config["vision_config"].items() if k in names and v is not None}
        if "merge_kernel_size" in vision:
            if not isinstance(vision["merge_kernel_size"], list | tuple):
                raise ConfigError(f"merge_kernel_size is {short(vision['merge_kernel_size'])}, expected two numbers")
            vision["merge_kernel_size"] = tuple(vision["merge_kernel_size"])
        text_width = config["vision_config"].get("text_hidden_size", text["hidden_size"])
        if text_width != text["hidden_size"]:
            raise ConfigError(
                f"vision_config.text_hidden_size {text_width} differs from hidden_size {text['hidden_size']};"
                " set them equal"
            )
        values["vision"] = VisionConfig(**vision)
    return K3Config(**values)


def _first(*values: Any) -> Any:
    """The first that is given: an explicit null counts as absent."""
    return next((v for v in values if v is not None), None)


def _object(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {short(value)}, expected a JSON object; see the released config.json")
    return value


def _layer_types(linear: Mapping[str, Any], layers: Any) -> tuple[str, ...]:
    """The released lists are 1-based; entries past a truncated config's last layer are dropped."""
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= MOST["num_hidden_layers"]:
        raise ConfigError(
            f"num_hidden_layers is {short(layers)}, allowed is 1 to {MOST['num_hidden_layers']}; correct it"
        )
    lists = {}
    for key in ("kda_layers", "full_attn_layers"):
        entries = linear.get(key)
        if not isinstance(entries, list | tuple) or not all(isinstance(i, int) for i in entries):
            raise ConfigError(f"linear_attn_config.{key} is {entries!r}, expected a list of 1-based layer numbers")
        if any(i < 1 for i in entries):
            raise ConfigError(
                f"linear_attn_config.{key} contains {min(entries)}, layers count from 1; add 1 to every entry"
            )
        lists[key] = {i for i in entries if i <= layers}
    both = lists["kda_layers"] & lists["full_attn_layers"]
    if both:
        raise ConfigError(f"layers {sorted(both)} stand in both kda_layers and full_attn_layers; keep each in one list")
    neither = set(range(1, layers + 1)) - lists["kda_layers"] - lists["full_attn_layers"]
    if neither:
        raise ConfigError(
            f"layers {short(sorted(neither))} of 1..{layers} stand in neither kda_layers nor full_attn_layers; add them"
        )
    return tuple("kda" if i in lists["kda_layers"] else "mla" for i in range(1, layers + 1))


def _is_mxfp4(nested: Mapping[str, Any] | None, top: Mapping[str, Any] | None) -> bool:
    if nested is not None and top is not None and nested != top:
        raise ConfigError("text_config.quantization_config and the top-level quantization_config differ; keep one")
    block = nested if nested is not None else top
    if block is None or block == {}:
        return False
    _object("quantization_config", block)
    fmt = block.get("format")
    if fmt != "mxfp4-pack-quantized":
        raise ConfigError(
            f"quantization format is {fmt!r}, supported is 'mxfp4-pack-quantized'; convert the checkpoint first"
        )
    for name, group in _object("config_groups", block.get("config_groups", {})).items():
        weights = _object("weights", _object(f"config_groups.{name}", group).get("weights") or {})
        for key, want in _MXFP4.items():
            if weights.get(key, want) != want:
                raise ConfigError(
                    f"quantization weights.{key} is {weights[key]!r}, supported is {want!r};"
                    " convert the checkpoint first"
                )
        if group.get("input_activations") is not None:
            raise ConfigError("quantization input_activations is set, supported is null (weight-only); remove it")
    return True


def to_hf(cfg: K3Config) -> dict[str, Any]:
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
        text["quantization_config"] = quantization_block()
    if not cfg.multimodal_wrapper:
        return text | {"media_placeholder_token_id": cfg.media_placeholder_token_id}
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


def quantization_block() -> dict[str, Any]:
    """`quantization_config` of a checkpoint with MXFP4 experts (spec model 7.1)."""
    weights = _MXFP4 | {"strategy": "group", "dynamic": False, "scale_dtype": "torch.uint8"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    ignored = (
        r"self_attn",
        r"shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        r"lm_head",
        r"vision_tower",
        r"mm_projector",
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": [f"re:.*{name}.*" for name in ignored],
    }
