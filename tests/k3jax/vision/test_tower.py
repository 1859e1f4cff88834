"""Tower and projector: parity with golden vectors in float32, and what packing may not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.presets import K3, TINY
from k3jax.vision import attention, check_vision, embed_packed
from k3jax.vision import pack as packing
from k3jax.vision.pack import PATCHES, batches, bucket, pack
from k3jax.vision.position import table_embedding
from k3jax.vision.resize import image_size
from k3jax.vision.tower import encoder, merge, patch_embed, projector, tower
from tests.conftest import relative_l2

CASES = ("image", "native", "batch", "video")


def packed_case(cfg, gold, case):
    grids = [tuple(map(int, grid)) for grid in gold[f"vision.{case}.grid_thw"]]
    return pack(cfg.vision, gold[f"vision.{case}.pixel_values"], grids)


@pytest.mark.parametrize("case", CASES)
def test_every_stage(seeing, case):
    cfg, params, gold = seeing
    v, p, packed = cfg.vision, params.vision, packed_case(cfg, gold, case)
    patches, tokens = len(gold[f"vision.{case}.encoder"]), len(gold[f"vision.{case}.tower"])
    x = patch_embed(v, p, packed)
    assert relative_l2(x[:patches], gold[f"vision.{case}.patch_embed"]) < 5e-5
    x = encoder(v, p, x, packed)
    assert relative_l2(x[:patches], gold[f"vision.{case}.encoder"]) < 5e-5
    x = merge(x, packed)
    assert relative_l2(x[:tokens], gold[f"vision.{case}.tower"]) < 5e-5
    assert not np.any(x[tokens:])
    assert relative_l2(projector(v, p, x)[:tokens], gold[f"vision.{case}.projector"]) < 5e-5


@pytest.mark.parametrize("case", CASES)
def test_stages_feed_each_other_as_stored(seeing, case):
    """Each stage from the golden input of its own, so that an error cannot hide in the one before."""
    cfg, params, gold = seeing
    v, p, packed = cfg.vision, params.vision, packed_case(cfg, gold, case)
    g = {name: gold[f"vision.{case}.{name}"] for name in ("patch_embed", "encoder", "tower", "projector")}

    def padded(x):
        return jnp.zeros((len(packed.item), x.shape[1])).at[: len(x)].set(x)

    out = encoder(v, p, padded(g["patch_embed"]), packed)
    assert relative_l2(out[: len(g["encoder"])], g["encoder"]) < 5e-5
    assert relative_l2(merge(padded(g["encoder"]), packed)[: len(g["tower"])], g["tower"]) < 1e-6
    assert relative_l2(projector(v, p, jnp.asarray(g["tower"])), g["projector"]) < 5e-5


def test_whole_program(seeing):
    cfg, params, gold = seeing
    for case in CASES:
        want = gold[f"vision.{case}.projector"]
        got = embed_packed(cfg, params.vision, packed_case(cfg, gold, case))
        assert relative_l2(got[: len(want)], want) < 5e-5


def test_two_images_in_one_batch_do_not_see_each_other(seeing):
    cfg, params, gold = seeing
    pixels, want = gold["vision.batch.pixel_values"], gold["vision.batch.projector"]
    swapped = pack(cfg.vision, np.concatenate([pixels[24:], pixels[:24]]), [(1, 2, 10), (1, 6, 4)])
    got = embed_packed(cfg, params.vision, swapped)
    assert relative_l2(got[:5], want[6:]) < 5e-5
    assert relative_l2(got[5:11], want[:6]) < 5e-5
    alone = embed_packed(cfg, params.vision, pack(cfg.vision, pixels[24:], [(1, 2, 10)]))
    assert relative_l2(alone[:5], want[6:]) < 5e-5


def test_an_image_and_a_video_in_one_batch(seeing):
    cfg, params, gold = seeing
    both = np.concatenate([gold["vision.native.pixel_values"], gold["vision.video.pixel_values"]])
    got = embed_packed(cfg, params.vision, pack(cfg.vision, both, [(1, 8, 8), (3, 4, 6)]))
    assert relative_l2(got[:16], gold["vision.native.projector"]) < 5e-5
    assert relative_l2(got[16:22], gold["vision.video.projector"]) < 5e-5


def test_blocks_of_queries_change_nothing(seeing, monkeypatch):
    cfg, params, gold = seeing
    monkeypatch.setattr(attention, "BLOCK_SCORES", 1)  # 16 queries at a time, the last block of 48 padded
    packed = packed_case(cfg, gold, "batch")
    packed = jax.tree.map(lambda x: x[:44] if len(x) == 64 else x, packed)
    got = tower(cfg.vision, params.vision, packed)
    assert relative_l2(got[:11], gold["vision.batch.tower"]) < 5e-5


def test_bfloat16_stays_bfloat16(seeing):
    cfg, params, gold = seeing
    out = tower(cfg.vision, params.vision, packed_case(cfg, gold, "native"), jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert relative_l2(out[:16].astype(jnp.float32), gold["vision.native.tower"]) < 2**-6  # 8 bits, some 10 roundings


def test_table_of_the_images_own_size_is_read_as_stored():
    table = jax.random.normal(jax.random.key(0), (4, 6, 5))
    place = jnp.array([(0, r, c) for r in range(4) for c in range(6)])
    got = table_embedding(table, place, jnp.broadcast_to(jnp.array([1, 4, 6]), (24, 3)))
    assert np.array_equal(got, table.reshape(24, 5))


def test_table_resize_by_hand():
    """A ramp 0, 1, 2, 3 along one axis: half-pixel centres, ends held."""
    table = jnp.arange(4.0)[None, :, None]

    def row(size):
        place = jnp.array([(0, 0, c) for c in range(size)])
        return table_embedding(table, place, jnp.broadcast_to(jnp.array([1, 1, size]), (size, 3)))[:, 0].tolist()

    assert row(2) == [0.5, 2.5]
    assert row(8) == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_one_program_serves_every_size_of_a_bucket(seeing):
    cfg, params, _ = seeing
    zeros = np.zeros((PATCHES[0], 3, 14, 14), np.float32)
    embed_packed(cfg, params.vision, pack(cfg.vision, zeros[:4], [(1, 2, 2)]))
    programs = embed_packed._cache_size()
    for grids in ([(1, 2, 30)], [(1, 8, 6), (1, 2, 2)], [(1, 4, 4)] * 4):
        embed_packed(cfg, params.vision, pack(cfg.vision, zeros[: sum(h * w for _, h, w in grids)], grids))
    assert embed_packed._cache_size() == programs


def test_gradient_reaches_every_weight(seeing):
    cfg, params, gold = seeing
    packed = packed_case(cfg, gold, "batch")
    grads = jax.grad(lambda p: jnp.sum(embed_packed(cfg, p, packed) ** 2 * jnp.arange(64.0)))(params.vision)
    for name, grad in grads.items():
        assert jnp.isfinite(grad).all() and jnp.any(grad != 0), name


def test_batches_keep_order_and_size():
    grids = [(1, 32, 32)] * 5 + [(1, 216, 286)] + [(1, 2, 2)] * 2
    assert list(batches(grids)) == [[0, 1, 2, 3], [4], [5], [6, 7]]
    assert list(batches([])) == []


def test_the_largest_image_of_k3_has_a_bucket():
    _, rows, columns = image_size(1861, 7041).grid
    assert bucket(rows * columns) == PATCHES[-1]
    assert all(a < b and b % 4 == 0 for a, b in zip(PATCHES, PATCHES[1:], strict=False))


@pytest.mark.parametrize(
    ("grid", "words"),
    [((1, 3, 2), "merge"), ((1, 0, 2), "merge"), ((5, 2, 2), "5 frames"), ((1, 514, 2), "512 patches")],
)
def test_grids_that_the_tower_does_not_have(grid, words):
    pixels = np.zeros((abs(int(np.prod(grid))), 3, 14, 14), np.float32)
    with pytest.raises(ValueError, match=words):
        pack(TINY.vision, pixels, [grid])


def test_pixels_must_fit_the_grids():
    with pytest.raises(ValueError, match="do not fit"):
        pack(TINY.vision, np.zeros((5, 3, 14, 14), np.float32), [(1, 2, 2)])
    with pytest.raises(ValueError, match="largest batch"):
        packing.bucket(PATCHES[-1] + 1)


def test_a_text_model_says_that_it_cannot_see():
    import dataclasses

    with pytest.raises(ValueError, match="no vision tower"):
        check_vision(dataclasses.replace(TINY, vision=None))
    assert check_vision(K3) == K3.vision
