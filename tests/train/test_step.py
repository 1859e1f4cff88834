"""One step: trained values are the stored ones, the loss is that of the target tokens, biases follow the load."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from tests.train.conftest import MODEL
from train.data import make_batch
from train.export import export, packed, unpacked
from train.state import init_state
from train.step import balance, loss_and_metrics, stored


@pytest.fixture
def params(config):
    return init_state(config).params


@pytest.fixture
def gradient(config, params, tokenizer):
    """The loss with its aids, the gradient, and the batch that they are of."""
    batch = make_batch(config, tokenizer, 0)
    arrays = {name: jnp.asarray(value) for name, value in vars(batch).items()}
    return *_gradient(config.model, params, arrays), batch


_gradient = jax.jit(
    lambda cfg, params, batch: jax.value_and_grad(lambda p: loss_and_metrics(cfg, p, batch), has_aux=True)(params),
    static_argnums=0,
)


def test_masters_are_float32_and_experts_unpacked(params):
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert params.layers[1].ffn.w1.shape == (4, 32, 32)


def test_stored_values_equal_the_packed_checkpoint_bit_for_bit(config, params, tokenizer_folder, tmp_path):
    trained = jax.jit(stored, static_argnums=0)(config.model, params)
    cfg, packed_params = packed(config.model, params)
    assert cfg.mxfp4_experts
    export(tmp_path, config.model, params)
    loaded_cfg, loaded = k3jax.load(tmp_path)
    assert dataclasses.replace(loaded_cfg, dtype="bfloat16") == cfg
    for other in (unpacked(packed_params), unpacked(loaded)):
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(trained), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(
                np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=jax.tree_util.keystr(path)
            )
    assert set(np.unique(np.abs(unpacked(packed_params).layers[1].ffn.w1[0, :, 0] / 2.0**-8))) <= {
        *(m * 2.0**e for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for e in range(-6, 6))
    }


def test_exported_model_computes_what_was_trained(config, params, gradient, tmp_path):
    """The packed folder through the library's forward gives the trainer's loss, worked out here in float64."""
    (loss, (accuracy, loads)), _, batch = gradient
    export(tmp_path, config.model, params)
    cfg, loaded = k3jax.load(tmp_path)
    logits, _ = k3jax.forward(cfg, loaded, batch.tokens, lengths=batch.lengths)
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    picked = np.take_along_axis(logprobs, batch.labels[..., None], -1)[..., 0]
    # float32 logits and a loss of about 6 nats: 1e-5 is the rounding of a few hundred summed terms
    np.testing.assert_allclose(loss, -picked[batch.targets].mean(), rtol=1e-5)
    right = logits.argmax(-1) == batch.labels
    np.testing.assert_allclose(accuracy, right[batch.targets].mean(), rtol=1e-6)
    assert loads.shape == (1, 4)
    np.testing.assert_allclose(loads.sum(-1), 1, rtol=1e-6)


def test_gradients_reach_every_master_but_the_router_bias(gradient):
    for path, grad in jax.tree_util.tree_leaves_with_path(gradient[1]):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(grad).all(), name
        assert bool(jnp.any(grad != 0)) != name.endswith("router_bias"), name


def test_init_starts_from_the_stored_weights(config, params, tmp_path):
    export(tmp_path, config.model, params)
    again = init_state(dataclasses.replace(config, init=str(tmp_path), seed=9)).params
    trained = jax.jit(stored, static_argnums=0)(config.model, params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b, np.float32))
    wider = dataclasses.replace(config.model, intermediate_size=64)
    with pytest.raises(ValueError, match="init .* differs from .model. in intermediate_size"):
        init_state(dataclasses.replace(config, init=str(tmp_path), model=wider))


def test_biases_move_against_the_load(params):
    loads = jnp.array([[0.7, 0.25, 0.05, 0.0]])
    moved = balance(MODEL, params, loads, 0.01).layers[1].ffn.router_bias
    np.testing.assert_allclose(moved - params.layers[1].ffn.router_bias, [-0.01, 0, 0.01, 0.01], atol=1e-9)
