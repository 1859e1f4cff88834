"""Checks of the memory bookkeeping (spec serving 4.7 and 3.11): AssertionError names the broken rule."""

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
