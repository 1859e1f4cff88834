"""Keys of the prefix tree: one digest per full page, and the grids at which states may be kept."""

import hashlib
import math
from array import array
from collections.abc import Hashable, Sequence


def extend_keys(keys: list[bytes], items: Sequence[int | str | bytes], page: int, namespace: Hashable = None) -> None:
    """Append the digests of the full pages of `items` that `keys` lacks.

    Digest i covers items 0 .. (i+1)*page and the namespace, so equal digests mean equal prefixes. Items are token ids;
    an image position holds a hash of the image instead.
    """
    previous = keys[-1] if keys else repr(namespace).encode()
    for start in range(len(keys) * page, len(items) - page + 1, page):
        part = items[start : start + page]
        try:
            body = b"i" + array("q", part).tobytes()  # type: ignore[type-var]  # refused below when not ids
        except (TypeError, OverflowError):
            body = b"o" + repr(list(part)).encode()
        previous = hashlib.blake2b(len(previous).to_bytes(4) + previous + body, digest_size=16).digest()
        keys.append(previous)


def common_pages(a: Sequence[bytes], b: Sequence[bytes], offset: int, limit: int) -> int:
    """Leading digests that `a` shares with `b[offset:limit]`. A digest covers all before it: bisect."""
    low, high = 0, min(len(a), limit - offset, len(b) - offset)
    if high and a[high - 1] == b[offset + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if a[middle] == b[offset + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def checkpoint_grid(page: int, kda_chunk: int = 64, dcp: int = 1) -> int:
    """Prefix lengths, in tokens, at which prefill may keep a state (spec serving 3.5)."""
    chunk = max(kda_chunk, page)
    if min(page, kda_chunk, dcp) < 1 or chunk % min(kda_chunk, page):
        raise ValueError(
            f"page {page}, KDA chunk {kda_chunk} and dcp {dcp} have no common grid, page and chunk must divide one"
            " another; choose a page that is a power of two"
        )
    return math.lcm(chunk, page * dcp)


def track_grid(grid: int, interval: int) -> int:
    """Prefix lengths at which decoding keeps a state: multiples of both the checkpoint grid and `interval` tokens."""
    if interval < 1:
        raise ValueError(f"checkpoint interval is {interval}, the minimum is 1 token; 256 is usual")
    return math.lcm(grid, interval)
