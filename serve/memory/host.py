"""Host memory behind the pool: bounded space for evicted pages and states, by bytes."""

import dataclasses

from serve.memory.pool import Geometry, Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One unit between a host handle and a physical unit of the device."""

    kind: Kind
    host: int
    device: int


@dataclasses.dataclass(frozen=True)
class Parked:
    """Host handles of a paused request's state and pages."""

    state: int
    pages: list[int]


class HostMemory:
    """Handles for units kept in host memory: small integers per kind, reused once freed."""

    def __init__(self, total: int, geometry: Geometry):
        if total < geometry.state + geometry.page:
            raise ValueError(
                f"host memory of {total} bytes cannot hold a state and a page"
                f" ({geometry.state + geometry.page} bytes); give more, or none to switch it off"
            )
        self.total, self.geometry = total, geometry
        self.used = 0
        self._made = {kind: 0 for kind in Kind}
        self._free: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._freed: list[tuple[Kind, int]] = []

    def fits(self, states: int, pages: int) -> bool:
        return self.used + states * self.geometry.state + pages * self.geometry.page <= self.total

    def allocate(self, kind: Kind, count: int) -> list[int]:
        """The caller made sure that it fits."""
        self.used += count * self.geometry.unit(kind)
        free = self._free[kind]
        handles = [free.pop() for _ in range(min(count, len(free)))]
        new = count - len(handles)
        handles += range(self._made[kind], self._made[kind] + new)
        self._made[kind] += new
        return handles

    def could_fit(self, states: int, pages: int) -> bool:
        return states * self.geometry.state + pages * self.geometry.page <= self.total

    def free(self, kind: Kind, handles: list[int], after_step: bool = False) -> None:
        """`after_step`: a load of this step still reads them, so they are reused in the next one at the earliest."""
        if after_step:
            self._freed += [(kind, h) for h in handles]
            return
        self._free[kind] += handles
        self.used -= len(handles) * self.geometry.unit(kind)

    def end_step(self) -> None:
        freed, self._freed = self._freed, []
        for kind, handle in freed:
            self.free(kind, [handle])
