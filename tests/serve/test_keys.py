"""Page digests and the grids of spec serving 3.5."""

import pytest

from serve.memory.keys import checkpoint_grid, extend_keys, track_grid


def test_a_digest_covers_everything_before_it():
    keys: list[bytes] = []
    extend_keys(keys, [1, 2, 3], 2)
    assert len(keys) == 1
    extend_keys(keys, [1, 2, 3, 4, 5], 2)
    once: list[bytes] = []
    extend_keys(once, [1, 2, 3, 4], 2)
    assert keys == once
    other: list[bytes] = []
    extend_keys(other, [9, 2, 3, 4], 2)
    assert keys[1] != other[1]
    assert len({len(k) for k in keys}) == 1


def test_items_of_different_kinds_differ():
    variants = [[1, 2], ["1", 2], [b"1", 2], [12, 2], [2**70, 2], [-1, 2]]
    digests = set()
    for items in variants:
        keys: list[bytes] = []
        extend_keys(keys, items, 2)
        digests.add(keys[0])
    assert len(digests) == len(variants)


@pytest.mark.parametrize(
    ("page", "chunk", "dcp", "grid"),
    [(64, 64, 1, 64), (16, 64, 1, 64), (128, 64, 1, 128), (64, 64, 8, 512), (16, 64, 2, 64), (1, 64, 1, 64)],
)
def test_checkpoint_grid(page, chunk, dcp, grid):
    assert checkpoint_grid(page, chunk, dcp) == grid
    assert track_grid(grid, 256) % 256 == track_grid(grid, 256) % grid == 0


def test_grids_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="page 48, KDA chunk 64 and dcp 1 have no common grid"):
        checkpoint_grid(48)
    with pytest.raises(ValueError, match="checkpoint interval is 0"):
        track_grid(64, 0)
