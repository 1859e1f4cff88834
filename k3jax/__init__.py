"""Kimi K3 in pure JAX: load a checkpoint, run it, edit it, differentiate through it.

>>> cfg, params = k3jax.load("nano")
>>> logits, cache = k3jax.forward(cfg, params, tokens)  # tokens [B, T] int32
"""

from k3jax.cache import Cache, init_cache
from k3jax.chat import Tokenizer, load_tokenizer
from k3jax.checkpoint import load, save
from k3jax.config import ConfigError, K3Config
from k3jax.decode import Generation, generate, stream, warmup
from k3jax.init import init_params
from k3jax.model import forward, forward_with_intermediates
from k3jax.params import Params, param_specs
from k3jax.presets import PRESETS, preset
from k3jax.safetensors_io import CheckpointError
from k3jax.sharding import Rules

__all__ = [
    "PRESETS",
    "Cache",
    "CheckpointError",
    "ConfigError",
    "Generation",
    "K3Config",
    "Params",
    "Rules",
    "Tokenizer",
    "forward",
    "forward_with_intermediates",
    "generate",
    "init_cache",
    "init_params",
    "load",
    "load_tokenizer",
    "param_specs",
    "preset",
    "save",
    "stream",
    "warmup",
]
