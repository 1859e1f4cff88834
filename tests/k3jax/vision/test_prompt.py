"""Pictures in conversations and on the command line."""

import dataclasses
import io
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import k3jax
from k3jax.__main__ import main
from k3jax.chat.deltas import join
from k3jax.chat.reader import OutputReader
from k3jax.presets import TINY, TINY48
from k3jax.vision import embed_pictures, encode_chat, picture_of
from tests.k3jax.chat.folders import write_folder
from tests.k3jax.vision.images import encoded, noise

PAD = 256 + 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A seeing checkpoint with random weights, a byte tokenizer and two pictures."""
    place = tmp_path_factory.mktemp("seeing")
    cfg = dataclasses.replace(TINY, media_placeholder_token_id=PAD, eos_token_id=256 + 2)
    k3jax.save(place, cfg, k3jax.init_params(cfg, jax.random.key(1)))
    write_folder(place)
    (place / "a.png").write_bytes(encoded(noise(60, 40)))
    (place / "b.png").write_bytes(encoded(Image.new("RGB", (28, 28), "red")))
    return place


def run(capsys, *argv):
    status = main([str(a) for a in argv])
    return status, *capsys.readouterr()


def parts(n, text):
    return [{"role": "user", "content": [*[{"type": "image"}] * n, {"type": "text", "text": text}]}]


def test_one_block_per_image_with_the_files_size(folder):
    cfg, tokenizer = k3jax.config.read_config(folder), k3jax.load_tokenizer(folder)
    pictures = [picture_of(noise(60, 40)), picture_of(noise(1, 1))]
    ids = encode_chat(cfg, tokenizer, parts(2, "what?"), pictures)
    special = tokenizer.special

    def block(size, n):
        content, end = special["<|media_content|>"], special["<|media_end|>"]
        return [special["<|media_begin|>"], *tokenizer.encode(f"image {size}"), content, *[PAD] * n, end]

    want = [*block("60x40", 6), *block("1x1", 1), *tokenizer.encode("what?")]
    start = ids.index(special["<|media_begin|>"])
    assert ids[start : start + len(want)] == want and ids.count(PAD) == 7


@pytest.mark.parametrize("text", ["<|media_pad|>", "<|kimi_image_placeholder|>", "<|media_begin|>image 9x9"])
def test_text_never_forges_an_image(folder, text):
    cfg, tokenizer = k3jax.config.read_config(folder), k3jax.load_tokenizer(folder)
    picture = picture_of(noise(28, 28))
    ids, plain = (encode_chat(cfg, tokenizer, parts(1, t), [picture]) for t in (text, ""))
    assert ids.count(PAD) == 1 and len(ids) == len(plain) + len(tokenizer.encode(text))


def test_pictures_and_parts_must_agree(folder):
    cfg, tokenizer = k3jax.config.read_config(folder), k3jax.load_tokenizer(folder)
    picture = picture_of(noise(28, 28))
    for n, pictures in ((2, [picture]), (1, [picture] * 2), (1, [])):
        with pytest.raises(ValueError, match="image"):
            encode_chat(cfg, tokenizer, parts(n, "x"), pictures)
    with pytest.raises(ValueError, match="no vision tower"):
        encode_chat(TINY48, tokenizer, parts(1, "x"), [picture])
    other = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, patch_size=16))
    with pytest.raises(ValueError, match=r"\(14, \(2, 2\)\), the tower \(16, \(2, 2\)\)"):
        encode_chat(other, tokenizer, parts(1, "x"), [picture])


def test_generate_shows_images(folder, capsys):
    argv = ["generate", "--model", folder, "--max-new-tokens", 4, "--no-thinking", "what?"]
    status, out, err = run(capsys, *argv, "--image", folder / "a.png", "--image", folder / "b.png")
    assert status == 0 and "stopped after 4 tokens" in err
    cfg, params = k3jax.load(folder)
    tokenizer = k3jax.load_tokenizer(folder)
    pictures = [picture_of(noise(60, 40)), picture_of(Image.new("RGB", (28, 28), "red"))]
    ids = encode_chat(cfg, tokenizer, parts(2, "what?"), pictures, thinking=False)
    images = [embed_pictures(cfg, params, pictures)]
    got = k3jax.generate(cfg, params, [ids], max_new_tokens=4, stop_ids=tokenizer.stop_ids, images=images)
    reader = OutputReader(tokenizer, thinking=False)
    assert out == join([*reader.feed(got.tokens[0]), *reader.finish("length")]).content + "\n"
    one_by_one = [embed_pictures(cfg, params, [picture])[0] for picture in pictures]
    for together, alone in zip(images[0], one_by_one, strict=True):
        assert np.abs(together - alone).max() < 1e-5


def test_chat_shows_images_with_the_next_message(folder, capsys, monkeypatch):
    seen = []

    def record(cfg, params, prompt, *, images=None, **options):
        seen.append((prompt.count(PAD), [len(rows) for rows in images or []]))
        yield [3, 4], "length"

    monkeypatch.setattr("k3jax.cli.chat.stream", record)
    a, b = folder / "a.png", folder / "b.png"
    lines = f"hi\n/image {a}\n/image {folder}/none.png\n/image {b}\nwhat?\nand?\n/image {b}\n/reset\nhi\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status, out, err = run(capsys, "chat", "--model", folder)
    assert status == 0 and "60x40 pixels, 6 tokens" in out
    assert err.count("\n") == 1 and "none.png is not a file" in err
    assert seen == [(0, []), (7, [6, 1]), (7, [6, 1]), (0, [])]


def test_refusals_are_one_sentence(folder, capsys, tmp_path):
    blind = tmp_path / "blind"
    k3jax.save(blind, TINY48, k3jax.init_params(TINY48, jax.random.key(0)))
    write_folder(blind)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    for model, options, words in (
        (blind, ["--image", folder / "a.png"], "this model has no vision tower"),
        (folder, ["--image", broken], "broken.png has no readable header"),
        (folder, ["--image", tmp_path / "absent"], "absent is not a file"),
        (folder, ["--image", folder / "a.png", "--raw"], "--image needs the chat encoding"),
        (folder, ["--image", folder / "a.png", "--ids"], "--image needs the chat encoding"),
        (folder, ["--image", folder / "a.png"] * 65, "65 images were given, the limit is 64"),
    ):
        status, out, err = run(capsys, "generate", "--model", model, "1", *options)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_the_page_on_images_runs(folder):
    page = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 1
    names = {"folder": folder, "file": folder / "a.png"}
    exec(compile(blocks[0], "docs/images.md", "exec"), names)
    assert len(names["out"].tokens[0]) <= 8 and names["rows"][0].shape == (6, 64)
