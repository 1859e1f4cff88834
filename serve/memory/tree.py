"""Prefix tree over pages whose nodes may hold a KDA state (spec serving 3).

Pages say how far a prompt is known, states say where it can be resumed. What a running request holds is locked;
the rest is given up, least recently used first, when the pool asks for room. Lengths in here are pages, not tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from serve.memory.host import Transfer
from serve.memory.node import Node
from serve.memory.nodes import Nodes
from serve.memory.pool import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is known, in pages."""

    node: Node  # holds the last known page
    pages: int  # known pages: on the device, or brought back from the host
    state_node: Node | None  # deepest state on the way
    loads: int  # pages among them that must be brought back

    @property
    def resume(self) -> int:
        """Pages covered by the state: computation starts after them."""
        return self.state_node.end if self.state_node else 0


class PrefixTree(Nodes):
    """Owns the pages and states donated to it. `counts` tells what happened to them."""

    # Finding and holding a prefix

    def lookup(self, keys: Sequence[bytes], limit: int) -> Match:
        """Longest known prefix of `keys[:limit]`; changes nothing."""
        node = known = self.root
        pages, on_device, state_node = 0, True, None
        while node.end < limit and (child := node.children.get(keys[node.end])):
            shared = child.common(keys, limit)
            on_device = on_device and child.pages is not None
            if on_device:
                known, pages = child, node.end + shared
            if shared < len(child.keys):
                break
            node = child
            if node.has_state:
                state_node = node
        if state_node and state_node.end > pages:
            known, pages = state_node, state_node.end
        loads = sum(len(n.keys) for n in known.path() if n.pages is None)
        return Match(known, pages, state_node, loads)

    def acquire(self, match: Match) -> Match:
        """Lock what a match found: its pages until `unlock(node)`, its state until `unlock_state(state_node)`."""
        if match.pages < match.node.end:
            match = dataclasses.replace(match, node=self._split(match.node, match.pages - match.node.start))
        self._touch(match.node)
        self.lock(match.node)
        if match.state_node:
            self.lock_state(match.state_node)
        return match

    def lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            if at.page_lock == 0 and at.pages is not None:
                self.evictable_pages -= len(at.pages)
            at.page_lock += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.page_lock -= 1
            if at.page_lock == 0 and at.pages is not None:
                self.evictable_pages += len(at.pages)
            at = at.parent
        self._settle(node)

    def lock_state(self, node: Node) -> None:
        node.state_lock += 1
        self._state_order.pop(node, None)

    def unlock_state(self, node: Node) -> None:
        node.state_lock -= 1
        self._refresh_state(node)

    def path_pages(self, node: Node) -> list[int]:
        """Virtual page ids from the first token to the end of `node`, all on the device."""
        return [page for n in node.path() for page in n.pages or ()]

    def load(self, match: Match, pages: list[int]) -> None:
        """Queue the way back of an acquired match's host pages into `pages` (as many as `match.loads`)."""
        taken = 0
        for node in match.node.path():
            if node.pages is None:
                assert node.host_pages is not None
                mine = pages[taken : taken + len(node.keys)]
                self.loads += [Transfer(Kind.PAGE, h, v) for h, v in zip(node.host_pages, mine, strict=True)]
                self._drop_host_pages(node, after_step=True)
                self._set_pages(node, mine)
                taken += len(mine)
        self.counts["loaded_pages"] += taken

    def load_state(self, node: Node, slot: int) -> None:
        """Queue a copy of a host state into a device slot; the host keeps its own."""
        assert node.host_state is not None
        self.loads.append(Transfer(Kind.STATE, node.host_state, slot))
        self.counts["loaded_states"] += 1

    def take_transfers(self) -> tuple[list[Transfer], list[Transfer]]:
        """(stores, loads) since the last call, device ids physical. Stores read what the last step left.

        Called once per step, after all allocations.
        """
        loads = [dataclasses.replace(t, device=int(self.pool.physical(t.kind, [t.device])[0])) for t in self.loads]
        stores, self.stores, self.loads = self.stores, [], []
        if self.host:
            self.host.end_step()
        return stores, loads

    # Giving states and pages to the tree

    def donate(self, at: Node, keys: Sequence[bytes], table: np.ndarray, end: int, state: int, origin: str) -> Node:
        """Take over the state after page `end` and the pages up to it; returns the node that ends there.

        `at` is the node that the giver holds locked, `table` its virtual page ids. Pages beyond `at` that the tree
        has already are freed and replaced in `table`. A state that the tree has already is freed.
        """
        if end <= at.end:
            node = at
            while node.start >= end:
                assert node.parent is not None
                node = node.parent
            if end < node.end:
                node = self._split(node, end - node.start)
        else:
            node = self._descend(at, keys, table, end)
        self._touch(node)
        if node.state is not None:
            self.pool.free(Kind.STATE, [state])
            self.counts["states_known"] += 1
        else:
            self._set_state(node, state)
            self.counts[f"states_{origin}"] += 1
        self._drop_host_state(node)
        self._refresh_state(node)
        self._settle(node)
        self._enforce_cap(node)
        return node

    def _descend(self, node: Node, keys: Sequence[bytes], table: np.ndarray, end: int) -> Node:
        """The node at `end` below `node`, made of what the tree has and, past that, of the pages in `table`."""
        while node.end < end:
            start = node.end
            child = node.children.get(keys[start])
            if child is None:
                child = Node(list(keys[start:end]), node, end)
                child.used = self._tick
                node.children[keys[start]] = child
                self.nodes += 1
                self._set_pages(child, table[start:end].tolist())
                return child
            shared = child.common(keys, end)
            if shared < len(child.keys):
                child = self._split(child, shared)
            mine = table[start : start + shared].tolist()
            if child.pages is None:
                self._drop_host_pages(child)
                self._set_pages(child, mine)
            else:
                self.pool.free(Kind.PAGE, mine)
                table[start : start + shared] = child.pages
                self.counts["pages_known"] += shared
            node = child
        return node

    def discard_state(self, node: Node) -> None:
        """Drop a state that a deeper one of the same run made useless, unless the path forks there."""
        if node.alive and node.state is not None and node.state_lock == 0 and len(node.children) == 1:
            self._drop_state(node)
            self.counts["states_replaced"] += 1

    def _enforce_cap(self, tail: Node) -> None:
        if self.cap is None:
            return
        holders = [n for n in tail.path() if n.state is not None]
        excess = len(holders) - self.cap
        for node in holders:
            if excess <= 0:
                break
            if node is not tail and node.state_lock == 0 and len(node.children) == 1:
                self._drop_state(node)
                self.counts["states_capped"] += 1
                excess -= 1
