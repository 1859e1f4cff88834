"""Sizes and token counts (spec model 9.8)."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.vision import MediaConfig, image_size

TABLE = [  # width, height, tokens, grid where the specification gives it
    (224, 224, 64, None),
    (611, 437, 352, (32, 44)),
    (1920, 1080, 2691, (78, 138)),
    (100, 100, 16, None),
    (4000, 3000, 15444, (216, 286)),
    (3584, 3584, 16384, None),
    (1861, 7041, 16817, None),
]


@pytest.mark.parametrize(("width", "height", "tokens", "grid"), TABLE)
def test_table_of_the_specification(width, height, tokens, grid):
    size = image_size(width, height)
    assert size.tokens == tokens
    if grid is not None:
        assert size.grid == (1, *grid)
    if (width, height) == (4000, 3000):
        assert size.resized == (width, height) and size.padded == (286 * 14, 216 * 14)


side = st.one_of(st.integers(1, 8000), st.integers(1, 60))


@settings(max_examples=2000, deadline=None)
@given(side, side)
def test_any_size_up_to_8000(width, height):
    size = image_size(width, height)
    (w, h), (W, H) = size.resized, size.padded
    assert W % 28 == 0 and H % 28 == 0 and 0 <= W - w < 28 and 0 <= H - h < 28
    assert size.grid == (1, H // 14, W // 14) and size.tokens == (H // 28) * (W // 28)
    assert 1 <= w <= min(width, 7168) and 1 <= h <= min(height, 7168)
    assert max(size.grid) <= 512 and size.tokens <= 16817
    fits = max(1, width // 14) * max(1, height // 14) <= 65536 and max(width, height) <= 7168
    assert ((w, h) == (width, height)) == fits
    if not fits:  # the largest size within all three limits; the float scale may fall one pixel short of it
        area = max(1, width // 14) * max(1, height // 14)
        for got, this, other in ((w, width, height), (h, height, width)):
            exact = min(math.isqrt(65536 * this**2 // area), 7168, 7168 * this // other)
            assert max(1, exact - 1) <= got <= max(1, exact)


def test_other_limits():
    small = MediaConfig(in_patch_limit=16, patch_limit_on_one_side=6)
    assert image_size(56, 56, small).resized == (56, 56)
    assert image_size(112, 112, small).resized == (56, 56)
    assert image_size(840, 14, small).resized == (84, 1)
    with pytest.raises(ValueError, match="0x5"):
        image_size(0, 5)
