"""Generated pictures, questions about them, and the batches of `train.see`."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from k3jax.chat import Tokenizer, load_tokenizer
from k3jax.checkpoint import resolve
from k3jax.init import init_params
from k3jax.presets import K3
from k3jax.vision import picture_of
from k3jax.vision.pack import pack
from train.pictures import COLOURS, KINDS, MOST_SHAPES, arrays, image, questions, scene
from train.see import NANO_VL, SeeConfig, init_state, main, score, train_step
from train.see_data import TOKENS, WIDTH, centres, example, make_batch, pack_scene


def scenes(n, seed="test"):
    return [scene(random.Random(f"{seed} {i}")) for i in range(n)]


@pytest.fixture(scope="module")
def folder():
    return str(resolve("nano"))


def test_a_picture_shows_what_its_answers_say():
    for one in scenes(200):
        pixels = image(one)
        assert (
            pixels.shape == (one.height, one.width, 3) and 56 <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= 224
        )
        shapes = np.abs(pixels.astype(int) - one.ground).max(-1) > 60
        labels, found = ndimage.label(shapes)
        assert found == one.count
        inner = pixels[ndimage.binary_erosion(shapes, iterations=2)]
        assert (inner == one.rgb).all() and np.abs(inner[0].astype(int) - COLOURS[one.colour]).max() <= 12
        box = ndimage.find_objects(labels)[0]
        filled = (labels[box] == 1).mean()  # pi / 4, 1, 1 / 2
        assert {"circle": 0.7 < filled < 0.86, "square": filled > 0.85, "triangle": filled < 0.65}[one.kind]


def test_scenes_are_varied_and_repeat():
    some = scenes(300)
    assert {s.kind for s in some} == set(KINDS) and {s.colour for s in some} == set(COLOURS)
    assert {s.count for s in some} == set(range(1, MOST_SHAPES + 1))
    assert scenes(5) == some[:5] and scenes(5, "other") != some[:5]


def test_answers():
    one = dataclasses.replace(scenes(1)[0], colour="blue", kind="square", shapes=((30, 30, 9),))
    assert [q.answer for q in questions(one)] == ["blue", "1", "1 blue square"]
    two = dataclasses.replace(one, shapes=((30, 30, 9), (10, 10, 6)))
    assert questions(two)[2].answer == "2 blue squares"


def test_scenes_on_the_device_are_what_the_image_processor_makes():
    for one in scenes(8):
        device = {name: jnp.asarray(values[0]) for name, values in arrays([one]).items()}
        got, picture = jax.jit(pack_scene)(device), picture_of(Image.fromarray(image(one)))
        want = pack(K3.vision, picture.patches(), [picture.grid])
        n, m = len(picture.patches()), picture.tokens
        assert np.abs(got.pixels[:n] - want.pixels[:n]).max() < 0.01  # a whole step is 0.0078, at an edge
        assert (np.abs(got.pixels[:n] - want.pixels[:n]) > 1e-6).mean() < 0.001
        for name in ("place", "grid", "item"):
            assert np.array_equal(getattr(got, name)[:n], getattr(want, name)[:n]), name
        assert np.array_equal(got.source[:m], want.source[:m]) and np.array_equal(got.frames, np.ones(TOKENS))
        assert (got.item[n:] == -1).all() and (got.source[m:] == len(got.item)).all()
        counts, used = jax.jit(centres)(device)
        assert int(counts.sum()) == one.count and int(used.sum()) == m and not counts[m:].any()


def test_rows_of_a_batch(folder):
    batch = make_batch(folder, 0, 16, 3)
    again = make_batch(folder, 0, 16, 3)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)
    assert not np.array_equal(batch["tokens"], make_batch(folder, 0, 16, 4)["tokens"])
    tokenizer = Tokenizer(folder)
    for row in range(16):
        n = batch["lengths"][row]
        assert np.array_equal(batch["labels"][row, : n - 1], batch["tokens"][row, 1:n])
        image_tokens = batch["image"][row]
        assert np.array_equal(image_tokens[image_tokens >= 0], np.arange((image_tokens >= 0).sum()))
        w, h = batch["size"][row]
        assert (image_tokens >= 0).sum() == -(-w // 28) * -(-h // 28)
        answer = tokenizer.decode(batch["labels"][row][batch["targets"][row]].tolist())
        end = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
        assert answer.endswith(end)
        words = answer.removesuffix(end).removeprefix("<|close|>think<|sep|><|open|>response<|sep|>").split()
        colour = next(name for name, rgb in COLOURS.items() if np.abs(batch["rgb"][row] - rgb).max() <= 12)
        count = str((batch["shapes"][row, :, 2] > 0).sum())
        assert set(words) <= {colour, count, *KINDS, *(f"{kind}s" for kind in KINDS)} and words


def test_the_longest_row_fits(folder):
    tokenizer = Tokenizer(folder)
    for one in scenes(30):
        one = dataclasses.replace(one, width=224, height=224)
        for question in questions(one):
            ids, start = example(tokenizer, one, question, True)
            assert len(ids) - 1 <= WIDTH and 0 < start < len(ids)


@pytest.mark.slow
def test_training_learns_a_batch_by_heart(folder):
    cfg = dataclasses.replace(NANO_VL, dtype="float32", num_hidden_layers=2, layer_types=("kda", "mla"))
    config = SeeConfig(batch=4)
    state, batch = init_state(cfg, config), make_batch(folder, 0, 4, 0)
    for i in range(60):
        state, metrics = train_step(cfg, config, state, batch, jnp.float32(2e-3))
        if i == 0:
            first = {name: float(value) for name, value in metrics.items()}
    assert float(metrics["loss"]) < 0.1 * first["loss"] and float(metrics["right"]) == 1
    assert float(metrics["centres"]) < 0.5 * first["centres"]


@pytest.mark.slow
def test_score_asks_both_questions(folder):
    cfg = dataclasses.replace(NANO_VL, dtype="float32", num_hidden_layers=2, layer_types=("kda", "mla"))
    result = score(cfg, init_params(cfg, jax.random.key(0)), load_tokenizer("nano"), 2, batch=2)
    assert dataclasses.astuple(result) == (2, 0, 0, 0)  # random weights know nothing


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert "--learning-rate" in out and "(default: 0.002)" in out
