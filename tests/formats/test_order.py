"""Laws of the sample order, of batches and of cursors."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import FormatError, UsageError
import stager.formats.batches as batching
from stager.formats.batches import BatchGeometry, EpochBatches, RankBatch, decode_order, encode_order
from stager.formats.cursor import Cursor, decode_cursor, encode_cursor
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank, peak_live_bytes
from stager.formats.permutation import Permutation, mix, shuffled_indices

SHARDS = st.lists(st.integers(0, 40), max_size=30) | st.lists(st.integers(0, 1500), max_size=3)
PLANS = st.builds(
    OrderPlan,
    fingerprint=st.sampled_from(["", "a", "0123456789abcdef"]),
    seed=st.integers(0, 1 << 62),
    epoch=st.integers(0, 3),
    lanes=st.integers(1, 6),
    window=st.integers(1, 9),
    shuffle=st.booleans(),
)
FEW_SHARDS = st.lists(st.integers(0, 30), max_size=8)
LAWS = settings(max_examples=50, deadline=None)


def all_samples(shards: list[int]) -> list[tuple[int, int]]:
    return [(shard, sample) for shard, samples in enumerate(shards) for sample in range(samples)]


def stream(batches: EpochBatches) -> list[list[tuple[int, int]]]:
    return [batches.global_batch(step) for step in range(batches.steps)]


def flat(batches: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [place for batch in batches for place in batch]


@LAWS
@given(size=st.integers(0, 3000), key=st.integers(0, (1 << 64) - 1))
def test_permutation_is_one(size: int, key: int) -> None:
    """Every index is met once, by cycle walking and by sorting."""
    permutation = Permutation(size, key)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))
    assert sorted(shuffled_indices(size, key)) == list(range(size))


def test_permutations_are_the_same_for_ever() -> None:
    """Resume over versions of stager depends on these numbers: they never change."""
    assert mix(7, 0) == 7191089600892374487
    assert [Permutation(11, 5)[index] for index in range(11)] == [7, 3, 1, 6, 8, 5, 10, 4, 9, 2, 0]
    assert shuffled_indices(11, 5) == [3, 4, 2, 5, 0, 8, 10, 7, 9, 1, 6]
    order = EpochOrder(OrderPlan("f", seed=3, epoch=1, lanes=2, window=2), [3, 0, 2, 4])
    assert [order.samples_in(lane, 0, order.lane_samples(lane)) for lane in (0, 1)] == [
        [(2, 0), (0, 0), (0, 2), (0, 1)],
        [(3, 2), (3, 3), (3, 0), (3, 1), (2, 1)],
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 16, 17])
def test_permutation_has_no_favourites(size: int) -> None:
    """Over many keys each index goes to each place about equally often."""
    keys = 3000
    counts = Counter(
        (index, Permutation(size, key)[index]) for key in range(keys) for index in {0, 1, size - 1}
    )
    expected = keys / size
    seen = {index for index, _ in counts}
    worst = max(abs(counts[index, place] - expected) for index in seen for place in range(size))
    assert worst < 6 * expected**0.5


@LAWS
@given(shards=SHARDS, plan=PLANS)
def test_lanes_partition_the_dataset(shards: list[int], plan: OrderPlan) -> None:
    """All samples stand in exactly one lane, once; lanes differ by one at most."""
    order = EpochOrder(plan, shards)
    lanes = [order.samples_in(lane, 0, order.lane_samples(lane)) for lane in range(plan.lanes)]
    assert sorted(place for lane in lanes for place in lane) == all_samples(shards)
    assert order.samples == sum(shards)
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1


@LAWS
@given(shards=SHARDS, plan=PLANS)
def test_cut_shards_are_shared_by_neighbours_only(shards: list[int], plan: OrderPlan) -> None:
    """The lanes that read one shard are consecutive, and only the outer two share it with another shard."""
    order = EpochOrder(plan, shards)
    readers: dict[int, set[int]] = {}
    touched: dict[int, set[int]] = {}
    for lane in range(plan.lanes):
        for shard, _ in order.samples_in(lane, 0, order.lane_samples(lane)):
            readers.setdefault(shard, set()).add(lane)
            touched.setdefault(lane, set()).add(shard)
    for lanes in readers.values():
        assert lanes <= set(range(min(lanes), max(lanes) + 1))
        assert all(len(touched.get(lane, ())) <= 1 for lane in range(min(lanes) + 1, max(lanes)))


@LAWS
@given(shards=SHARDS, plan=PLANS)
def test_samples_stay_in_their_window(shards: list[int], plan: OrderPlan) -> None:
    """A lane opens at most a window of shards before it has finished the earlier ones."""
    order = EpochOrder(plan, shards)
    width = plan.window if plan.shuffle else 1
    for lane in range(plan.lanes):
        places = order.samples_in(lane, 0, order.lane_samples(lane))
        last = {shard: at for at, (shard, _) in enumerate(places)}
        opened: set[int] = set()
        for at, (shard, _) in enumerate(places):
            opened.add(shard)
            assert sum(last[one] >= at for one in opened) <= width


def test_plain_order_without_shuffle() -> None:
    """One lane without shuffle is the dataset's own order."""
    order = EpochOrder(OrderPlan("f", shuffle=False), [2, 0, 3])
    assert order.samples_in(0, 0, 5) == all_samples([2, 0, 3])


@LAWS
@given(shards=st.lists(st.integers(5, 40), min_size=2, max_size=20), plan=PLANS)
def test_epochs_and_seeds_differ(shards: list[int], plan: OrderPlan) -> None:
    """Another epoch, seed or dataset gives another order; the same gives the same."""
    plan = OrderPlan(plan.fingerprint, plan.seed % 1000, plan.epoch, plan.lanes, plan.window)

    def line(other: OrderPlan) -> list[tuple[int, int]]:
        order = EpochOrder(other, shards)
        return [
            place
            for lane in range(plan.lanes)
            for place in order.samples_in(lane, 0, order.lane_samples(lane))
        ]

    mine = line(plan)
    assert mine == line(plan)
    assert mine != line(plan.at_epoch(plan.epoch + 1))
    assert mine != line(OrderPlan(plan.fingerprint, plan.seed + 1, plan.epoch, plan.lanes, plan.window))
    assert mine != line(OrderPlan(plan.fingerprint + "x", plan.seed, plan.epoch, plan.lanes, plan.window))


@LAWS
@given(shards=SHARDS, plan=PLANS, multiple=st.integers(1, 4), drop_last=st.booleans())
def test_global_batches_are_the_same_for_any_world(
    shards: list[int], plan: OrderPlan, multiple: int, drop_last: bool
) -> None:
    """Every world that divides the batch sees the same global batches, in equal steps of equal size."""
    order = EpochOrder(plan, shards)
    size = plan.lanes * multiple
    whole = stream(EpochBatches(order, BatchGeometry(size, 1, drop_last)))
    if drop_last:
        assert len(whole) == sum(shards) // size
        assert len(set(flat(whole))) == len(flat(whole)) == len(whole) * size
    else:
        assert len(whole) == -(-sum(shards) // size)
        assert sorted(flat(whole)) == all_samples(shards)
    for world in [world for world in range(2, size + 1) if size % world == 0]:
        batches = EpochBatches(order, BatchGeometry(size, world, drop_last))
        assert stream(batches) == whole
        for step in range(batches.steps):
            ranks = [batches.rank_batch(step, rank) for rank in range(world)]
            assert len({len(rank.places) for rank in ranks}) == 1
            assert sum(rank.padding for rank in ranks) <= (
                0 if step < batches.steps - 1 else world * plan.lanes
            )
            if plan.lanes % world == 0 or world % plan.lanes == 0:
                _assert_own_lanes(order, ranks, world)


@LAWS
@given(
    shards=SHARDS,
    plan=PLANS,
    world=st.integers(1, 4),
    multiple=st.integers(1, 3),
    start=st.integers(0, 5),
    stride=st.integers(1, 3),
    at_a_time=st.integers(1, 40),
)
def test_places_of_many_steps_are_those_of_each(
    shards: list[int], plan: OrderPlan, world: int, multiple: int, start: int, stride: int, at_a_time: int
) -> None:
    order = EpochOrder(plan, shards)
    batches = EpochBatches(order, BatchGeometry(plan.lanes * world * multiple, world))
    steps = range(start, batches.steps, stride)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "PLACES_AT_A_TIME", at_a_time)
        for rank in range(world):
            assert list(batches.iter_rank_batches(steps, rank)) == [
                batches.rank_batch(step, rank) for step in steps
            ]


def _assert_own_lanes(order: EpochOrder, ranks: list[RankBatch], world: int) -> None:
    for rank, batch in enumerate(ranks):
        lanes = lanes_of_rank(rank, world, order.plan.lanes)
        own = {place for lane in lanes for place in order.samples_in(lane, 0, order.lane_samples(lane))}
        assert not own or set(batch.places) <= own


@LAWS
@given(shards=FEW_SHARDS, plan=PLANS, multiple=st.integers(1, 4), drop_last=st.booleans())
def test_resume_at_every_step_gives_the_rest(
    shards: list[int], plan: OrderPlan, multiple: int, drop_last: bool
) -> None:
    """From the position after any step, the rest is what an uninterrupted epoch gives, the end included."""
    order = EpochOrder(plan, shards)
    geometry = BatchGeometry(plan.lanes * multiple, 1, drop_last)
    whole = EpochBatches(order, geometry)
    batches = stream(whole)
    for step in range(whole.steps):
        fresh = EpochOrder(plan, shards)
        assert stream(EpochBatches(fresh, geometry, whole.position_after(step))) == batches[step + 1 :]


@LAWS
@given(shards=SHARDS, plan=PLANS, sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_another_batch_size_goes_on_without_loss_or_doubles(
    shards: list[int], plan: OrderPlan, sizes: list[int]
) -> None:
    """Batches of changing sizes still give every sample once."""
    order = EpochOrder(plan, shards)
    position, seen = 0, []
    for size in sizes:
        batches = EpochBatches(order, BatchGeometry(plan.lanes * size), position)
        for step in range(min(2, batches.steps)):
            seen += batches.global_batch(step)
            position = batches.position_after(step)
    rest = EpochBatches(order, BatchGeometry(plan.lanes), position)
    assert sorted(seen + flat(stream(rest))) == all_samples(shards)


@LAWS
@given(shards=SHARDS, plan=PLANS, multiple=st.integers(1, 4), share=st.floats(0, 1))
def test_uses_cover_what_batches_read(
    shards: list[int], plan: OrderPlan, multiple: int, share: float
) -> None:
    """From any position, a shard is announced no later than a batch reads it, and until the last read."""
    order = EpochOrder(plan, shards)
    size = plan.lanes * multiple
    position = int(share * (sum(shards) // size)) * size
    uses = list(order.iter_uses(position))
    assert all(first.first <= second.first for first, second in pairwise(uses))
    assert all(position <= use.first < use.end for use in uses)
    batches = EpochBatches(order, BatchGeometry(size), position)
    reads = [
        (shard, position + step * size, batches.position_after(step))
        for step in range(batches.steps)
        for shard, _ in batches.global_batch(step)
    ]
    announced = {use.shard for use in uses}
    assert announced == {shard for shard, _, _ in reads}
    for shard, begin, end in reads:
        assert any(use.first < end and use.end > begin for use in uses if use.shard == shard)
        need = order.next_use(shard, begin)
        assert need is not None and need < max(end, begin + size)
    for shard in range(len(shards)):
        if shard not in announced and shards[shard]:
            need = order.next_use(shard, position)
            assert need is None or need == position
        assert order.next_use(shard, sum(shards) + size) is None


@LAWS
@given(shards=SHARDS, plan=PLANS, world=st.integers(1, 6))
def test_lanes_of_a_rank_are_all_it_needs(shards: list[int], plan: OrderPlan, world: int) -> None:
    """Ranks' lanes cover all lanes, and next uses are asked by lane."""
    lanes = [lanes_of_rank(rank, world, plan.lanes) for rank in range(world)]
    assert {lane for chosen in lanes for lane in chosen} == set(range(plan.lanes))
    order = EpochOrder(plan, shards)
    for chosen in lanes:
        for use in order.iter_uses(0, chosen):
            assert use.lane in chosen
            need = order.next_use(use.shard, 0, chosen)
            assert need is not None and need <= use.first


def test_first_needs_are_ordered_and_bounded() -> None:
    """In a big window the shards come by their first sample, and the scan for it ends."""
    order = EpochOrder(OrderPlan("f", window=4), [100_000, 1, 100_000, 100_000])
    uses = list(order.iter_uses())
    assert len(uses) == 4 and uses[0].first == 0
    firsts = {shard: at for at, (shard, _) in reversed(list(enumerate(order.samples_in(0, 0, 300_001))))}
    for use in uses:
        assert use.first == firsts[use.shard] or use.first == 4096 < firsts[use.shard]


def test_peak_live_bytes() -> None:
    """The cache needed is the most that is read at one time: a window here, both lanes together."""
    order = EpochOrder(OrderPlan("f", window=2, shuffle=True), [10] * 6)
    assert peak_live_bytes(order.iter_uses(), [100] * 6) == 200
    order = EpochOrder(OrderPlan("f", lanes=2, shuffle=False), [10] * 5)
    assert peak_live_bytes(order.iter_uses(0), [100] * 5) == 200
    assert peak_live_bytes(order.iter_uses(0, range(1)), [100] * 5) == 100
    assert peak_live_bytes([], []) == 0


def test_what_does_not_divide_is_refused_with_sizes_that_would() -> None:
    """The message says what would fit."""
    with pytest.raises(UsageError, match="9 or 12"):
        BatchGeometry(10, 3)
    with pytest.raises(UsageError, match="8 or 12"):
        EpochBatches(EpochOrder(OrderPlan("f", lanes=4), [9]), BatchGeometry(10, 2))
    with pytest.raises(UsageError, match="multiple of the 4 lanes"):
        EpochBatches(EpochOrder(OrderPlan("f", lanes=4), [9]), BatchGeometry(4), 6)
    for wrong in ({"seed": -1}, {"lanes": 0}, {"window": 0}, {"epoch": 1.5}):
        with pytest.raises(UsageError, match="whole number"):
            OrderPlan("f", **wrong)


@given(plan=PLANS, position=st.integers(0, 1 << 62))
def test_cursor_round_trip(plan: OrderPlan, position: int) -> None:
    """A cursor survives JSON and is small."""
    state = json.dumps(encode_cursor(Cursor(plan, position)))
    assert decode_cursor(json.loads(state)) == Cursor(plan, position)
    assert len(state) < 1024


@given(plan=PLANS, multiple=st.integers(1, 9), drop_last=st.booleans())
def test_order_round_trip(plan: OrderPlan, multiple: int, drop_last: bool) -> None:
    """What a reader announces is what the daemon computes with."""
    geometry = BatchGeometry(plan.lanes * multiple, 1, drop_last)
    assert decode_order(json.loads(json.dumps(encode_order(plan, geometry))), world=1) == (plan, geometry)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"seed": "7"},
        {"position": -1},
        {"lanes": 10**9},
        {"shuffle": 1},
        {"fingerprint": None},
    ],
)
def test_hostile_cursor_is_refused(change: dict[str, object]) -> None:
    """A state from outside is checked field by field."""
    with pytest.raises((FormatError, UsageError)):
        decode_cursor({**encode_cursor(Cursor(OrderPlan("f"))), **change})


def test_cursor_of_another_order_is_refused() -> None:
    """Another dataset or other parameters are named; another epoch is fine."""
    plan = OrderPlan("f", seed=1, epoch=2)
    Cursor(plan).check_matches(Cursor(plan.at_epoch(5)), of="data")
    with pytest.raises(UsageError, match="another dataset than `data`"):
        Cursor(plan).check_matches(Cursor(OrderPlan("g", seed=1)), of="data")
    with pytest.raises(UsageError, match=r"seed=1 \(not 2\), window=8 \(not 3\)"):
        Cursor(plan).check_matches(Cursor(OrderPlan("f", seed=2, window=3)), of="data")


def test_seeking_costs_operations_by_the_window_not_by_the_epoch() -> None:
    """Going to a place in a big dataset makes few calls: a window's tables and some searches."""
    order = EpochOrder(OrderPlan("f", lanes=4, window=8), [1000] * 5000)
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        order.samples_in(3, 1_000_000, 1_000_064)
    finally:
        sys.setprofile(None)
    assert sum(calls.values()) < 4000
