"""Batches of questions about pictures: a pure function of (seed, step)."""

import functools
import random
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.chat.tokenizer import Tokenizer
from k3jax.vision import image_size
from k3jax.vision.pack import Packed
from k3jax.vision.prompt import expand
from train.pictures import MOST, Question, Scene, arrays, questions, render, scene

PATCH, CELL = 14, 28
GRID = MOST // PATCH  # patches on a side of the largest picture
TOKENS = (MOST // CELL) ** 2
WIDTH = 128  # places of a row: 64 image tokens and the words around them


def example(tokenizer: Tokenizer, one: Scene, question: Question, thinking: bool) -> tuple[list[int], int]:
    """Ids of the finished conversation and the length of its prompt."""
    size = image_size(one.width, one.height)
    parts = [{"type": "image"}, {"type": "text", "text": question.text}]
    asked = {"role": "user", "content": parts}
    answered = {"role": "assistant", "content": question.answer}
    encode = functools.partial(tokenizer.encode_chat, thinking=thinking, image_sizes=[(one.width, one.height)])
    prompt = encode([asked])
    whole = encode([asked, answered], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    return expand(whole, tokenizer.special["<|media_pad|>"], [size.tokens]), len(prompt) + size.tokens - 1


def make_batch(folder: str, seed: int, rows: int, step: int) -> dict[str, np.ndarray]:
    """tokens, labels, targets [R, W] as in `train.data`, `image` [R, W] (row of the picture's token, or -1), lengths
    [R], and the scenes' numbers for `render`."""
    tokenizer = _tokenizer(folder)
    pad = tokenizer.special["<|media_pad|>"]
    tokens, labels = np.zeros((2, rows, WIDTH), np.int32)
    targets = np.zeros((rows, WIDTH), bool)
    lengths = np.zeros(rows, np.int32)
    scenes = []
    for row in range(rows):
        rng = random.Random(f"{seed} {step} {row}")
        scenes.append(scene(rng))
        question = rng.choice(questions(scenes[-1]))
        ids, start = example(tokenizer, scenes[-1], question, rng.random() < 0.5)
        n = len(ids) - 1
        tokens[row, :n], labels[row, :n], lengths[row] = ids[:-1], ids[1:], n
        targets[row, start - 1 : n] = True
    at = tokens == pad
    index = np.where(at, np.cumsum(at, axis=1) - 1, -1).astype(np.int32)
    text = {"tokens": tokens, "labels": labels, "targets": targets, "lengths": lengths, "image": index}
    return text | arrays(scenes)


@functools.lru_cache(1)
def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer(Path(folder))


def pack_scene(one: Mapping[str, jax.Array]) -> Packed:
    """What `vision.pack` makes of one rendered scene, on the device and with room for the largest."""
    canvas = render(dict(one), MOST, jnp) / 255  # [MOST, MOST, 3]
    patches = ((canvas - 0.5) / 0.5).reshape(GRID, PATCH, GRID, PATCH, 3).transpose(0, 2, 4, 1, 3)
    columns, rows = -(-one["size"] // CELL) * 2  # patches, padded to whole cells
    patch = jnp.arange(GRID * GRID)
    row, column = patch // columns, patch % columns
    inside = patch < rows * columns
    token = jnp.arange(TOKENS)
    corner = jnp.array([0, 1]) + jnp.stack([jnp.zeros_like(columns), columns])[:, None]  # [2, 2]: of a token's patches
    first = token // (columns // 2) * 2 * columns + token % (columns // 2) * 2
    used = token < rows * columns // 4
    source = jnp.where(used[:, None], first[:, None] + corner.reshape(-1), len(patch))
    return Packed(
        pixels=patches[jnp.where(inside, row, GRID - 1), jnp.where(inside, column, GRID - 1)],
        item=jnp.where(inside, 0, -1),
        place=jnp.stack([jnp.zeros_like(row), row, column], axis=-1),
        grid=jnp.broadcast_to(jnp.stack([jnp.ones_like(rows), rows, columns]), (len(patch), 3)),
        source=source[:, None],
        frames=jnp.ones(TOKENS, jnp.int32),
    )


def centres(one: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """([TOKENS] int32: shapes whose centre lies in the cell of each image token, [TOKENS] bool: tokens in use)."""
    columns, rows = -(-one["size"] // CELL)
    x, y, r = one["shapes"][:, 0], one["shapes"][:, 1], one["shapes"][:, 2]
    cell = (y // CELL).astype(jnp.int32) * columns + (x // CELL).astype(jnp.int32)
    token = jnp.arange(TOKENS)
    return jnp.sum((cell == token[:, None]) & (r > 0), axis=1), token < rows * columns
