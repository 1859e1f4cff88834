"""`k3jax info MODEL`: what a preset or a checkpoint folder is, without loading weights."""

import argparse
from pathlib import Path

from k3jax.checkpoint import adapt, check, resolve
from k3jax.checkpoint_map import entries
from k3jax.cli.table import human_bytes, table
from k3jax.config import K3Config, read_config
from k3jax.params import param_specs
from k3jax.presets import PRESETS, preset
from k3jax.safetensors_io import TensorFolder
from k3jax.sizes import (
    conv_bytes_per_request,
    kv_bytes_per_token,
    recurrent_bytes_per_request,
    sizes,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="nano", help="preset, folder or hub id (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    cfg, source, stored = describe(args.model)
    print(report(cfg, source, stored))
    return 0


def describe(model: str) -> tuple[K3Config, str, dict[str, int]]:
    """Config, a line that says where it came from, bytes by kind; a folder's headers are checked against its config."""
    if model in PRESETS and not Path(model).is_dir():
        return preset(model), f"preset {model}", sizes(preset(model)).bytes_by_kind
    folder = resolve(model)
    files = TensorFolder(folder)
    cfg = adapt(read_config(folder), files)
    check(cfg, entries(cfg, param_specs(cfg)), files)
    stored: dict[str, int] = {}
    for name, tensor in files.tensors.items():
        kind = "MXFP4 experts" if name.endswith(("_packed", "_scale")) else tensor.dtype
        stored[kind] = stored.get(kind, 0) + tensor.nbytes
    count = len({t.file for t in files.tensors.values()})
    source = f"{folder}: {len(files.tensors):,} tensors in {count} files, headers agree with config.json"
    return cfg, source, stored


def report(cfg: K3Config, source: str, stored: dict[str, int]) -> str:
    size = sizes(cfg)
    gate = "full-rank gate" if cfg.use_full_rank_gate else "low-rank gate"
    floor = "unbounded decay" if cfg.gate_lower_bound is None else f"decay floor {cfg.gate_lower_bound:g}"
    query = "direct queries" if cfg.q_lora_rank is None else f"query latent {cfg.q_lora_rank}"
    latent = f"latent {cfg.routed_expert_hidden_size}, " if cfg.routed_expert_hidden_size else ""
    moe = sum(cfg.is_moe(i) for i in range(cfg.num_hidden_layers))
    layers = [
        ["layers", "kind", "shape"],
        [str(len(cfg.kda_layers)), "KDA", f"{cfg.kda_num_heads} heads x {cfg.kda_head_dim}, {gate}, {floor}"],
        [
            str(len(cfg.mla_layers)), "MLA",
            f"{cfg.num_attention_heads} heads, key {cfg.qk_nope_head_dim}+{cfg.qk_rope_head_dim},"
            f" value {cfg.v_head_dim}, latent {cfg.kv_lora_rank}, {query}",
        ],
        [str(cfg.num_hidden_layers - moe), "dense MLP", f"width {cfg.intermediate_size}, {cfg.hidden_act}"],
        [
            str(moe), "MoE",
            f"{cfg.num_experts} experts, top {cfg.num_experts_per_token}, {latent}width {cfg.moe_intermediate_size},"
            f" {cfg.num_shared_experts} shared",
        ],
    ]  # fmt: skip
    residual = "plain" if cfg.attn_res_block_size is None else f"attention residuals, block {cfg.attn_res_block_size}"
    parts = sorted(size.parameters_by_part.items(), key=lambda item: -item[1])
    parameters = [["parameters", "count"], *([name, f"{n:,}"] for name, n in parts)]
    parameters += [
        ["total", f"{size.parameters:,}"],
        ["active per token", f"{size.active_parameters:,}"],
    ]
    parameters += [["active without embedding", f"{size.active_without_embedding:,}"]]
    total = sum(stored.values())
    kinds = [["stored as", "bytes", ""], *([k, f"{n:,}", human_bytes(n)] for k, n in stored.items())]
    kinds += [["total", f"{total:,}", human_bytes(total)]]
    kv, state, conv = (
        kv_bytes_per_token(cfg),
        recurrent_bytes_per_request(cfg),
        conv_bytes_per_request(cfg),
    )
    memory = [
        ["memory in use", "bytes", ""],
        ["MLA cache per token (bf16)", f"{kv:,}", human_bytes(kv)],
        ["KDA state per request (fp32)", f"{state:,}", human_bytes(state)],
        ["convolution window per request (bf16)", f"{conv:,}", human_bytes(conv)],
    ]
    vision = (
        "none" if cfg.vision is None else f"{cfg.vision.vt_num_hidden_layers} layers, width {cfg.vision.vt_hidden_size}"
    )
    head = (
        f"{source}\n"
        f"vocabulary {cfg.vocab_size:,}, width {cfg.hidden_size}, {cfg.num_hidden_layers} layers, residual: {residual},"
        f" vision: {vision}, up to {cfg.max_position_embeddings:,} tokens; {size.tensors:,} tensors"
    )
    tables = (
        table(layers, (0,)),
        table(parameters, (1,)),
        table(kinds, (1, 2)),
        table(memory, (1, 2)),
    )
    return "\n\n".join((head, *tables))
