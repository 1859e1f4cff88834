"""Parity in float32 with vectors computed by other implementations (data/golden/*/README.md)."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import k3jax
from tests.conftest import DATA, relative_l2

K3 = {
    "bf16": ("k3_tiny", "model.safetensors", "config.json"),
    "mxfp4": ("k3_tiny", "model_mxfp4.safetensors", "config_mxfp4.json"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The K3 golden folder holds two checkpoints; give each a folder of its own."""
    out = {}
    for kind, (folder, weights, config) in K3.items():
        place = tmp_path_factory.mktemp(kind)
        (place / "model.safetensors").symlink_to(DATA / "golden" / folder / weights)
        (place / "config.json").symlink_to(DATA / "golden" / folder / config)
        suffix = "" if kind == "bf16" else "_mxfp4"
        out[kind] = (
            *k3jax.load(place, dtype="float32"),
            load_file(DATA / "golden" / folder / f"golden{suffix}.safetensors"),
        )
    place = DATA / "golden" / "kimi_linear_tiny"
    out["48b"] = (*k3jax.load(place, dtype="float32"), load_file(place / "golden.safetensors"))
    return out


def in_chunks(cfg, params, ids, size):
    """Logits of ids [T] fed `size` at a time through one cache, and that cache."""
    cache = k3jax.init_cache(cfg, batch=1, max_len=128)
    parts = []
    for at in range(0, len(ids), size):
        part = np.zeros(size, np.int32)
        chunk = ids[at : at + size]
        part[: len(chunk)] = chunk
        logits, cache = k3jax.forward(cfg, params, part[None], lengths=jnp.array([len(chunk)]), cache=cache)
        parts.append(np.asarray(logits[0, : len(chunk)]))
    return np.concatenate(parts), cache


def check_k3(kind, cfg, gold, prompt, logits, cache):
    assert relative_l2(logits, gold[f"{prompt}.logits"]) < 5e-5
    for i in cfg.kda_layers if kind == "bf16" else ():  # the packed file stores no states
        assert relative_l2(cache.layers[i].state[0], gold[f"{prompt}.layers.{i}.kda_state"]) < 5e-5
        conv = np.asarray(cache.layers[i].conv[0]).swapaxes(0, 1).reshape(3, 3, -1)  # [qkv, row, P]
        assert relative_l2(conv, gold[f"{prompt}.layers.{i}.conv_state"]) < 5e-5


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("prompt", ["prompt0", "prompt1"])
def test_k3_in_chunks(models, kind, prompt, size):
    cfg, params, gold = models[kind]
    check_k3(kind, cfg, gold, prompt, *in_chunks(cfg, params, gold[f"{prompt}.input_ids"], size))


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("prompt", ["prompt0", "prompt1"])
def test_k3_one_shot_with_every_intermediate(models, kind, prompt):
    cfg, params, gold = models[kind]
    logits, cache, taps = k3jax.forward_with_intermediates(cfg, params, gold[f"{prompt}.input_ids"][None])
    check_k3(kind, cfg, gold, prompt, logits[0], cache)
    stored = {k.removeprefix(f"{prompt}.") for k in gold if k.startswith(f"{prompt}.")}
    stored = {k for k in stored if k.startswith(("layers.", "final_")) and "state" not in k}
    assert stored <= set(taps) and len(stored) >= 19
    for name in stored:
        value, want = taps[name], gold[f"{prompt}.{name}"]
        if name.endswith("router_weights"):
            by_id = np.argsort(taps[name.replace("weights", "ids")][0], axis=-1)
            value = np.take_along_axis(np.asarray(value), by_id[None], axis=-1)
        if name.endswith("router_ids"):
            assert np.array_equal(np.sort(value[0], axis=-1), want), name
        else:
            assert relative_l2(value[0], want) < 5e-5, name


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("prompt", ["prompt0", "prompt1"])
def test_k3_greedy(models, kind, prompt):
    cfg, params, gold = models[kind]
    ids, greedy = gold[f"{prompt}.input_ids"], gold[f"{prompt}.greedy_ids"]
    out = k3jax.generate(cfg, params, [ids.tolist()], max_new_tokens=len(greedy), stop_ids=())
    assert out.tokens == [greedy.tolist()]
    assert out.finish_reasons == ["length"]
    logits, cache = in_chunks(cfg, params, np.concatenate([ids, greedy]), 1)
    assert relative_l2(logits[len(ids) :], gold[f"{prompt}.greedy_logits"]) < 5e-5
    for i in cfg.kda_layers if kind == "bf16" else ():
        assert relative_l2(cache.layers[i].state[0], gold[f"{prompt}.layers.{i}.kda_state_after_greedy"]) < 5e-5


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("prompt", ["p0", "p1", "p2"])
def test_48b_in_chunks(models, prompt, size):
    cfg, params, gold = models["48b"]
    logits, _ = in_chunks(cfg, params, gold[f"{prompt}.input_ids"][0], size)
    assert relative_l2(logits, gold[f"{prompt}.logits"][0]) < 1e-5


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2"])
def test_48b_one_shot_hidden_and_greedy(models, prompt):
    cfg, params, gold = models["48b"]
    ids = gold[f"{prompt}.input_ids"]
    logits, _, taps = k3jax.forward_with_intermediates(cfg, params, ids)
    assert relative_l2(logits, gold[f"{prompt}.logits"]) < 1e-5
    hidden = [taps[f"layers.{i}.prefix"] for i in range(cfg.num_hidden_layers - 1)] + [taps["final_norm"]]
    for j, value in enumerate(hidden, start=1):
        assert relative_l2(value, gold[f"{prompt}.hidden.{j}"]) < 1e-5, j
    out = k3jax.generate(cfg, params, ids, max_new_tokens=16, stop_ids=())
    assert out.tokens == gold[f"{prompt}.greedy"].tolist()


def test_mxfp4_matrices_decode_exactly(models):
    _, params, gold = models["mxfp4"]
    names = [k for k in gold if k.startswith("dequant.")]
    assert len(names) == 3
    for name in names:
        _, _, _, _, layer, _, _, expert, which, _ = name.split(".")
        matrix = getattr(params.layers[int(layer)].ffn, which)
        assert np.array_equal(matrix.dequantize(jnp.float32)[int(expert)], gold[name])


def test_batch_of_eight_ragged_prompts_gives_what_each_gives_alone(models):
    cfg, params, _ = models["mxfp4"]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (1, 2, 3, 15, 16, 17, 40, 70)]
    together = k3jax.generate(cfg, params, prompts, max_new_tokens=24, stop_ids=())
    alone = [k3jax.generate(cfg, params, [p], max_new_tokens=24, stop_ids=()).tokens[0] for p in prompts]
    assert together.tokens == alone
    how = dict(max_new_tokens=24, stop_ids=(), temperature=0.8, top_p=0.9)
    together = k3jax.generate(cfg, params, prompts, seed=list(range(8)), **how)
    alone = [k3jax.generate(cfg, params, [p], seed=i, **how).tokens[0] for i, p in enumerate(prompts)]
    assert together.tokens == alone
