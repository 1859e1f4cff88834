"""Size presets: `k3`, `kimi-linear-48b`, `mini`, `tiny`, `tiny48` and the embedded `nano`. No jax here."""

import dataclasses
from pathlib import Path

from k3jax.config import ConfigError, K3Config, VisionConfig, read_config

DATA = Path(__file__).parent / "data"  # shipped checkpoints, one folder per name


def _types(layers: int, mla: tuple[int, ...]) -> tuple[str, ...]:
    """`mla` are the 1-based numbers of the full-attention layers."""
    return tuple("mla" if i in mla else "kda" for i in range(1, layers + 1))


K3 = K3Config(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    layer_types=_types(93, (*range(4, 93, 4), 93)),
    intermediate_size=33792,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_output_gate=True,
    kda_num_heads=96,
    kda_head_dim=128,
    use_full_rank_gate=True,
    gate_lower_bound=-5.0,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    latent_moe_use_norm=True,
    attn_res_block_size=12,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    media_placeholder_token_id=163605,
    mxfp4_experts=True,
    vision=VisionConfig(),
    multimodal_wrapper=True,
)

KIMI_LINEAR_48B = K3Config(
    vocab_size=163840,
    hidden_size=2304,
    num_hidden_layers=27,
    layer_types=_types(27, (4, 8, 12, 16, 20, 24, 27)),
    intermediate_size=9216,
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=32,
    kda_head_dim=128,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.446,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)

# K3's true per-layer shapes in 13 layers and 64 bf16 experts (spec model 13.2).
MINI = dataclasses.replace(
    K3,
    num_hidden_layers=13,
    layer_types=_types(13, (4, 8, 12, 13)),
    num_experts=64,
    mxfp4_experts=False,
)

# Every mechanism on, all widths different so that a swapped axis changes a shape (spec model 13.1).
TINY = K3Config(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=5,
    layer_types=_types(5, (4, 5)),
    intermediate_size=96,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    mla_use_output_gate=True,
    kda_num_heads=3,
    kda_head_dim=16,
    use_full_rank_gate=True,
    gate_lower_bound=-5.0,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_experts=8,
    num_experts_per_token=3,
    num_shared_experts=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=32,
    latent_moe_use_norm=True,
    attn_res_block_size=2,
    max_position_embeddings=4096,
    bos_token_id=509,
    eos_token_id=510,
    pad_token_id=511,
    media_placeholder_token_id=505,
    vision=VisionConfig(
        vt_hidden_size=32,
        vt_num_hidden_layers=2,
        vt_num_attention_heads=2,
        qkv_hidden_size=48,
        vt_intermediate_size=64,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        mm_hidden_size=32,
    ),
    multimodal_wrapper=True,
)

# The 48B's variant of every layer at tiny's widths.
TINY48 = dataclasses.replace(
    TINY,
    q_lora_rank=None,
    mla_use_output_gate=False,
    use_full_rank_gate=False,
    gate_lower_bound=None,
    hidden_act="silu",
    activation_situ_beta=None,
    activation_situ_linear_beta=None,
    num_shared_experts=1,
    routed_expert_hidden_size=None,
    latent_moe_use_norm=False,
    routed_scaling_factor=2.446,
    attn_res_block_size=None,
    media_placeholder_token_id=None,
    vision=None,
    multimodal_wrapper=False,
)

_CONFIGS = {
    "k3": K3,
    "kimi-linear-48b": KIMI_LINEAR_48B,
    "mini": MINI,
    "tiny": TINY,
    "tiny48": TINY48,
}
_SHIPPED = ("nano",)
PRESETS = (*_CONFIGS, *_SHIPPED)


def preset(name: str) -> K3Config:
    """The config of a named preset; an unknown name raises `ConfigError` with the known ones."""
    if name in _CONFIGS:
        return _CONFIGS[name]
    if name in _SHIPPED:
        return read_config(DATA / name)
    raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")


def shipped_folder(name: str) -> Path | None:
    """Folder of a checkpoint that ships inside the package, or None."""
    return DATA / name if name in _SHIPPED else None
