"""Schedules against the order itself: what the windows say is never later than what the samples need."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stager.formats.order import EpochOrder, OrderPlan
from stager.prefetch.schedule import EpochSchedule

ORDERS = st.builds(
    lambda seed, lanes, window, shuffle, samples: EpochOrder(
        OrderPlan("f" * 32, seed=seed, lanes=lanes, window=window, shuffle=shuffle), samples
    ),
    seed=st.integers(0, 5),
    lanes=st.integers(1, 4),
    window=st.integers(1, 4),
    shuffle=st.booleans(),
    samples=st.lists(st.integers(0, 7), min_size=1, max_size=12),
)


def reads_of(order: EpochOrder, lanes: range) -> list[tuple[int, int]]:
    """Every ``(position, shard)`` that the lanes read, in order."""
    return sorted(
        (offset * order.plan.lanes, order.sample_at(lane, offset)[0])
        for lane in lanes
        for offset in range(order.lane_samples(lane))
    )


@given(order=ORDERS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_use_is_told_later_than_it_is(order: EpochOrder, data: st.DataObject) -> None:
    """At any position, every shard still to be read has a next use at or before its first read, and comes up in order."""
    lanes = range(data.draw(st.integers(0, order.plan.lanes - 1)), order.plan.lanes)
    schedule = EpochSchedule(order, lanes)
    position = data.draw(st.integers(0, max(order.samples, 1)))
    position -= position % order.plan.lanes
    first_reads: dict[int, int] = {}
    for at, shard in reads_of(order, lanes):
        if at >= position:
            first_reads.setdefault(shard, at)
    coming: dict[int, int] = {}
    last = 0
    for use, shard in schedule.upcoming(position):
        assert use >= last and use >= position
        last = use
        coming.setdefault(shard, use)
    for shard, at in first_reads.items():
        next_use = schedule.next_use(shard, position)
        assert next_use is not None and position <= next_use <= at
        assert coming[shard] <= at
        assert next_use <= coming[shard]


@given(order=ORDERS)
@settings(max_examples=100, deadline=None)
def test_the_cache_that_is_asked_for_is_enough(order: EpochOrder) -> None:
    """With as many bytes as are told, every shard can stay from its first to its last read."""
    lanes = range(order.plan.lanes)
    sizes = [10 + shard for shard in range(40)]
    reads = reads_of(order, lanes)
    spans: dict[int, tuple[int, int]] = {}
    for at, shard in reads:
        spans[shard] = (spans.get(shard, (at, at))[0], at)
    # A shard that two lanes read is not held between them: only its windows count.
    needed = EpochSchedule(order, lanes).bytes_needed(sizes)
    for at, _ in reads:
        held = {shard for position, shard in reads if position == at}
        assert sum(sizes[shard] for shard in held) <= needed
    if order.plan.lanes == 1:
        for at, _ in reads:
            live = [shard for shard, (first, last) in spans.items() if first <= at <= last]
            assert sum(sizes[shard] for shard in live) <= needed


def test_the_first_batch_comes_first() -> None:
    """At the start, the shards of a window come up in the order in which its samples need them."""
    order = EpochOrder(OrderPlan("f" * 32, seed=4, window=6), [50] * 20)
    seen = list(dict.fromkeys(shard for _, shard in reads_of(order, range(1))[:200]))
    upcoming = [shard for _, shard in EpochSchedule(order, range(1)).upcoming(0)]
    assert upcoming[:6] == seen[:6]
    assert sorted(upcoming) == list(range(20))
