"""Folders in, parameters out, and back: bit-exact round trips, sharded reads, and one refusal per fault."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

import k3jax
from k3jax.checkpoint import resolve
from k3jax.convert import convert
from k3jax.params import leaf_paths
from k3jax.safetensors_io import CheckpointError, TensorFolder
from tests.conftest import relative_l2

CHECKPOINTS = {
    "bf16": ("k3_tiny", "config.json", "model.safetensors"),
    "mxfp4": ("k3_tiny", "config_mxfp4.json", "model_mxfp4.safetensors"),
    "48b": ("kimi_linear_tiny", "config.json", "model.safetensors"),
}


def place(golden, tmp_path, kind):
    """A writable copy of one golden checkpoint."""
    folder, config, weights = CHECKPOINTS[kind]
    shutil.copy(golden / folder / config, tmp_path / "config.json")
    shutil.copy(golden / folder / weights, tmp_path / "model.safetensors")
    return tmp_path


def same(a, b):
    paths = dict(leaf_paths(a)), dict(leaf_paths(b))
    assert paths[0].keys() == paths[1].keys()
    for path, leaf in paths[0].items():
        other = paths[1][path]
        assert leaf.dtype == other.dtype and np.array_equal(np.asarray(leaf), np.asarray(other)), path


@pytest.mark.parametrize("shard_bytes", [10**9, 200_000])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_save_and_load_are_bit_exact(golden, tmp_path, kind, shard_bytes):
    source = place(golden, tmp_path, kind)
    cfg, params = k3jax.load(source)
    k3jax.save(tmp_path / "out", cfg, params, shard_bytes=shard_bytes)
    again_cfg, again = k3jax.load(tmp_path / "out")
    assert again_cfg == cfg
    same(params, again)
    files = TensorFolder(tmp_path / "out")
    sizes: dict = {}
    for info in files.tensors.values():
        sizes[info.file] = sizes.get(info.file, 0) + info.nbytes
    assert max(sizes.values()) <= shard_bytes
    assert len(sizes) == 1 if shard_bytes == 10**9 else len(sizes) > 3
    if kind != "48b":  # the 48B golden spells its dense layer differently
        stored = load_file(source / "model.safetensors")
        assert stored.keys() == files.tensors.keys()
        for name, array in stored.items():
            written = files.read(name)
            assert written.dtype == array.dtype and np.array_equal(written, array), name


def test_numbers_are_the_files_own(golden, tmp_path):
    source = place(golden, tmp_path, "bf16")
    _, params = k3jax.load(source)
    stored = load_file(source / "model.safetensors")
    layer = "language_model.model.layers."
    assert np.array_equal(params.layers[1].attn.q_proj, stored[layer + "1.self_attn.q_proj.weight"].T)
    assert np.array_equal(params.layers[2].ffn.w2[5], stored[layer + "2.block_sparse_moe.experts.5.w2.weight"].T)
    conv = stored[layer + "0.self_attn.v_conv1d.weight"].reshape(3, 16, 4)
    assert np.array_equal(params.layers[0].attn.conv[2], conv)
    assert params.layers[0].attn.conv.dtype == jnp.float32


def test_a_log_padding_is_never_read(golden, tmp_path):
    source = place(golden, tmp_path, "bf16")
    stored = load_file(source / "model.safetensors")
    name = "language_model.model.layers.1.self_attn.A_log"
    _, clean = k3jax.load(source)
    stored[name] = stored[name].copy()
    stored[name][3:] = np.nan
    save_file(stored, source / "model.safetensors")
    _, params = k3jax.load(source)
    same(clean, params)
    stored[name] = stored[name][:3].reshape(1, 1, 3, 1)
    save_file(stored, source / "model.safetensors")
    same(clean, k3jax.load(source)[1])


def test_aliases_of_other_exports(golden, tmp_path):
    source = place(golden, tmp_path, "bf16")
    _, params = k3jax.load(source)
    stored = load_file(source / "model.safetensors")
    renamed = {k.replace("language_model.model.layers.", "language_model.layers."): v for k, v in stored.items()}
    save_file(renamed, source / "model.safetensors")
    same(params, k3jax.load(source)[1])
    text = {k.removeprefix("language_model."): v for k, v in stored.items() if k.startswith("language_model.")}
    save_file(text, source / "model.safetensors")
    cfg, text_only = k3jax.load(source)
    assert cfg.vision is None and text_only.vision is None
    assert np.array_equal(text_only.lm_head, params.lm_head)


@pytest.mark.parametrize("kind", ["mxfp4", "48b"])
def test_sharded_load_puts_each_slice_on_its_device(golden, tmp_path, kind):
    source = place(golden, tmp_path, kind)
    cfg, params = k3jax.load(source)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    rules = k3jax.Rules(heads=None, ffw="tp", experts="tp", vocab="tp", embed="dp")
    _, sharded = k3jax.load(source, mesh=mesh, rules=rules)
    same(params, sharded)
    w1 = sharded.layers[1].ffn.w1.packed if kind == "mxfp4" else sharded.layers[1].ffn.w1
    assert {s.data.shape[0] for s in w1.addressable_shards} == {2}
    assert {s.data.shape for s in sharded.lm_head.addressable_shards} == {(32, 128)}
    tokens = jnp.arange(12)[None] * 40 % cfg.vocab_size
    expected, _ = k3jax.forward(cfg, params, tokens)
    logits, _ = k3jax.forward(cfg, sharded, tokens)
    assert relative_l2(logits, expected) < 1e-5


def test_a_mesh_that_does_not_divide_is_refused(golden, tmp_path):
    source = place(golden, tmp_path, "bf16")
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="attn.*mesh axis 'tp' has 8 devices"):
        k3jax.load(source, mesh=mesh)
    with pytest.raises(ValueError, match="mesh axis 'model'"):
        k3jax.load(source, mesh=mesh, rules=k3jax.Rules(vocab="model"))
    with pytest.raises(ValueError, match="one mesh axis for two dimensions"):
        k3jax.load(source, mesh=mesh, rules=k3jax.Rules(vocab="tp", embed="tp"))


def edit(source, change):
    stored = dict(load_file(source / "model.safetensors"))
    change(stored)
    save_file(stored, source / "model.safetensors")


NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.5.w1."
FAULTS = {
    "missing": (lambda t: t.pop(NORM), f"{NORM} is missing"),
    "extra": (lambda t: t.update(surprise=t[NORM]), "tensor surprise and 0 more are not part"),
    "mis-shaped": (lambda t: t.update({NORM: t[NORM][:-1].copy()}), rf"{NORM} has shape \[63\]"),
    "wrong dtype": (lambda t: t.update({NORM: t[NORM].astype(np.int32)}), f"{NORM} has dtype I32"),
    "half a pair": (lambda t: t.pop(EXPERT + "weight_scale"), "w1.weight_scale is missing"),
    "NaN scale": (lambda t: t[EXPERT + "weight_scale"].fill(255), "experts.5.w1.weight_scale.*255"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors_are_refused_by_name(golden, tmp_path, fault):
    source = place(golden, tmp_path, "mxfp4")
    change, message = FAULTS[fault]
    edit(source, change)
    with pytest.raises(CheckpointError, match=message) as error:
        k3jax.load(source)
    assert "\n" not in str(error.value)


def test_broken_files_are_refused(golden, tmp_path):
    source = place(golden, tmp_path, "bf16")
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    lies = {
        "truncated": whole[:-100],
        "header only": whole[: 8 + length],
        "empty": b"",
        "header length past the end": (len(whole) * 2).to_bytes(8, "little") + whole[8:],
        "not json": whole[:8] + b"x" * length + whole[8 + length :],
    }
    header[NORM]["data_offsets"][1] += 2
    moved = json.dumps(header).encode()
    lies["offsets overlap"] = len(moved).to_bytes(8, "little") + moved + whole[8 + length :]
    for what, content in lies.items():
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
            k3jax.load(source)
            pytest.fail(what)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no .*safetensors weights"):
        k3jax.load(source)


def test_broken_index_is_refused(golden, tmp_path):
    cfg, params = k3jax.load(place(golden, tmp_path, "bf16"))
    out = tmp_path / "out"
    k3jax.save(out, cfg, params, shard_bytes=200_000)
    index = out / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = next(iter(good["weight_map"]))
    for change, message in (
        (lambda m: m.update({first: "../model.safetensors"}), "outside the model folder"),
        (lambda m: m.update({first: "model-00009-of-000009.safetensors"}), "is missing although"),
        (lambda m: m.update(ghost=m[first]), "lacks ghost"),
    ):
        bad = json.loads(json.dumps(good))
        change(bad["weight_map"])
        index.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match=message):
            k3jax.load(out)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        k3jax.load(out)


def test_what_is_not_a_model():
    with pytest.raises(CheckpointError, match="preset 'k3' has a config but no weights"):
        resolve("k3")
    with pytest.raises(CheckpointError, match="no-such-folder is not a folder, a preset"):
        resolve("no-such-folder")


def test_unpacking_is_exact_and_packing_returns_the_same_bytes(golden, tmp_path):
    source = place(golden, tmp_path, "mxfp4")
    (tmp_path / "bf16").mkdir()
    config = convert(source, tmp_path / "bf16", experts="bf16", shard_bytes=10**9)
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    cfg, unpacked = k3jax.load(tmp_path / "bf16")
    assert not cfg.mxfp4_experts
    _, packed = k3jax.load(source)
    for layer in range(1, 5):
        for which in ("w1", "w2", "w3"):
            exact = getattr(packed.layers[layer].ffn, which).dequantize(jnp.float32)
            plain = np.asarray(getattr(unpacked.layers[layer].ffn, which), np.float32)
            assert np.array_equal(plain.swapaxes(1, 2), exact)
    convert(tmp_path / "bf16", tmp_path / "again", experts="mxfp4", shard_bytes=100_000)
    (tmp_path / "again" / "config.json").write_text(json.dumps(cfg.to_hf()))
    _, again = k3jax.load(tmp_path / "again")
    for layer in range(1, 5):
        for which in ("w1", "w2", "w3"):
            one, two = (getattr(p.layers[layer].ffn, which).dequantize(jnp.float32) for p in (packed, again))
            assert np.array_equal(one, two)


def test_random_parameters_do_not_depend_on_the_mesh():
    cfg = k3jax.preset("tiny")
    plain = k3jax.init_params(cfg, jax.random.key(3))
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    rules = k3jax.Rules(heads=None, vocab="tp", experts="tp", ffw=None)
    same(plain, k3jax.init_params(cfg, jax.random.key(3), mesh=mesh, rules=rules))
    assert abs(float(plain.embed.astype(jnp.float32).std()) - 0.02) < 1e-3
    assert float(plain.layers[0].attn_norm.min()) == 1.0
    dt = jax.nn.softplus(plain.layers[0].attn.dt_bias)
    assert float(dt.min()) >= 1e-4 and float(dt.max()) <= 0.1001
