"""The name table: which checkpoint tensors make up each parameter, and how they lie on disk (spec model 8).

A parameter is addressed by its path in the tree (`layers.3.attn.q_proj`). On disk linears are `[out, in]`.
"""

import dataclasses

from k3jax.config import K3Config
from k3jax.params import Params, ParamSpec, leaf_paths

# path -> (checkpoint suffix, layout). Layouts:
#   "same"       stored shape is the memory shape, possibly reshaped (row-major order is equal)
#   "transpose"  stored [out, in], memory [in, out]
#   "a_log"      stored with padding or singleton axes; the first num_heads entries count
_MODEL = {
    "embed": ("model.embed_tokens.weight", "same"),
    "norm": ("model.norm.weight", "same"),
    "out_res.norm": ("model.output_attn_res_norm.weight", "same"),
    "out_res.proj": ("model.output_attn_res_proj.weight", "same"),
    "lm_head": ("lm_head.weight", "transpose"),
}
_LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "ffn_norm": ("post_attention_layernorm.weight", "same"),
    "attn_res.norm": ("self_attention_res_norm.weight", "same"),
    "attn_res.proj": ("self_attention_res_proj.weight", "same"),
    "ffn_res.norm": ("mlp_res_norm.weight", "same"),
    "ffn_res.proj": ("mlp_res_proj.weight", "same"),
}
_ATTN = {
    "g_proj": ("self_attn.g_proj.weight", "transpose"),
    "o_proj": ("self_attn.o_proj.weight", "transpose"),
    "q_proj": ("self_attn.q_proj.weight", "transpose"),
    # KDA
    "k_proj": ("self_attn.k_proj.weight", "transpose"),
    "v_proj": ("self_attn.v_proj.weight", "transpose"),
    "conv": ("self_attn.{stack}_conv1d.weight", "same"),
    "a_log": ("self_attn.A_log", "a_log"),
    "dt_bias": ("self_attn.dt_bias", "same"),
    "f_a": ("self_attn.f_a_proj.weight", "transpose"),
    "f_b": ("self_attn.f_b_proj.weight", "transpose"),
    "b_proj": ("self_attn.b_proj.weight", "transpose"),
    "g_a": ("self_attn.g_a_proj.weight", "transpose"),
    "g_b": ("self_attn.g_b_proj.weight", "transpose"),
    "o_norm": ("self_attn.o_norm.weight", "same"),
    # MLA
    "q_a": ("self_attn.q_a_proj.weight", "transpose"),
    "q_a_norm": ("self_attn.q_a_layernorm.weight", "same"),
    "q_b": ("self_attn.q_b_proj.weight", "transpose"),
    "kv_a": ("self_attn.kv_a_proj_with_mqa.weight", "transpose"),
    "kv_a_norm": ("self_attn.kv_a_layernorm.weight", "same"),
    "kv_b": ("self_attn.kv_b_proj.weight", "transpose"),
}
_MLP = {
    "gate": ("mlp.gate_proj.weight", "transpose"),
    "up": ("mlp.up_proj.weight", "transpose"),
    "down": ("mlp.down_proj.weight", "transpose"),
}
_MOE = {
    "router": ("block_sparse_moe.gate.weight", "transpose"),
    "router_bias": ("block_sparse_moe.gate.e_score_correction_bias", "same"),
    "latent_down": ("block_sparse_moe.routed_expert_down_proj.weight", "transpose"),
    "latent_norm": ("block_sparse_moe.routed_expert_norm.weight", "same"),
    "latent_up": ("block_sparse_moe.routed_expert_up_proj.weight", "transpose"),
    "shared.gate": ("block_sparse_moe.shared_experts.gate_proj.weight", "transpose"),
    "shared.up": ("block_sparse_moe.shared_experts.up_proj.weight", "transpose"),
    "shared.down": ("block_sparse_moe.shared_experts.down_proj.weight", "transpose"),
}
for _w in ("w1", "w2", "w3"):
    _MOE[_w] = (f"block_sparse_moe.experts.{{stack}}.{_w}.weight", "transpose")
    _MOE[f"{_w}.packed"] = (f"block_sparse_moe.experts.{{stack}}.{_w}.weight_packed", "same")
    _MOE[f"{_w}.scale"] = (f"block_sparse_moe.experts.{{stack}}.{_w}.weight_scale", "same")

# Spellings seen in other exports of the same weights, tried when the canonical name is absent.
_ALIASES = (
    ("language_model.model.layers.", "language_model.layers."),
    ("language_model.", ""),
    (".mlp.gate_proj.", ".block_sparse_moe.gate_proj."),
    (".mlp.up_proj.", ".block_sparse_moe.up_proj."),
    (".mlp.down_proj.", ".block_sparse_moe.down_proj."),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter on disk: `names` are stacked along the first memory axis when there are several."""

    path: str
    spec: ParamSpec
    names: tuple[str, ...]
    layout: str
    stored_shape: tuple[int, ...]  # of each named tensor
    stacked: bool


def entries(cfg: K3Config, specs: Params) -> list[Entry]:
    """The disk entry of every parameter of `specs`, in tree order."""
    return [_entry(cfg, path, spec) for path, spec in leaf_paths(specs)]


def aliases(name: str) -> list[str]:
    """Other spellings of a canonical tensor name."""
    return [name.replace(ours, theirs) for ours, theirs in _ALIASES if ours in name]


def _entry(cfg: K3Config, path: str, spec: ParamSpec) -> Entry:
    if path.startswith("vision."):
        return Entry(path, spec, (path.removeprefix("vision."),), "same", spec.shape, False)
    prefix = "language_model." if cfg.multimodal_wrapper else ""
    parts = path.split(".")
    if parts[0] != "layers":
        suffix, layout = _MODEL[path]
    else:
        layer = int(parts[1])
        prefix += f"model.layers.{layer}."
        rest = ".".join(parts[2:])
        if rest.startswith("attn."):
            suffix, layout = _ATTN[rest.removeprefix("attn.")]
        elif rest.startswith("ffn."):
            suffix, layout = (_MOE if cfg.is_moe(layer) else _MLP)[rest.removeprefix("ffn.")]
        else:
            suffix, layout = _LAYER[rest]
    stack: tuple[str, ...] = ()
    if "{stack}" in suffix:
        stack = ("q", "k", "v") if path.endswith(".conv") else tuple(str(e) for e in range(spec.shape[0]))
    names = tuple(prefix + suffix.format(stack=s) for s in stack) or (prefix + suffix,)
    return Entry(path, spec, names, layout, _stored_shape(cfg, path, spec, layout, bool(stack)), bool(stack))


def _stored_shape(cfg: K3Config, path: str, spec: ParamSpec, layout: str, stacked: bool) -> tuple[int, ...]:
    shape = spec.shape[1:] if stacked else spec.shape
    if layout == "transpose":
        return shape[::-1]
    if layout == "a_log":  # K3 pads to head_dim entries, the 48B keeps three singleton axes
        heads = cfg.kda_num_heads
        return (max(heads, cfg.kda_head_dim),) if cfg.multimodal_wrapper else (1, 1, heads, 1)
    if path.endswith(".conv"):
        return (cfg.kda_width, 1, cfg.short_conv_kernel_size)
    if path.endswith("dt_bias"):
        return (cfg.kda_width,)
    if path.endswith("_res.proj"):
        return (1, *shape)
    return shape
