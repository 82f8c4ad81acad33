"""Laws of mixing: shares at every prefix, counts by arithmetic, sources read through, weights that change."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import FormatError, UsageError
from stager.formats.batches import BatchGeometry, EpochBatches, decode_order, decode_pace
from stager.formats.cursor import Cursor, decode_cursor, encode_cursor
from stager.formats.mixing import (
    CHANGES_MAX,
    PERIOD_MAX,
    Mix,
    MixOrder,
    MixSource,
    Pattern,
    encode_mix_orders,
    make_mix,
    whole_weights,
)
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank

LAWS = settings(max_examples=50, deadline=None)
WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any).map(tuple)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[OrderPlan, Mix, list[MixSource]]:
    """A mix of one to four sources in up to three lanes, whose weights change up to three times."""
    lanes = draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda shards: sum(shards) >= lanes)
    sources = [MixSource(f"f{number}", draw(counts)) for number in range(draw(st.integers(1, 4)))]
    weights = st.lists(st.integers(0, 5), min_size=len(sources), max_size=len(sources)).filter(any)
    epoch_samples = draw(st.integers(3, 60))
    mix = make_mix(
        [source.fingerprint for source in sources], epoch_samples, whole_weights(draw(weights))
    )
    for place in sorted(draw(st.lists(st.integers(0, 3 * epoch_samples), max_size=3))):
        epoch, position = divmod(place, epoch_samples)
        mix = mix.changed(epoch, position // lanes * lanes, whole_weights(draw(weights)))
    plan = OrderPlan("mix", draw(st.integers(0, 99)), 0, lanes, draw(st.integers(1, 4)), draw(st.booleans()))
    return plan, mix, sources


def lane_stream(plan: OrderPlan, mix: Mix, sources: list[MixSource], lane: int, epochs: int) -> list[tuple[int, int]]:
    found = []
    for epoch in range(epochs):
        order = MixOrder(plan.at_epoch(epoch), mix, sources)
        found += order.samples_in(lane, 0, order.lane_samples(lane))
    return found


@LAWS
@given(weights=WEIGHTS)
def test_no_prefix_is_a_whole_sample_from_its_shares(weights: tuple[int, ...]) -> None:
    """After any number of places, every source has its share to less than one sample; counting is exact."""
    pattern = Pattern(weights)
    given_so_far = [0] * len(weights)
    for index in range(2 * pattern.period):
        for source, weight in enumerate(weights):
            assert pattern.count(source, index) == given_so_far[source]
            assert abs(given_so_far[source] - index * weight / pattern.period) < 1
        given_so_far[pattern.table[index % pattern.period]] += 1


def test_the_pattern_is_the_same_for_ever() -> None:
    """Resume over versions of stager depends on it."""
    assert list(Pattern((7, 3)).table) == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert list(Pattern((10, 6, 3, 1)).table) == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 3, 0, 2, 0, 1]
    mix = make_mix(["f", "g"], 10, (2, 1))
    order = MixOrder(OrderPlan("m", seed=3, lanes=2, window=2), mix, [MixSource("f", [3, 2]), MixSource("g", [4])])
    assert [order.samples_in(lane, 0, 5) for lane in (0, 1)] == [
        [(1, 0), (2, 0), (1, 1), (0, 0), (2, 1)], [(2, 3), (0, 2), (0, 0), (2, 2), (0, 1)],
    ]


@pytest.mark.parametrize(
    ("given_weights", "whole"),
    [
        ([0.7, 0.3], (7, 3)),
        ([1 / 3, 1 / 3, 1 / 3], (1, 1, 1)),
        ([2, 0, 4], (1, 0, 2)),
        ([5], (1,)),
        ([1e-3, 1], (1, 1000)),
    ],
)
def test_weights_are_taken_as_they_are_written(given_weights: list[float], whole: tuple[int, ...]) -> None:
    """Decimals and ratios give small whole numbers."""
    assert whole_weights(given_weights) == whole


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_rounded_weights_are_near(weights: list[float]) -> None:
    """Whatever the numbers, the period is bounded and no share is off by more than a part of it."""
    try:
        whole = whole_weights(weights)
    except UsageError as error:
        assert "less than 1/65536" in error.message and min(weights) / sum(weights) < 1 / PERIOD_MAX
        return
    period = sum(whole)
    assert period <= PERIOD_MAX
    assert all(
        abs(number / period - weight / sum(weights)) <= 1 / PERIOD_MAX
        for number, weight in zip(whole, weights, strict=True)
    )


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [True, 1], ["1"], [1e-9, 1], [1] * 65])
def test_weights_that_cannot_be_meant_are_refused(weights: list[float]) -> None:
    """Each with a reason."""
    with pytest.raises(UsageError):
        whole_weights(weights)


@LAWS
@given(case=mixes())
def test_every_source_is_read_through_before_it_repeats(case: tuple[OrderPlan, Mix, list[MixSource]]) -> None:
    """Lane by lane, over epochs of the mix and changes of weights, a source gives its own lane's epochs in order."""
    plan, mix, sources = case
    first_shard = 0
    for number, source in enumerate(sources):
        shards = range(first_shard, first_shard + len(source.shard_samples))
        for lane in range(plan.lanes):
            mine = [
                (shard - first_shard, sample)
                for shard, sample in lane_stream(plan, mix, sources, lane, 4)
                if shard in shards
            ]
            expected: list[tuple[int, int]] = []
            epoch = 0
            own = MixOrder(plan, mix, sources)._sources[number].plan
            while len(expected) < len(mine):
                order = EpochOrder(own.at_epoch(epoch), source.shard_samples)
                expected += order.samples_in(lane, 0, order.lane_samples(lane))
                epoch += 1
            assert mine == expected[: len(mine)]
        first_shard += len(source.shard_samples)


@LAWS
@given(case=mixes(), begin=st.integers(0, 30), length=st.integers(0, 30), epoch=st.integers(0, 4))
def test_any_place_is_found_at_once(
    case: tuple[OrderPlan, Mix, list[MixSource]], begin: int, length: int, epoch: int
) -> None:
    """A fresh order asked for any stretch gives what one that was read from the start gives."""
    plan, mix, sources = case
    for lane in range(plan.lanes):
        order = MixOrder(plan.at_epoch(epoch), mix, sources)
        size = order.lane_samples(lane)
        first, last = min(begin, size), min(begin + length, size)
        whole = [order.sample_at(lane, offset) for offset in range(size)]
        assert MixOrder(plan.at_epoch(epoch), mix, sources).samples_in(lane, first, last) == whole[first:last]


@LAWS
@given(case=mixes(), multiple=st.integers(1, 4), drop_last=st.booleans(), epoch=st.integers(0, 3))
def test_global_batches_and_resume(
    case: tuple[OrderPlan, Mix, list[MixSource]], multiple: int, drop_last: bool, epoch: int
) -> None:
    """Every world sees the same global batches, and from every position the rest is what it was."""
    plan, mix, sources = case
    order = MixOrder(plan.at_epoch(epoch), mix, sources)
    size = plan.lanes * multiple
    whole = EpochBatches(order, BatchGeometry(size, 1, drop_last))
    batches = [whole.global_batch(step) for step in range(whole.steps)]
    for world in [world for world in range(2, size + 1) if size % world == 0]:
        parts = EpochBatches(order, BatchGeometry(size, world, drop_last))
        assert [parts.global_batch(step) for step in range(parts.steps)] == batches
    for step in range(whole.steps):
        rest = EpochBatches(order, BatchGeometry(size, 1, drop_last), whole.position_after(step))
        assert [rest.global_batch(number) for number in range(rest.steps)] == batches[step + 1 :]


def test_batches_hold_the_shares_even_with_a_sample_of_each_lane() -> None:
    """Lanes begin at different places of the pattern, so that a batch of one sample a lane is mixed too."""
    mix = make_mix(["f", "g"], 8000, (3, 1))
    order = MixOrder(OrderPlan("m", lanes=8), mix, [MixSource("f", [500] * 8), MixSource("g", [500] * 8)])
    batches = EpochBatches(order, BatchGeometry(8))
    for step in range(0, 1000, 50):
        counts = Counter(shard < 8 for shard, _ in batches.global_batch(step))
        assert counts == {True: 6, False: 2}


def test_a_change_leaves_what_was_read_before() -> None:
    """Up to the place of the change the stream is the old one; after it the new shares hold."""
    sources = [MixSource("f", [50] * 4), MixSource("g", [50] * 4)]
    plan, mix = OrderPlan("m", lanes=2), make_mix(["f", "g"], 400, (1, 1))
    changed = mix.changed(0, 100, (1, 4))
    for lane in (0, 1):
        before = MixOrder(plan, mix, sources).samples_in(lane, 0, 50)
        order = MixOrder(plan, changed, sources)
        assert order.samples_in(lane, 0, 50) == before
        assert sum(shard < 4 for shard, _ in order.samples_in(lane, 50, 100)) == 10
        assert len(set(order.samples_in(lane, 0, 100))) == 100
    assert changed.changed(0, 100, (1, 1)) == mix
    assert changed.changed(0, 50, (2, 1)).history == (*mix.history, *changed.changed(0, 50, (2, 1)).history[1:])
    assert [changed.weights_at(0, at) for at in (0, 98, 100)] == [(1, 1), (1, 1), (1, 4)]
    with pytest.raises(UsageError, match="3 weights for 2"):
        mix.changed(0, 0, (1, 1, 1))
    for number in range(CHANGES_MAX - 1):
        mix = mix.changed(1, number, (number + 2, 1))
    with pytest.raises(UsageError, match="256 times"):
        mix.changed(2, 0, (1, 7))


@LAWS
@given(case=mixes(), share=st.floats(0, 1), world=st.integers(1, 3))
def test_what_is_announced_is_where_the_reader_stands(
    case: tuple[OrderPlan, Mix, list[MixSource]], share: float, world: int
) -> None:
    """The daemon computes each source's order from it, and meets what the rank reads next of that source."""
    plan, mix, sources = case
    size = plan.lanes * world
    order = MixOrder(plan.at_epoch(1), mix, sources)
    position = int(share * mix.epoch_samples) // size * size
    lanes = lanes_of_rank(0, world, plan.lanes)
    announced = encode_mix_orders(order, BatchGeometry(size, world), position, lanes)
    announced = json.loads(json.dumps(announced))
    weights = mix.weights_at(1, position)
    assert [part["source"] for part in announced] == [number for number, weight in enumerate(weights) if weight]
    shards_before = [sum(len(source.shard_samples) for source in sources[:number]) for number in range(len(sources))]
    for part in announced:
        number = part["source"]
        assert decode_pace(part["order"]) == sum(weights) / weights[number]
        own, _ = decode_order(part["order"], world=world)
        assert own.fingerprint == sources[number].fingerprint
        theirs = EpochOrder(own, sources[number].shard_samples)
        ahead = set()
        for lane in lanes:
            offset = part["position"] // plan.lanes
            ahead |= set(theirs.samples_in(lane, min(offset, theirs.lane_samples(lane)), theirs.lane_samples(lane)))
            following = EpochOrder(own.at_epoch(own.epoch + 1), sources[number].shard_samples)
            ahead |= set(following.samples_in(lane, 0, following.lane_samples(lane)))
        for lane in lanes:
            offset = min(position // plan.lanes, order.lane_samples(lane))
            for shard, sample in order.samples_in(lane, offset, min(offset + 3, order.lane_samples(lane))):
                if 0 <= shard - shards_before[number] < len(sources[number].shard_samples):
                    assert (shard - shards_before[number], sample) in ahead


def test_a_state_of_a_mix_is_small_and_survives_json() -> None:
    """Eight sources and eight changes of weights stay below 1 KiB."""
    mix = make_mix([f"{number:032x}" for number in range(8)], 10**9, whole_weights([0.2, *[0.1] * 5, 0.25, 0.05]))
    for number in range(1, 9):
        mix = mix.changed(number, 10**6 * number, whole_weights([0.2 + number / 100, *[0.1] * 5, 0.25, 0.05]))
    cursor = Cursor(OrderPlan("f" * 32, 1 << 61, 123, 16, 8), 10**9, mix)
    text = json.dumps(encode_cursor(cursor))
    assert len(text) < 1024
    assert decode_cursor(json.loads(text)) == cursor


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": ["a", 1]},
        {"sources": ["x" * 9, "b"]},
        {"epoch_samples": -1},
        {"weights": []},
        {"weights": [[0, 0, 1]]},
        {"weights": [[0, 1, 1, 1]]},
        {"weights": [[0, 0, 0, 0]]},
        {"weights": [[0, 0, 1, PERIOD_MAX]]},
        {"weights": [[0, 0, 1, 1], [0, 0, 2, 1]]},
        {"weights": [[0, 0, 1, 1.5]]},
        {"weights": [[0, 0, 1, -1]]},
        {"weights": [7]},
    ],
)
def test_hostile_states_of_mixes_are_refused(change: dict[str, object]) -> None:
    """Checked field by field."""
    state = encode_cursor(Cursor(OrderPlan("f"), 0, make_mix(["a", "b"], 10, (1, 2))))
    with pytest.raises(FormatError):
        decode_cursor({**state, "mix": {**state["mix"], **change}})


def test_states_of_other_mixes_are_refused_by_name() -> None:
    """What differs is told: which source, the weights, the epochs' length."""

    def cursor(fingerprints: list[str], weights: tuple[int, ...], samples: int = 10) -> Cursor:
        return Cursor(OrderPlan("-".join(fingerprints)), 0, make_mix(fingerprints, samples, weights))

    mine = cursor(["a", "b"], (1, 2))
    changed = Cursor(mine.plan, 5, mine.mix and mine.mix.changed(0, 5, (1, 1)))
    changed.check_matches(mine, of="data")
    changed.check_matches(cursor(["a", "b"], (1, 1)), of="data")
    for other, told in (
        (cursor(["a", "c"], (1, 2)), "what changed is source 1"),
        (cursor(["a"], (1,)), "mixes 2 sources, not 1"),
        (Cursor(OrderPlan("x")), "only one of the two is a mix"),
        (cursor(["a", "b"], (1, 3)), r"weights 1:2 \(not 1:3\)"),
        (cursor(["a", "b"], (1, 2), 11), r"epoch_samples=10 \(not 11\)"),
    ):
        with pytest.raises(UsageError, match=told):
            mine.check_matches(other, of="data")


def test_a_source_needs_a_sample_for_every_lane() -> None:
    """Told with what to do."""
    with pytest.raises(UsageError, match="source 1 of the mix has 2 samples, less than the 3 lanes"):
        MixOrder(OrderPlan("m", lanes=3), make_mix(["a", "b"], 9, (1, 1)), [MixSource("a", [9]), MixSource("b", [2])])
