"""Device memory without a device: one word per unit of bytes, so that any overlap of units destroys contents."""

import numpy as np

from serve.memory.host import Transfer
from serve.memory.pool import Geometry, Kind, Move


class FakeMemory:
    """Words of one buffer. A unit of a kind covers `geometry.unit(kind)` consecutive words."""

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self.words = np.zeros(geometry.total, np.uint64)
        self.host: dict[tuple[Kind, int], np.ndarray] = {}

    def unit(self, kind: Kind, physical: int) -> np.ndarray:
        size = self.geometry.unit(kind)
        return self.words[physical * size : (physical + 1) * size]

    def prepare(self, stores: list[Transfer], moves: list[Move], loads: list[Transfer]) -> None:
        """What precedes the copies of a step, in order."""
        for t in stores:
            self.host[t.kind, t.host] = self.unit(t.kind, t.device).copy()
        self.move(moves)
        for t in loads:
            self.unit(t.kind, t.device)[:] = self.host[t.kind, t.host]

    def move(self, moves: list[Move], batch: int = 3) -> None:
        """Runs of `batch` moves: gather all, then scatter all."""
        for i in range(0, len(moves), batch):
            part = moves[i : i + batch]
            read = [self.unit(m.kind, m.source).copy() for m in part]
            for m, content in zip(part, read, strict=True):
                self.unit(m.kind, m.target)[:] = content

    def poison(self, live: list[tuple[Kind, int]]) -> None:
        """Overwrite every word outside the given physical units."""
        keep = np.zeros(self.geometry.total, bool)
        for kind, physical in live:
            size = self.geometry.unit(kind)
            keep[physical * size : (physical + 1) * size] = True
        self.words[~keep] = 0xDEAD
