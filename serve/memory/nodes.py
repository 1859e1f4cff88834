"""The nodes of the prefix tree: where their pages and states lie, who uses them, and which are given up first."""

import collections
from collections.abc import Sequence

from serve.memory.host import HostMemory, Parked, Transfer
from serve.memory.node import LeafQueue, Node
from serve.memory.pool import Kind, Pool


class Nodes:
    """Every unlocked leaf has a state, so no page is kept that nothing can reach.

    Units are freed in the pool, or go to the host when there is one. `max_states_per_path` bounds the device states
    between the root and a new one; forks and locked states are exempt.
    """

    def __init__(self, pool: Pool, host: HostMemory | None = None, max_states_per_path: int | None = None):
        self.pool, self.host, self.cap = pool, host, max_states_per_path
        self.root = Node([], None, 0)
        self.root.pages = []
        self.root.page_lock = 1
        self.nodes = self.pages = self.states = 0
        self.evictable_pages = 0
        self.stores: list[Transfer] = []
        self.loads: list[Transfer] = []
        self.parked = 0  # bytes that paused requests have on the host
        self.counts: collections.Counter[str] = collections.Counter()
        self._tick = 0
        self._state_order: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._host_order: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._leaves = LeafQueue()

    @property
    def evictable_states(self) -> int:
        return len(self._state_order)

    def _touch(self, node: Node) -> None:
        """Count a use of everything on the way to `node`; states are used only where a prompt resumes."""
        self._tick += 1
        at: Node | None = node
        while at is not None:
            at.used = self._tick
            if at.host_pages is not None:
                self._host_order.move_to_end(at)
            at = at.parent

    def _refresh_state(self, node: Node) -> None:
        node.state_used = self._tick
        if node.state is not None and node.state_lock == 0:
            self._state_order[node] = None
            self._state_order.move_to_end(node)
        if node.host_state is not None:
            self._host_order.move_to_end(node)

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` pages; it stays the lower part with its state and end. Returns the upper part."""
        assert node.parent is not None
        upper = Node(node.keys[:length], node.parent, node.start + length)
        upper.page_lock, upper.used = node.page_lock, node.used
        if node.pages is not None:
            upper.pages, node.pages = node.pages[:length], node.pages[length:]
        if node.host_pages is not None:
            upper.host_pages, node.host_pages = node.host_pages[:length], node.host_pages[length:]
            self._host_order[upper] = None
        node.parent.children[node.keys[0]] = upper
        upper.children[node.keys[length]] = node
        node.keys = node.keys[length:]
        node.parent = upper
        self.nodes += 1
        return upper

    # Placement; every change of a node's data goes through here

    def _set_pages(self, node: Node, pages: list[int] | None) -> None:
        for sign, some in ((-1, node.pages), (1, pages)):
            if some is not None:
                self.pages += sign * len(some)
                self.evictable_pages += sign * len(some) * (node.page_lock == 0)
        node.pages = pages

    def _drop_pages(self, node: Node) -> None:
        if node.pages is not None:
            self.pool.free(Kind.PAGE, node.pages)
            self._set_pages(node, None)

    def _set_state(self, node: Node, state: int) -> None:
        node.state = state
        self.states += 1

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self.pool.free(Kind.STATE, [node.state])
            node.state = None
            self.states -= 1
            self._state_order.pop(node, None)

    def _host_changed(self, node: Node) -> None:
        if node.host_pages is None and node.host_state is None:
            self._host_order.pop(node, None)
        else:
            self._host_order[node] = None

    def _drop_host_pages(self, node: Node, after_step: bool = False) -> None:
        if node.host_pages is not None:
            assert self.host
            self.host.free(Kind.PAGE, node.host_pages, after_step)
            node.host_pages = None
            self._host_changed(node)

    def _drop_host_state(self, node: Node) -> None:
        if node.host_state is not None:
            assert self.host
            self.host.free(Kind.STATE, [node.host_state])
            node.host_state = None
            self._host_changed(node)

    def _remove(self, node: Node) -> None:
        """Take a node and what is below it (host data at most) out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.keys[0]]
        below = [node]
        while below:
            gone = below.pop()
            below += gone.children.values()
            self._drop_pages(gone)
            self._drop_state(gone)
            self._drop_host_pages(gone)
            self._drop_host_state(gone)
            gone.alive = False
            self.nodes -= 1
        self._leaves.prune(self.nodes)
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """Restore the rules after a change: a useless leaf leaves the tree, an unlocked device leaf may be evicted."""
        if node.page_lock or not node.alive:
            return
        if not node.children and not node.has_state:
            self._remove(node)
        elif node.is_device_leaf:
            self._leaves.push(node)

    # Giving up

    def can_make_room(self, states: int = 0, pages: int = 0) -> bool:
        return self.pool.fits(states - self.evictable_states, pages - self.evictable_pages)

    def make_room(self, states: int = 0, pages: int = 0) -> bool:
        """Evict until so many units fit. False, and nothing evicted, when even everything unlocked would not do."""
        if self.pool.fits(states, pages):
            return True
        if not self.can_make_room(states, pages):
            return False
        while not self.pool.fits(states, pages):
            leaf = self._leaves.first()
            holder = next(iter(self._state_order), None)
            if self.pool.shared:
                state_first = holder is not None and (leaf is None or holder.state_used < leaf.used)
            else:
                state_first = not self.pool.fits(states=states)
            if state_first:
                assert holder is not None
                self._evict_state(holder)
            else:
                assert leaf is not None
                self._evict_leaf(leaf)
        return True

    def clear(self) -> None:
        """Drop everything that no request holds, on the device and on the host."""
        while leaf := self._leaves.first():
            self._remove(leaf)
        for node in list(self._state_order):
            self._drop_state(node)
        for node in list(self._host_order):
            if node.alive:
                self._drop_host(node)

    def _evict_state(self, node: Node) -> None:
        """A leaf goes whole; elsewhere the pages stay and only the state goes."""
        if not node.children and node.page_lock == 0:
            self._evict_leaf(node)
            return
        if self._host_room(node, 1, 0):
            self._state_to_host(node)
        self._drop_state(node)
        self.counts["states_evicted"] += 1

    def _state_to_host(self, node: Node) -> None:
        if node.state is not None:
            [node.host_state] = self._store(Kind.STATE, [node.state])
            self._host_changed(node)

    def _evict_leaf(self, node: Node) -> None:
        assert node.pages is not None
        pages, states = len(node.pages), int(node.state is not None)
        self.counts["pages_evicted"] += pages
        self.counts["states_evicted"] += states
        room = self._host_room(node, states, pages)
        if not room and node.alive:
            self._remove(node)
        if not node.alive:  # possibly since the host dropped what hung below
            return
        self._state_to_host(node)
        self._drop_state(node)
        node.host_pages = self._store(Kind.PAGE, node.pages)
        self._host_changed(node)
        self._drop_pages(node)
        assert node.parent is not None
        self._settle(node.parent)

    # The host tier

    def _store(self, kind: Kind, ids: Sequence[int]) -> list[int]:
        """Queue copies of device units to the host; returns their handles."""
        assert self.host
        handles = self.host.allocate(kind, len(ids))
        for handle, identity in zip(handles, ids, strict=True):
            self.stores.append(Transfer(kind, handle, self.pool.settled(kind, identity)))
        self.counts[f"stored_{kind.name.lower()}s"] += len(handles)
        return handles

    def _host_room(self, keep: Node, states: int, pages: int) -> bool:
        """Drop the least recently used host data, but not that of `keep`, until so much fits."""
        if self.host is None or not self.host.could_fit(states, pages):
            return False
        for node in list(self._host_order):
            if self.host.fits(states, pages):
                break
            if node is not keep and node.alive:
                self._drop_host(node)
        return self.host.fits(states, pages)

    def park(self, slot: int, pages: list[int]) -> Parked | None:
        """Copy a paused request's state and pages to the host, if they fit there. They stay until `unpark`."""
        if not self._host_room(self.root, 1, len(pages)):
            return None
        [state] = self._store(Kind.STATE, [slot])
        parked = Parked(state, self._store(Kind.PAGE, pages))
        self.parked += self._parked_bytes(parked)
        return parked

    def unpark(self, parked: Parked, slot: int | None = None, pages: Sequence[int] = ()) -> None:
        """Queue the way back into a slot and pages, or without a slot forget what was parked."""
        assert self.host
        if slot is not None:
            self.loads.append(Transfer(Kind.STATE, parked.state, slot))
            self.loads += [Transfer(Kind.PAGE, h, v) for h, v in zip(parked.pages, pages, strict=True)]
        self.host.free(Kind.STATE, [parked.state], after_step=slot is not None)
        self.host.free(Kind.PAGE, parked.pages, after_step=slot is not None)
        self.parked -= self._parked_bytes(parked)

    def _parked_bytes(self, parked: Parked) -> int:
        return self.pool.geometry.state + len(parked.pages) * self.pool.geometry.page

    def _drop_host(self, node: Node) -> None:
        if node.pages is None and node.page_lock == 0:
            self._remove(node)
        elif node.pages is not None and node.state_lock == 0:
            self._drop_host_state(node)
            self._settle(node)
