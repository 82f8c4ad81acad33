"""How the lanes of an epoch become batches of a rank and a worker.

Global batch k of B samples takes B / L positions from each of L lanes, lane after lane; rank r of W takes
the r-th slice of B / W of it; worker w of K takes batches w, w + K, ... So the stream of global batches is
the same for any number of ranks that divides B and any number of workers.

An epoch ends alike on all ranks, by arithmetic. What is left for less than a whole batch is dropped with
``drop_last``; else it makes a last, shorter batch of which every rank gets the same number of samples.
Where that does not divide, some samples are given twice, fewer than there are ranks; on one rank, none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Protocol

from stager.errors import FormatError, UsageError
from stager.formats.fields import take_count, take_text, take_version
from stager.formats.order import (
    LANES_MAX,
    ORDER_VERSION,
    SEED_MAX,
    WINDOW_SHARDS_MAX,
    OrderPlan,
    check_whole_number,
)

GLOBAL_BATCH_MAX = 1 << 40
WORLD_MAX = 10_000_000
PLACES_AT_A_TIME = 256
PACE_MAX = 1e9


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """How an epoch is cut into batches.

    Attributes:
        global_batch: Samples that all ranks together take in a step.
        world: Number of ranks; divides ``global_batch``.
        drop_last: Whether what is left for less than a whole batch is dropped.
    """

    global_batch: int
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_whole_number("global_batch", self.global_batch, 1, GLOBAL_BATCH_MAX)
        check_whole_number("world", self.world, 1, WORLD_MAX)
        if self.global_batch % self.world:
            raise UsageError(
                f"a global batch of {self.global_batch} samples does not divide among {self.world} ranks",
                subject="global_batch",
                hint=f"use a global batch of {_multiples_near(self.global_batch, self.world)}, "
                "or another world size",
            )

    @property
    def rank_batch(self) -> int:
        """Samples of one rank in a step."""
        return self.global_batch // self.world

    def check_lanes(self, lanes: int) -> None:
        """UsageError unless every lane gives the same number of samples to a batch."""
        if self.global_batch % lanes:
            sizes = _multiples_near(self.global_batch, lcm(lanes, self.world))
            raise UsageError(
                f"a global batch of {self.global_batch} samples does not divide among {lanes} lanes",
                subject="lanes",
                hint=f"use a global batch of {sizes}, or a number of lanes that divides {self.global_batch}",
            )


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank reads in a step.

    Attributes:
        places: ``(shard, sample in the shard)``, in the batch's order.
        padding: How many of them, at the end, are repeats that keep the ranks equal.
    """

    places: list[tuple[int, int]]
    padding: int = 0


class LaneOrder(Protocol):
    """Lanes of samples for one epoch: those of one dataset (`EpochOrder`) or of several (`MixOrder`)."""

    @property
    def plan(self) -> OrderPlan: ...

    @property
    def samples(self) -> int:
        """Of all lanes."""
        ...

    def lane_samples(self, lane: int) -> int:
        """Samples of one lane; lanes differ by one at most."""
        ...

    def sample_at(self, lane: int, offset: int) -> tuple[int, int]:
        """``(shard, sample in the shard)`` that ``lane`` gives after ``offset`` others."""
        ...

    def samples_in(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        """``(shard, sample in the shard)`` at offsets ``begin`` to ``end`` (exclusive) of ``lane``."""
        ...


class EpochBatches:
    """The batches of an epoch from a position on; steps are counted from there."""

    def __init__(self, order: LaneOrder, geometry: BatchGeometry, position: int = 0) -> None:
        """Lay batches over the rest of an epoch.

        Raises:
            UsageError: The batch does not divide among the lanes, or no batch ends at this position.
        """
        lanes = order.plan.lanes
        geometry.check_lanes(lanes)
        self.check_position(position, order.samples, lanes)
        self.order = order
        self.geometry = geometry
        self.position = min(position, order.samples)
        self.steps = count_steps(order.samples, lanes, geometry, position)
        self._lane_batch = geometry.global_batch // lanes
        self._lane_start = self.position // lanes
        self._whole = _whole_steps(order.samples, lanes, geometry, position)

    @staticmethod
    def check_position(position: int, samples: int, lanes: int) -> None:
        """UsageError unless lanes have all given the same number of samples at ``position``, or all they have."""
        if position < samples and position % lanes:
            raise UsageError(
                f"position {position} is not a multiple of the {lanes} lanes",
                subject="position",
                hint="take the position from state_dict(), which only gives ends of batches",
            )

    def rank_batch(self, step: int, rank: int) -> RankBatch:
        """What ``rank`` reads in ``step``."""
        if not 0 <= step < self.steps or not 0 <= rank < self.geometry.world:
            raise IndexError(f"step {step} of {self.steps}, rank {rank} of {self.geometry.world}")
        if step == self._whole:
            return self._last_rank_batch(rank)
        size, lane_batch = self.geometry.rank_batch, self._lane_batch
        begin, end = rank * size, (rank + 1) * size
        offset = self._lane_start + step * lane_batch
        places: list[tuple[int, int]] = []
        for lane in range(begin // lane_batch, -(-end // lane_batch)):
            lane_first = lane * lane_batch
            inside = max(begin - lane_first, 0), min(end - lane_first, lane_batch)
            places += self.order.samples_in(lane, offset + inside[0], offset + inside[1])
        return RankBatch(places)

    def iter_rank_batches(self, steps: range, rank: int) -> Iterator[RankBatch]:
        """What ``rank`` reads in each of ``steps``, as `rank_batch` gives it, at less cost for small batches.

        Steps that follow one another are taken from the lanes `PLACES_AT_A_TIME` at a time where the rank has whole shares.
        """
        size, share = self.geometry.rank_batch, self._lane_batch
        if steps.step != 1 or size % share or size * 2 > PLACES_AT_A_TIME:
            for step in steps:
                yield self.rank_batch(step, rank)
            return
        lanes = range(rank * size // share, (rank + 1) * size // share)
        for first in range(steps.start, min(steps.stop, self._whole), PLACES_AT_A_TIME // size):
            last = min(first + PLACES_AT_A_TIME // size, steps.stop, self._whole)
            begin, end = self._lane_start + first * share, self._lane_start + last * share
            taken = [self.order.samples_in(lane, begin, end) for lane in lanes]
            for at in range(0, end - begin, share):
                yield RankBatch([place for places in taken for place in places[at : at + share]])
        for step in range(max(steps.start, self._whole), steps.stop):
            yield self.rank_batch(step, rank)

    def global_batch(self, step: int) -> list[tuple[int, int]]:
        """All ranks' places of a step in the order of ranks, without repeats: the same for every world
        size."""
        places: list[tuple[int, int]] = []
        for rank in range(self.geometry.world):
            batch = self.rank_batch(step, rank)
            places += batch.places[: len(batch.places) - batch.padding]
        return places

    def position_after(self, step: int) -> int:
        """The position when ``step`` has been consumed."""
        return min(self.position + (step + 1) * self.geometry.global_batch, self.order.samples)

    def _last_rank_batch(self, rank: int) -> RankBatch:
        # Lanes and ranks fall into groups that share nothing, so that even here no rank reads foreign lanes.
        lanes, world = self.order.plan.lanes, self.geometry.world
        groups = gcd(lanes, world)
        ranks, lanes_each = world // groups, lanes // groups
        left = [self._left(range(group * lanes_each, (group + 1) * lanes_each)) for group in range(groups)]
        size = -(-max(left) // ranks)
        group, place = divmod(rank, ranks)
        rest: list[tuple[int, int]] = []
        for lane in range(group * lanes_each, (group + 1) * lanes_each):
            lane_samples = self.order.lane_samples(lane)
            rest += self.order.samples_in(lane, min(self._last_offset, lane_samples), lane_samples)
        real = rest[place * size : (place + 1) * size]
        padding = size - len(real)
        repeated = rest or [self._repeatable(group * lanes_each)]
        real += [repeated[(place * size + number) % len(repeated)] for number in range(len(real), size)]
        return RankBatch(real, padding)

    @property
    def _last_offset(self) -> int:
        return self._lane_start + self._whole * self._lane_batch

    def _left(self, lanes: range) -> int:
        return sum(max(self.order.lane_samples(lane) - self._last_offset, 0) for lane in lanes)

    def _repeatable(self, lane: int) -> tuple[int, int]:
        """A sample for a rank that has none left: the lane's last, or another lane's where the lane is
        empty."""
        for candidate in (*range(lane, self.order.plan.lanes), *range(lane)):
            samples = self.order.lane_samples(candidate)
            if samples:
                return self.order.sample_at(candidate, samples - 1)
        raise AssertionError("an epoch without samples has no steps")


def count_steps(samples: int, lanes: int, geometry: BatchGeometry, position: int = 0) -> int:
    """Steps that every rank makes from ``position`` to the end of an epoch of ``samples`` samples."""
    whole = _whole_steps(samples, lanes, geometry, position)
    return whole + (not geometry.drop_last and position + whole * geometry.global_batch < samples)


def _whole_steps(samples: int, lanes: int, geometry: BatchGeometry, position: int) -> int:
    """Steps from ``position`` on in which every lane gives its full share."""
    left = samples // lanes - position // lanes
    return max(left, 0) // (geometry.global_batch // lanes) if position < samples else 0


def encode_order(plan: OrderPlan, geometry: BatchGeometry, *, pace: float = 1.0) -> dict[str, Any]:
    """The parameters that a reader announces to the daemon.

    Args:
        plan: What fixes the order.
        geometry: Of the reader's batches.
        pace: How many samples the reader takes for one of this dataset: more than 1 if it mixes it with others.
    """
    return {
        "version": ORDER_VERSION,
        "fingerprint": plan.fingerprint,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "lanes": plan.lanes,
        "window": plan.window,
        "shuffle": plan.shuffle,
        "global_batch": geometry.global_batch,
        "drop_last": geometry.drop_last,
        "pace": pace,
    }


def decode_order(
    value: Mapping[str, Any], *, world: int, at: str = "order"
) -> tuple[OrderPlan, BatchGeometry]:
    """What `encode_order` wrote, for a reader of ``world`` ranks.

    Raises:
        FormatError: Not what `encode_order` writes.
        UsageError: The numbers do not divide.
    """
    plan = decode_plan(value, at=at)
    batch = take_count(value, "global_batch", at=at, most=GLOBAL_BATCH_MAX)
    geometry = BatchGeometry(batch, world, take_flag(value, "drop_last", at=at))
    geometry.check_lanes(plan.lanes)
    return plan, geometry


def decode_pace(value: Mapping[str, Any], *, at: str = "order") -> float:
    """The pace that `encode_order` wrote; 1 where an older reader wrote none."""
    pace = value.get("pace", 1.0)
    if not isinstance(pace, int | float) or isinstance(pace, bool) or not 1 <= pace <= PACE_MAX:
        raise FormatError(f"`{at}`: `pace` must be a number from 1 to {PACE_MAX:.0f}", subject=at)
    return float(pace)


def decode_plan(value: Mapping[str, Any], *, at: str) -> OrderPlan:
    """The `OrderPlan` among the entries of ``value``; FormatError where one is missing or out of bounds."""
    take_version(value, at=at, known=ORDER_VERSION)
    return OrderPlan(
        fingerprint=take_text(value, "fingerprint", at=at, length_max=200),
        seed=take_count(value, "seed", at=at, most=SEED_MAX),
        epoch=take_count(value, "epoch", at=at, most=SEED_MAX),
        lanes=take_count(value, "lanes", at=at, most=LANES_MAX),
        window=take_count(value, "window", at=at, most=WINDOW_SHARDS_MAX),
        shuffle=take_flag(value, "shuffle", at=at),
    )


def take_flag(value: Mapping[str, Any], name: str, *, at: str) -> bool:
    found = value.get(name)
    if not isinstance(found, bool):
        raise FormatError(f"`{at}`: `{name}` must be true or false", subject=at)
    return found


def _multiples_near(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
