"""Images inside prompts: golden logits, every cut, ragged batches."""

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import decode
from k3jax.decode import prefill, prefill_chunk, stream
from k3jax.vision import PromptImages, embed_packed, expand, media_chunk
from k3jax.vision.pack import pack
from tests.conftest import relative_l2


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Prompts of some twenty tokens then have several chunks, and few programs compile."""
    monkeypatch.setattr(decode, "CHUNKS", (16,))


@pytest.fixture(scope="module")
def prompt(seeing):
    """(config, parameters, expanded ids, rows of the image, golden tensors)."""
    cfg, params, gold = seeing
    packed = pack(cfg.vision, gold["vision.image.pixel_values"], [(1, 6, 4)])
    rows = np.asarray(embed_packed(cfg, params.vision, packed))[:6]
    return cfg, params, gold["mm.input_ids_expanded"].tolist(), rows, gold


def other_rows(seed, n, cfg):
    return np.random.default_rng(seed).normal(size=(n, cfg.hidden_size)).astype(np.float32)


def after(cfg, params, prompts, images=None):
    """Logits after the last token of each prompt, by prefill in chunks."""
    return np.asarray(prefill(cfg, params, prompts, k3jax.init_cache(cfg, len(prompts), 64), images=images)[1])


def test_expansion_of_the_golden_prompt(prompt):
    cfg, _, ids, _, gold = prompt
    assert expand(gold["mm.input_ids"].tolist(), cfg.media_placeholder_token_id, [6]) == ids


def test_expansion_counts_images():
    assert expand([1, 9, 2, 9], 9, [2, 3]) == [1, 9, 9, 2, 9, 9, 9]
    assert expand([1, 2], 9, []) == [1, 2]
    with pytest.raises(ValueError, match="2 image placeholders for 1 images"):
        expand([9, 9], 9, [4])


def test_golden_logits_and_every_prefix(prompt):
    cfg, params, ids, rows, gold = prompt
    tokens = np.array([ids])
    media = media_chunk([PromptImages(cfg, ids, [rows])], 0, len(ids))
    embeds = np.where(media.present[:, None], media.rows, np.asarray(params.embed.astype(jnp.float32))[ids])
    assert relative_l2(embeds, gold["mm.inputs_embeds"]) < 5e-5
    logits, _, taps = k3jax.forward_with_intermediates(cfg, params, tokens, media=media)
    assert relative_l2(logits[0], gold["mm.logits"]) < 5e-5
    for i in range(cfg.num_hidden_layers):
        assert relative_l2(taps[f"layers.{i}.prefix"][0], gold[f"mm.layers.{i}.prefix"]) < 5e-5
    logits, _ = k3jax.forward(cfg, params, tokens, media=media)
    assert relative_l2(logits[0], gold["mm.logits"]) < 5e-5


def test_every_cut_equals_one_shot(prompt):
    cfg, params, ids, rows, gold = prompt
    for cut in range(len(ids) + 1):
        cache, logits, seen = k3jax.init_cache(cfg, 1, 64), None, 0
        for part in (ids[:cut], ids[cut:]):
            n = part.count(cfg.media_placeholder_token_id)
            cache, logits = prefill(cfg, params, [part], cache, logits, images=[[rows[seen : seen + n]]])
            seen += n
        assert relative_l2(logits[0], gold["mm.logits"][-1]) < 5e-5, cut


def test_an_image_across_the_boundary_of_two_chunks(prompt):
    cfg, params, _, _, _ = prompt
    pad = cfg.media_placeholder_token_id
    ids = [*range(10), *[pad] * 24, 7, 8, *[pad] * 5, 9]  # 42 tokens, the first image in three chunks of 16
    images = [other_rows(0, 24, cfg), other_rows(1, 5, cfg)]
    media = media_chunk([PromptImages(cfg, ids, images)], 0, len(ids))
    whole, _ = k3jax.forward(cfg, params, np.array([ids]), media=media)
    assert relative_l2(after(cfg, params, [ids], [images])[0], whole[0, -1]) < 5e-5


def test_ragged_batch_with_different_images_and_none(prompt):
    cfg, params, ids, rows, gold = prompt
    short = [5, 6, cfg.media_placeholder_token_id, 7]
    prompts = [ids, [1, 2, 3], short, ids]
    images = [[rows], [], [other_rows(2, 1, cfg)], [other_rows(3, 6, cfg)]]
    got = after(cfg, params, prompts, images)
    assert relative_l2(got[0], gold["mm.logits"][-1]) < 5e-5
    for i in range(4):
        assert relative_l2(got[i], after(cfg, params, [prompts[i]], [images[i]])[0]) < 1e-5
    assert relative_l2(got[1], after(cfg, params, [[1, 2, 3]])[0]) < 1e-5
    assert relative_l2(got[3], got[0]) > 0.1  # same tokens, another picture


def test_several_images_take_their_own_rows(prompt):
    cfg, params, ids, rows, gold = prompt
    split = after(cfg, params, [ids], [[rows[:2], rows[2:]]])
    assert relative_l2(split[0], gold["mm.logits"][-1]) < 5e-5
    swapped = after(cfg, params, [ids], [[rows[2:], rows[:2]]])
    assert relative_l2(swapped[0], gold["mm.logits"][-1]) > 1e-3


def test_generate_and_stream_see_the_image(prompt):
    cfg, params, ids, rows, _ = prompt
    at = list(ids)
    for _ in range(4):
        at.append(int(after(cfg, params, [at], [[rows]])[0].argmax()))
    want = at[len(ids) :]
    assert k3jax.generate(cfg, params, [ids], max_new_tokens=4, stop_ids=(), images=[[rows]]).tokens == [want]
    pieces = stream(cfg, params, ids, max_new_tokens=4, stop_ids=(), images=[rows])
    assert [id for new, _ in pieces for id in new] == want


def test_chunks_without_an_image_run_the_text_program(prompt):
    cfg, params, ids, rows, _ = prompt
    seen = [PromptImages(cfg, ids, [rows]), PromptImages(cfg, [1, 2], [])]
    assert media_chunk(seen, 0, 4) is None and media_chunk(seen, 10, 16) is None and media_chunk(seen, 32, 16) is None
    assert media_chunk(seen, 3, 2).present.tolist() == [False, True, False, False]
    after(cfg, params, [[1, 2, 3]])
    programs = prefill_chunk._cache_size()
    after(cfg, params, [[1, 2, 3]], [[]])
    assert prefill_chunk._cache_size() == programs


def test_bad_images_are_named(prompt):
    cfg, params, ids, rows, _ = prompt
    with pytest.raises(ValueError, match="the prompt has 6 placeholder tokens for images of 5 tokens"):
        PromptImages(cfg, ids, [rows[:5]])
    with pytest.raises(ValueError, match=r"shape \(6, 3\)"):
        PromptImages(cfg, ids, [rows[:, :3]])
    for images in ([[rows], []], []):
        with pytest.raises(ValueError, match=f"{len(images)} entries for 1 prompts"):
            k3jax.generate(cfg, params, [ids], images=images)
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        prefill(cfg, params, [ids, ids], k3jax.init_cache(cfg, 2, 64), images=[[rows]])
    with pytest.raises(ValueError, match="prompt 1 has 0 placeholder tokens for images of 6"):
        k3jax.generate(cfg, params, [ids, [1, 2]], images=[[rows], [rows]])


def test_any_cut_of_a_prompt_has_its_rows(prompt):
    cfg, _, ids, rows, _ = prompt
    seen = PromptImages(cfg, ids, [rows[:4], rows[4:]])
    whole, present = seen.cut(0, len(ids))
    assert np.array_equal(whole[4:10], rows) and present.sum() == 6 and not whole[~present].any()
    for start in range(len(ids) + 1):
        for stop in range(start, len(ids) + 3):
            part, here = seen.cut(start, stop)
            assert np.array_equal(part, whole[start:stop]) and np.array_equal(here, present[start:stop])
