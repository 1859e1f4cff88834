"""A tokenizer learnt once, and the smallest config that has every kind of layer."""

import dataclasses

import pytest

from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from train.bpe import train_bpe, write_tokenizer
from train.config import SftConfig
from train.conversations import texts
from train.tasks import TASKS

SHARES = {task: 1.0 for task in TASKS} | {"chat": 1.0}

MODEL = K3Config(
    vocab_size=576,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=("kda", "mla"),
    intermediate_size=32,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    kda_num_heads=2,
    kda_head_dim=16,
    gate_lower_bound=-5.0,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=32,
    latent_moe_use_norm=True,
    max_position_embeddings=512,
    bos_token_id=320,
    eos_token_id=322,
    pad_token_id=575,
    dtype="float32",
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_bpe(texts(0, SHARES, 0.6, conversations=200), 320), 512)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return Tokenizer(tokenizer_folder)


@pytest.fixture
def config(tokenizer_folder, tmp_path):
    base = SftConfig(model=MODEL, tokenizer=str(tokenizer_folder), out=str(tmp_path / "run"))
    return dataclasses.replace(
        base, steps=5, tokens=384, widths=(96,), width_shares=(1.0,), warmup=2, log_every=1, save_every=2
    )
