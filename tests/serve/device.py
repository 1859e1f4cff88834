"""Device memory without a device: one word per unit of bytes, so that any overlap of units destroys contents."""

import numpy as np

from serve.memory.pool import Geometry, Kind, Move


class FakeMemory:
    """Words of one buffer. A unit of a kind covers `geometry.unit(kind)` consecutive words."""

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self.words = np.zeros(geometry.total, np.uint64)

    def unit(self, kind: Kind, physical: int) -> np.ndarray:
        size = self.geometry.unit(kind)
        return self.words[physical * size : (physical + 1) * size]

    def move(self, moves: list[Move], batch: int = 3) -> None:
        """Runs of `batch` moves: gather all, then scatter all."""
        for i in range(0, len(moves), batch):
            part = moves[i : i + batch]
            read = [self.unit(m.kind, m.source).copy() for m in part]
            for m, content in zip(part, read, strict=True):
                self.unit(m.kind, m.target)[:] = content
