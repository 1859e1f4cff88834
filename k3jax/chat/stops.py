"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be complete, the longest of several (Knuth-Morris-Pratt, linear in the text).

    `matched` is that stop string, or None. An empty stop string is a ValueError.
    """

    def __init__(self, stops: str | Sequence[str]):
        stops = [stops] if isinstance(stops, str) else list(dict.fromkeys(stops))
        if "" in stops:
            raise ValueError("stop holds an empty string, which every text contains; leave it out")
        self._borders = {stop: _borders(stop) for stop in stops}
        self._sizes = dict.fromkeys(stops, 0)  # how much of each stop string the text ends with
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that belongs to no stop string: a suffix that may begin one is held back, nothing follows a match."""
        if self.matched is not None:
            return ""
        for end, char in enumerate(text, 1):
            for stop, borders in self._borders.items():
                size = self._sizes[stop]
                while size and stop[size] != char:
                    size = borders[size - 1]
                self._sizes[stop] = size = size + (stop[size] == char)
                if size == len(stop) > len(self.matched or ""):
                    self.matched = stop
            if self.matched is not None:
                shown, self._held = (self._held + text[:end])[: -len(self.matched)], ""
                return shown
        text = self._held + text
        cut = len(text) - max(self._sizes.values(), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back; later text is matched on its own."""
        held, self._held = self._held, ""
        self._sizes = dict.fromkeys(self._sizes, 0)
        return held


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    borders = [0]
    for char in text[1:]:
        size = borders[-1]
        while size and text[size] != char:
            size = borders[size - 1]
        borders.append(size + (text[size] == char))
    return borders
