"""Checks of the memory bookkeeping (spec serving 4.7 and 3.11): AssertionError names the broken rule."""

from serve.memory.nodes import Nodes
from serve.memory.pool import End, Kind, UnifiedPool


def check_pool(pool: UnifiedPool) -> None:
    """Every rule of spec serving 4.7 that does not need the contents."""
    g = pool.geometry
    low, high = pool.ends
    state_high, page_low = pool._frontiers(low.span, high.span)
    assert g.floor <= low.base * g.state, "the state end reaches into the sink"
    assert g.floor <= state_high <= page_low <= g.total, "the two ends overlap or leave the buffer"
    for kind, end in zip(Kind, pool.ends, strict=True):
        check_end(end)
        assert end.live <= end.capacity, f"{kind.name}: more live units than ids"
    sink_and_rounding = low.base * g.state + (g.total - g.units(Kind.PAGE) * g.page)
    spans = low.span * g.state + high.span * g.page
    assert sink_and_rounding + spans + pool.gap == g.total, "bytes do not add up"
    for kind in Kind:
        count = pool.available(kind)
        assert count >= 0 and pool.fits(*_units(kind, count)), f"{kind.name}: available units do not fit"
        assert not pool.fits(*_units(kind, count + 1)), f"{kind.name}: more than the available units fit"


def _units(kind: Kind, count: int) -> tuple[int, int]:
    return (count, 0) if kind is Kind.STATE else (0, count)


def check_end(end: End) -> None:
    mapped = {v: k for v, k in enumerate(end.place) if k >= 0}
    owned = {v: k for k, v in enumerate(end.owner) if v >= 0}
    assert mapped == owned, "virtual and physical tables are not inverse"
    assert len(mapped) == end.live, "live count is wrong"
    assert all(k < end.span for k in mapped.values()), "a live unit lies beyond the watermark"
    assert end.span == end.live + end.holes and end.holes >= 0, "span is not live plus holes"
    assert end.span == 0 or end.owner[end.span - 1] >= 0, "a hole touches the watermark"
    free = set(end.free_ids)
    assert len(free) == len(end.free_ids), "a free id is listed twice"
    assert free.isdisjoint(mapped) and len(free) + end.live == end.capacity, "an id is lost or both free and live"
    assert 0 not in free and end.table[0] == 0, "the sink was handed out"
    assert all(end.table[v] == end.base + end.step * k for v, k in mapped.items()), "device table is stale"
    valid_holes = {k for k in end._holes if k < end.span and end.owner[k] < 0}
    assert len(valid_holes) == end.holes, "a hole is not listed"
    assert end.fresh <= mapped.keys() and end.settled.keys() <= mapped.keys(), "a freed id still waits for a move"


def check_tree(tree: Nodes) -> None:
    """The rules of spec serving 3.11 that can be counted: places, locks, orders and evictable sizes."""
    nodes = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        for key, child in node.children.items():
            assert child.parent is node and child.keys[0] == key and child.start == node.end, "a link is broken"
            assert child.page_lock <= node.page_lock, "a parent is locked less than its child"
            assert child.pages is None or node.pages is not None, "device pages hang below host pages"
            stack.append(child)
            nodes.append(child)
    assert len(nodes) == tree.nodes, "node count is wrong"
    for node in nodes:
        assert node.alive and len(node.keys) >= 1, "a dead or empty node is in the tree"
        assert (node.pages is None) != (node.host_pages is None), "pages lie on both sides or on none"
        assert len(node.pages or node.host_pages or ()) == len(node.keys), "pages and keys differ in number"
        assert node.pages is not None or node.state is None, "a device state has no device pages"
        assert node.state is None or node.host_state is None, "a state lies on both sides"
        assert 0 <= node.state_lock <= node.page_lock, "locks are out of order"
        assert node.page_lock or node.children or node.has_state, "an unlocked leaf has no state"
    pages = [p for n in nodes for p in n.pages or ()]
    states = [n.state for n in nodes if n.state is not None]
    assert len(set(pages)) == len(pages) == tree.pages, "a page is in the tree twice, or pages are miscounted"
    assert len(set(states)) == len(states) == tree.states, "a state is in the tree twice, or states are miscounted"
    unlocked = sum(len(n.pages or ()) for n in nodes if n.page_lock == 0)
    assert unlocked == tree.evictable_pages, "evictable pages are miscounted"
    assert set(tree._state_order) == {n for n in nodes if n.state is not None and not n.state_lock}, "state order"
    assert set(tree._host_order) == {n for n in nodes if n.host_pages or n.host_state is not None}, "host order"
    leaves = {n for n in nodes if n.page_lock == 0 and n.is_device_leaf}
    assert leaves <= {entry[2] for entry in tree._leaves._heap}, "an evictable leaf is not queued"
    if tree.host:
        kept = sum(len(n.host_pages or ()) for n in nodes), sum(n.host_state is not None for n in nodes)
        g, waiting = tree.host.geometry, sum(tree.host.geometry.unit(k) for k, _ in tree.host._freed)
        held = kept[0] * g.page + kept[1] * g.state + tree.parked
        assert held + waiting == tree.host.used <= tree.host.total, "host bytes do not add up"
