"""The order of samples in an epoch: a permutation that anybody can compute, at any place, from a few numbers.

The shards are permuted and laid in a line. The line is cut into lanes of equal sample counts; a cut falls
between samples, so that two neighbouring lanes may share a shard. Along each lane, samples are permuted
inside windows of consecutive shards. A lane is read from its start to its end, and all lanes advance
together: what the batches take from them is `stager.formats.batches`.

A *position* counts the samples of the global stream that were consumed; every lane has then given its share
of it, ``position // lanes``, whatever the batch was. Nothing here depends on ranks, workers or the batch
size, and the dataset in the trainer and the prefetcher in the daemon compute the same thing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import accumulate

from stager.errors import UsageError
from stager.formats.permutation import Permutation, derive_key, shuffled_indices

ORDER_VERSION = 1
SEED_MAX = 1 << 62
POSITION_MAX = 1 << 62
LANES_MAX = 1_000_000
WINDOW_SHARDS_MAX = 1_000_000
SCAN_SAMPLES_MAX = 4096


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """What fixes the order of an epoch.

    Attributes:
        fingerprint: Of the dataset, as its manifest gives it.
        seed: Chosen by the user.
        epoch: From 0; every epoch has an order of its own.
        lanes: Streams that advance together; nodes read different lanes.
        window: Consecutive shards of a lane among which its samples are permuted.
        shuffle: False gives shards and samples in the dataset's own order, cut into the same lanes.
    """

    fingerprint: str
    seed: int = 0
    epoch: int = 0
    lanes: int = 1
    window: int = 8
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("seed", self.seed, 0, SEED_MAX),
            ("epoch", self.epoch, 0, SEED_MAX),
            ("lanes", self.lanes, 1, LANES_MAX),
            ("window", self.window, 1, WINDOW_SHARDS_MAX),
        ):
            check_whole_number(name, value, least, most)

    def at_epoch(self, epoch: int) -> OrderPlan:
        """The same order's other epoch."""
        return replace(self, epoch=epoch)


@dataclass(frozen=True, slots=True)
class ShardUse:
    """One stretch of an epoch in which a lane reads a shard.

    Attributes:
        shard: Index in the dataset's manifest.
        lane: Which lane reads it.
        first: Position at which the lane first needs it, or a little before.
        end: Position from which the lane needs it no more.
    """

    shard: int
    lane: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LaneWindow:
    """One window of a lane: positions ``first`` to ``end`` (exclusive), and the shards that they read."""

    first: int
    end: int
    shards: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Window:
    """Places ``start`` to ``end`` of the line, on the shards at ``first`` to ``last`` (exclusive) of the
    line."""

    start: int
    end: int
    first: int
    last: int
    permutation: Permutation | None


class EpochOrder:
    """The order of one epoch: any sample of any lane, and the shards that a position needs next.

    Memory is 16 bytes a shard and a few tables; samples cost nothing.
    """

    def __init__(self, plan: OrderPlan, shard_samples: Sequence[int]) -> None:
        """Compute the line of shards.

        Args:
            plan: What fixes the order.
            shard_samples: Samples of every shard, in the manifest's order; empty shards are passed over.
        """
        self.plan = plan
        if plan.shuffle:
            line = shuffled_indices(
                len(shard_samples), derive_key("shards", plan.fingerprint, plan.seed, plan.epoch)
            )
        else:
            line = list(range(len(shard_samples)))
        self._shards = array("Q", (shard for shard in line if shard_samples[shard]))
        self._starts = array("Q", accumulate((shard_samples[shard] for shard in self._shards), initial=0))
        self._places: array[int] | None = None
        self._windows: dict[tuple[int, int], _Window] = {}

    @property
    def samples(self) -> int:
        """Of all lanes."""
        return self._starts[-1]

    def lane_samples(self, lane: int) -> int:
        """Samples of one lane; lanes differ by one at most."""
        start, end = self._lane_bounds(lane)
        return end - start

    def sample_at(self, lane: int, offset: int) -> tuple[int, int]:
        """``(shard, sample in the shard)`` that ``lane`` gives after ``offset`` others.

        Raises:
            IndexError: The lane has no such offset.
        """
        return self.samples_in(lane, offset, offset + 1)[0]

    def samples_in(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        """``(shard, sample in the shard)`` at offsets ``begin`` to ``end`` (exclusive) of ``lane``, in
        order."""
        lane_start, lane_end = self._lane_bounds(lane)
        place, stop = lane_start + begin, lane_start + end
        if begin < 0 or stop > lane_end:
            raise IndexError(f"lane {lane} has {lane_end - lane_start} samples, not offsets {begin} to {end}")
        found: list[tuple[int, int]] = []
        while place < stop:
            window = self._window_at(lane, place)
            until = min(stop, window.end)
            found.extend(self._located(window, place, until))
            place = until
        return found

    def iter_uses(self, position: int = 0, lanes: Iterable[int] | None = None) -> Iterator[ShardUse]:
        """The shards that ``lanes`` (all if None) need from ``position`` on, by the position of their first
        need.

        A shard comes once for every lane that reads it. Computed as it is consumed.
        """
        chosen = range(self.plan.lanes) if lanes is None else lanes
        return merge(
            *(self._lane_uses(lane, position) for lane in chosen), key=lambda use: (use.first, use.lane)
        )

    def iter_windows(self, lane: int) -> Iterator[LaneWindow]:
        """The windows of ``lane`` one after the other: which shards, and when, without the order inside.

        Costs nothing per sample, where `iter_uses` looks into every window.
        """
        lane_start, lane_end = self._lane_bounds(lane)
        place, number = lane_start, 0
        while place < lane_end:
            start, end, first, last = self._window_bounds(lane, number)
            yield LaneWindow(
                self._position(start - lane_start), self._position(end - lane_start), self._shards[first:last]
            )
            place, number = end, number + 1

    def next_use(self, shard: int, position: int, lanes: range | None = None) -> int | None:
        """The position of the shard's next need by ``lanes`` (all if None), to the window: ``position``
        while it is being read, a later one before, None when this epoch needs it no more."""
        place = self._place_of(shard)
        if place is None:
            return None
        found: int | None = None
        for lane in self._lanes_between(self._starts[place], self._starts[place + 1] - 1):
            if lanes is not None and lane not in lanes:
                continue
            lane_start, _ = self._lane_bounds(lane)
            window = self._window_at(lane, max(lane_start, self._starts[place]))
            if position < self._position(window.end - lane_start):
                need = max(position, self._position(window.start - lane_start))
                found = need if found is None else min(found, need)
        return found

    def _position(self, offset: int) -> int:
        return offset * self.plan.lanes

    def _lane_bounds(self, lane: int) -> tuple[int, int]:
        lanes = self.plan.lanes
        if not 0 <= lane < lanes:
            raise IndexError(f"lane {lane} of {lanes}")
        return lane * self.samples // lanes, (lane + 1) * self.samples // lanes

    def _lanes_between(self, first: int, last: int) -> range:
        """Lanes that own the places ``first`` to ``last`` of the line."""
        lanes, samples = self.plan.lanes, self.samples
        return range(((first + 1) * lanes - 1) // samples, ((last + 1) * lanes - 1) // samples + 1)

    def _place_of(self, shard: int) -> int | None:
        """Where in the line the shard stands, None if it is empty."""
        if self._places is None:
            places = array("Q", bytes(8 * (max(self._shards, default=-1) + 1)))
            for place, occupant in enumerate(self._shards):
                places[occupant] = place + 1
            self._places = places
        place = self._places[shard] if 0 <= shard < len(self._places) else 0
        return place - 1 if place else None

    def _window_at(self, lane: int, place: int) -> _Window:
        """The window of ``lane`` that holds place ``place`` of the line."""
        lane_start, _ = self._lane_bounds(lane)
        lane_first = bisect_right(self._starts, lane_start) - 1
        number = (bisect_right(self._starts, place) - 1 - lane_first) // self._width
        known = self._windows.get((lane, number))
        if known is not None:
            return known
        start, end, first, last = self._window_bounds(lane, number)
        permutation = None
        if self.plan.shuffle:
            plan = self.plan
            key = derive_key(
                "window", plan.fingerprint, plan.seed, plan.epoch, plan.lanes, plan.window, lane, number
            )
            permutation = Permutation(end - start, key)
        window = _Window(start, end, first, last, permutation)
        # A reader needs the current window of every lane; a few more cover the step from one to the next.
        if len(self._windows) >= 2 * self.plan.lanes + 16:
            self._windows.clear()
        self._windows[lane, number] = window
        return window

    @property
    def _width(self) -> int:
        return self.plan.window if self.plan.shuffle else 1

    def _window_bounds(self, lane: int, number: int) -> tuple[int, int, int, int]:
        """Places ``start`` to ``end`` and shards ``first`` to ``last`` of the line, of a lane's window."""
        lane_start, lane_end = self._lane_bounds(lane)
        first = bisect_right(self._starts, lane_start) - 1 + number * self._width
        last = min(first + self._width, bisect_left(self._starts, lane_end))
        return max(lane_start, self._starts[first]), min(lane_end, self._starts[last]), first, last

    def _located(self, window: _Window, begin: int, end: int) -> Iterator[tuple[int, int]]:
        starts, shards, permutation, base = self._starts, self._shards, window.permutation, window.start
        for place in range(begin, end):
            source = place if permutation is None else base + permutation[place - base]
            at = bisect_right(starts, source, window.first, window.last + 1) - 1
            yield shards[at], source - starts[at]

    def _lane_uses(self, lane: int, position: int) -> Iterator[ShardUse]:
        lane_start, lane_end = self._lane_bounds(lane)
        place = lane_start + position // self.plan.lanes
        while place < lane_end:
            window = self._window_at(lane, place)
            end = self._position(window.end - lane_start)
            for shard, need in self._first_needs(window, place):
                yield ShardUse(shard, lane, self._position(need - lane_start), end)
            place = window.end

    def _first_needs(self, window: _Window, place: int) -> list[tuple[int, int]]:
        """``(shard, place of the line at which it is first needed)`` of a window from ``place`` on, soonest
        first.

        After `SCAN_SAMPLES_MAX` places, what was not met is taken as needed there: earlier than it is,
        never later.
        """
        needs: dict[int, int] = {}
        scan_end = min(window.end, place + SCAN_SAMPLES_MAX)
        for at, (shard, _) in zip(
            range(place, scan_end), self._located(window, place, scan_end), strict=True
        ):
            needs.setdefault(shard, at)
            if len(needs) == window.last - window.first:
                break
        else:
            if scan_end < window.end:
                for at in range(window.first, window.last):
                    needs.setdefault(self._shards[at], scan_end)
        return list(needs.items())


def check_whole_number(name: str, value: object, least: int, most: int) -> None:
    """UsageError, naming ``name``, unless ``value`` is an int from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least} to {most}, not {value!r}", subject=name)


def lanes_of_rank(rank: int, world: int, lanes: int) -> range:
    """The lanes that one rank of ``world`` reads in all but an epoch's short last batch."""
    return range(rank * lanes // world, -(-(rank + 1) * lanes // world))


def peak_live_bytes(uses: Iterable[ShardUse], shard_bytes: Sequence[int]) -> int:
    """Most bytes of shards that are needed at one position: the cache with which no shard is fetched twice.

    Args:
        uses: Of the lanes that share a cache, e.g. ``order.iter_uses(0, lanes)``.
        shard_bytes: Size of every shard, in the manifest's order.
    """
    # At equal positions the ends (-1) come before the beginnings (+1).
    changes = sorted(
        change for use in uses for change in ((use.first, 1, use.shard), (use.end, -1, use.shard))
    )
    readers: dict[int, int] = {}
    live = peak = 0
    for _, change, shard in changes:
        before = readers.get(shard, 0)
        readers[shard] = before + change
        if before == 0:
            live += shard_bytes[shard]
        elif before + change == 0:
            live -= shard_bytes[shard]
        peak = max(peak, live)
    return peak
