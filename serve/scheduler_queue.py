"""The order of waiting requests."""

import bisect

from serve.scheduler_sequence import Sequence


class WaitingQueue:
    """Retracted requests first, then by arrival, as if one priority step were `ageing` seconds of waiting.

    So a request is only ever overtaken by those that arrive within `ageing` seconds per step of priority: none starves.
    """

    def __init__(self, ageing: float):
        self.ageing = ageing
        self._entries: list[tuple[tuple[bool, float, int], Sequence]] = []

    def _key(self, s: Sequence) -> tuple[bool, float, int]:
        return not s.retracted, s.arrival - self.ageing * s.request.priority, s.number

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self):
        return (s for _, s in self._entries)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._entries, (self._key(sequence), sequence), key=lambda entry: entry[0])

    def remove(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        at = bisect.bisect_left(self._entries, key, key=lambda entry: entry[0])
        assert self._entries[at][1] is sequence
        del self._entries[at]
