"""Pictures to count and name: a few shapes of one kind and colour on a plain ground, 56 to 224 pixels a side.

A scene is a handful of numbers; `render` draws it with numpy or jax.numpy, so a trainer can draw on its device.
"""

import dataclasses
import random
from types import ModuleType
from typing import Any

import numpy as np

LEAST, MOST = 56, 224  # pixels on a side
MOST_SHAPES = 5
KINDS = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 90, 220),
    "yellow": (235, 210, 40),
    "purple": (140, 50, 180),
    "orange": (240, 130, 20),
}
JITTER = 12  # of each colour channel
GAP = 3  # pixels between shapes


@dataclasses.dataclass(frozen=True)
class Scene:
    width: int
    height: int
    ground: int  # gray level
    colour: str
    rgb: tuple[int, int, int]
    kind: str
    shapes: tuple[tuple[float, float, float], ...]  # centre x, centre y, radius of the circle around it, pixels

    @property
    def count(self) -> int:
        return len(self.shapes)


def scene(rng: random.Random) -> Scene:
    """Uniform over kinds, colours and counts; shapes keep apart and inside."""
    width, height = rng.randint(LEAST, MOST), rng.randint(LEAST, MOST)
    colour = rng.choice(list(COLOURS))
    r, g, b = (min(255, max(0, c + rng.randint(-JITTER, JITTER))) for c in COLOURS[colour])
    return Scene(
        width=width,
        height=height,
        ground=rng.choice((rng.randint(0, 30), rng.randint(215, 255))),
        colour=colour,
        rgb=(r, g, b),
        kind=rng.choice(KINDS),
        shapes=_shapes(rng, width, height, rng.randint(1, MOST_SHAPES)),
    )


def _shapes(rng: random.Random, width: int, height: int, count: int) -> tuple[tuple[float, float, float], ...]:
    side = min(width, height)
    out: list[tuple[float, float, float]] = []
    while len(out) < count:
        for _ in range(100):
            r = rng.uniform(max(6.0, 0.08 * side), 0.17 * side)
            x, y = rng.uniform(r + 1, width - r - 1), rng.uniform(r + 1, height - r - 1)
            if all((x - a) ** 2 + (y - b) ** 2 >= (r + s + GAP) ** 2 for a, b, s in out):
                out.append((x, y, r))
                break
        else:
            out.clear()  # a bad start: there is no room left
    return tuple(out)


def arrays(scenes: list[Scene]) -> dict[str, np.ndarray]:
    """The numbers that `render` needs, stacked: size [R, 2], ground [R], rgb [R, 3], kind [R], shapes [R, 5, 3]."""
    shapes = np.zeros((len(scenes), MOST_SHAPES, 3), np.float32)
    for row, one in zip(shapes, scenes, strict=True):
        row[: one.count] = one.shapes
    return {
        "size": np.array([(s.width, s.height) for s in scenes], np.int32),
        "ground": np.array([s.ground for s in scenes], np.float32),
        "rgb": np.array([s.rgb for s in scenes], np.float32),
        "kind": np.array([KINDS.index(s.kind) for s in scenes], np.int32),
        "shapes": shapes,
    }


def render(one: dict[str, Any], side: int, xp: ModuleType = np) -> Any:
    """[side, side, 3] of whole numbers in float32: the picture in the upper left corner, black around it.

    `one` holds the arrays of a single scene. Edges are smooth over one pixel.
    """
    at = xp.arange(side, dtype=xp.float32) + 0.5
    x, y = at[None, :, None], at[:, None, None]
    cx, cy, r = one["shapes"][:, 0], one["shapes"][:, 1], one["shapes"][:, 2]
    dx, dy = x - cx, y - cy  # [side, side, 5]
    circle = xp.sqrt(dx**2 + dy**2) - r
    square = xp.maximum(xp.abs(dx), xp.abs(dy)) - r * 0.5**0.5
    triangle = xp.maximum(dy - r / 2, xp.abs(dx) * 0.75**0.5 - dy / 2 - r / 2)  # equilateral, point up
    outside = xp.stack([circle, square, triangle])[one["kind"]]  # pixels to the edge
    cover = xp.max(xp.where(r > 0, xp.clip(0.5 - outside, 0, 1), 0), axis=-1)[..., None]
    picture = xp.floor(cover * one["rgb"] + (1 - cover) * one["ground"])
    width, height = one["size"][0], one["size"][1]
    return xp.where((x < width) & (y < height), picture, 0).astype(xp.float32)


def image(one: Scene) -> np.ndarray:
    """[height, width, 3] uint8."""
    single = {name: values[0] for name, values in arrays([one]).items()}
    return render(single, MOST)[: one.height, : one.width].astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    answer: str


def questions(one: Scene) -> tuple[Question, ...]:
    """Colour, count, and both."""
    noun = one.kind if one.count == 1 else f"{one.kind}s"
    return (
        Question("What colour are the shapes?", one.colour),
        Question("How many shapes are there?", str(one.count)),
        Question("What do you see?", f"{one.count} {one.colour} {noun}"),
    )
