"""One optimizer step on the weights as they will be stored: bfloat16, and experts rounded to MXFP4."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3jax.cache import init_cache
from k3jax.config import K3Config
from k3jax.model import logits_of, step
from k3jax.params import Moe, Params, is_spec, param_specs
from k3jax.rows import rectangle
from pallas_kernels.mxfp4 import fake_quant
from train.config import Recipe
from train.state import TrainState, make_optimizer

Metrics = dict[str, jax.Array]


def stored(cfg: K3Config, params: Params) -> Params:
    """The values that a checkpoint of these float32 masters holds; gradients pass the rounding unchanged."""
    layers = tuple(
        dataclasses.replace(layer, ffn=_rounded(layer.ffn)) if isinstance(layer.ffn, Moe) else layer
        for layer in params.layers
    )
    params = dataclasses.replace(params, layers=layers)
    return jax.tree.map(lambda spec, p: p.astype(spec.dtype), param_specs(cfg), params, is_leaf=is_spec)


def _rounded(moe: Moe) -> Moe:
    w1, w3, w2 = (fake_quant(w, -2) for w in (moe.w1, moe.w3, moe.w2))
    return dataclasses.replace(moe, w1=w1, w3=w3, w2=w2)


def loss_and_metrics(cfg: K3Config, params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Mean cross-entropy in nats over the target tokens, float32; and accuracy, loads [MoE layers, E]."""
    R, W = batch["tokens"].shape
    rows = rectangle(batch["lengths"], W)
    taps: dict[str, jax.Array] = {}
    hidden, _ = step(cfg, stored(cfg, params), batch["tokens"].reshape(-1), rows, init_cache(cfg, R, W), taps)
    logits = logits_of(stored(cfg, params), hidden)
    labels, targets = batch["labels"].reshape(-1), batch["targets"].reshape(-1)
    count = jnp.maximum(jnp.sum(targets), 1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = jnp.argmax(logits, axis=-1) == labels
    valid = rows.valid.reshape(-1)
    loads = [_load(cfg, taps[f"layers.{i}.router_ids"], valid) for i in range(len(params.layers)) if cfg.is_moe(i)]
    mean = lambda x: jnp.sum(jnp.where(targets, x, 0)) / count
    return mean(losses), (mean(right), jnp.stack(loads))


def _load(cfg: K3Config, ids: jax.Array, valid: jax.Array) -> jax.Array:
    """ids [M, top_k] -> share of the choices of real tokens that went to each expert [E]."""
    chosen = jnp.zeros(cfg.num_experts, jnp.float32).at[ids].add(valid[:, None].astype(jnp.float32))
    return chosen / jnp.maximum(jnp.sum(chosen), 1)


@functools.partial(jax.jit, static_argnames=("cfg", "recipe"), donate_argnames=("state",))
def train_step(
    cfg: K3Config, recipe: Recipe, state: TrainState, batch: dict[str, jax.Array]
) -> tuple[TrainState, Metrics]:
    """Donates `state`. Metrics: loss (nats), accuracy (of target tokens), grad_norm, max_load (1 is even)."""
    grad = jax.value_and_grad(functools.partial(loss_and_metrics, cfg), has_aux=True)
    (loss, (accuracy, loads)), grads = grad(state.params, batch)
    updates, opt_state = make_optimizer(recipe).update(grads, state.opt_state, state.params)
    params = balance(cfg, optax.apply_updates(state.params, updates), loads, recipe.bias_rate)
    metrics = {
        "loss": loss,
        "accuracy": accuracy,
        "grad_norm": optax.tree.norm(grads),
        "max_load": jnp.max(loads) * cfg.num_experts,
    }
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


def balance(cfg: K3Config, params: Params, loads: jax.Array, rate: float) -> Params:
    """Router biases one step of `rate` towards equal load: up for experts below the mean share, down above it.

    loads [MoE layers, E]. There is no auxiliary loss: the bias takes part in the selection only.
    """
    layers = list(params.layers)
    for load, i in zip(loads, (i for i in range(len(layers)) if cfg.is_moe(i)), strict=True):
        moe = layers[i].ffn
        assert isinstance(moe, Moe)
        bias = moe.router_bias + rate * jnp.sign(1 / cfg.num_experts - load)
        layers[i] = dataclasses.replace(layers[i], ffn=dataclasses.replace(moe, router_bias=bias))
    return dataclasses.replace(params, layers=tuple(layers))
