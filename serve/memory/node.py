"""A node of the prefix tree, and the order in which leaves are given up."""

import heapq
import itertools
from collections.abc import Sequence

from serve.memory.keys import common_pages


class Node:
    """An edge of whole pages. `state` is the KDA state after the node's last token, or none.

    Pages are on the device (`pages`) or on the host (`host_pages`); so is the state, independently. `end` counts the
    pages from the root. `page_lock` counts the users of this node or of one below it, `state_lock` those of its state.
    """

    __slots__ = (
        "alive",
        "children",
        "end",
        "host_pages",
        "host_state",
        "keys",
        "page_lock",
        "pages",
        "parent",
        "queued",
        "state",
        "state_lock",
        "state_used",
        "used",
    )

    def __init__(self, keys: list[bytes], parent: "Node | None", end: int):
        self.keys, self.parent, self.end = keys, parent, end
        self.children: dict[bytes, Node] = {}
        self.pages: list[int] | None = None
        self.host_pages: list[int] | None = None
        self.state: int | None = None
        self.host_state: int | None = None
        self.page_lock = self.state_lock = 0
        self.used = self.state_used = 0  # ticks of the tree
        self.queued = False
        self.alive = True

    @property
    def start(self) -> int:
        return self.end - len(self.keys)

    @property
    def has_state(self) -> bool:
        return self.state is not None or self.host_state is not None

    @property
    def is_device_leaf(self) -> bool:
        return self.pages is not None and all(c.pages is None for c in self.children.values())

    def common(self, keys: Sequence[bytes], limit: int) -> int:
        """Leading pages of this edge that `keys[start:limit]` shares."""
        return common_pages(self.keys, keys, self.start, limit)

    def path(self) -> list["Node"]:
        """Nodes from the root's child to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class LeafQueue:
    """Unlocked device leaves, least recently used first. Entries go stale and are dropped or renewed when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._order = itertools.count()

    def push(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.used, next(self._order), node))

    def first(self) -> Node | None:
        while self._heap:
            used, _, node = self._heap[0]
            if node.alive and node.page_lock == 0 and node.is_device_leaf:
                if node.used == used:
                    return node
                heapq.heapreplace(self._heap, (node.used, next(self._order), node))
            else:
                heapq.heappop(self._heap)
                node.queued = False
        return None

    def prune(self, nodes: int) -> None:
        """Forget dead entries once they outnumber the living."""
        if len(self._heap) > 2 * nodes + 64:
            self._heap = [entry for entry in self._heap if entry[2].alive]
            heapq.heapify(self._heap)
