"""What readers announced, turned into the shards that this node needs next. Pure but for a small memory of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter

from stager.cache.datasets import CachedDataset
from stager.cache.layout import ShardKey
from stager.errors import UsageError
from stager.formats.batches import decode_order, decode_pace
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank
from stager.formats.wire import AnnounceRequest
from stager.offload import Offload
from stager.prefetch.planner import NEVER
from stager.prefetch.schedule import EpochSchedule

EPOCHS_AHEAD = 2

_ScheduleKey = tuple[str, OrderPlan, tuple[int, ...]]
# Samples from the reader's place to an epoch's start, the place from which it is read, and its schedule.
_Stretch = tuple[int, int, EpochSchedule]


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader's order and place, checked.

    ``pace`` is how many samples it takes for one of this dataset: a reader that mixes datasets is one for each of them.
    """

    name: str
    dataset: CachedDataset
    plan: OrderPlan
    position: int
    lanes: range
    announced_s: float
    pace: float = 1.0

    @property
    def shares(self) -> tuple[str, OrderPlan, range]:
        """What readers have alike that need one cache between them: all but place and epoch."""
        return self.dataset.id, self.plan.at_epoch(0), self.lanes


@dataclass(frozen=True, slots=True)
class _Reading:
    """What readers of one order in one epoch read together, from the place of the one that is farthest behind."""

    dataset: CachedDataset
    plan: OrderPlan
    position: int
    lanes: tuple[int, ...]
    pace: float

    def keys_ahead(self) -> list[_ScheduleKey]:
        """The schedules that are looked into: of this epoch and the next."""
        return [
            (self.dataset.id, self.plan.at_epoch(epoch), self.lanes)
            for epoch in range(self.plan.epoch, self.plan.epoch + EPOCHS_AHEAD)
        ]


class Schedules:
    """What readers need next. Keeps the schedules of the present readers: an announcement usually moves only the place."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, OrderPlan], EpochOrder] = {}
        self._schedules: dict[_ScheduleKey, EpochSchedule] = {}

    async def prepare(self, readers: Sequence[Reader], offload: Offload) -> None:
        """Compute what `upcoming` and `next_use` will look into, off the loop, and forget all else.

        A large dataset takes a second.
        """
        needed: set[_ScheduleKey] = set()
        for reading in _gathered(readers):
            for key in reading.keys_ahead():
                needed.add(key)
                if key not in self._schedules:
                    order = self._orders.get(key[:2])
                    if order is None:
                        order = await offload.run("hash", _make_order, reading.dataset, key[1])
                        self._orders[key[:2]] = order
                    self._schedules[key] = await offload.run("hash", EpochSchedule, order, key[2])
        for key in self._schedules.keys() - needed:
            del self._schedules[key]
        for short in self._orders.keys() - {key[:2] for key in needed}:
            del self._orders[short]

    def bytes_needed(self, reader: Reader) -> int:
        """The cache with which a reader fetches no shard twice in an epoch, in bytes."""
        schedule = EpochSchedule(self._order(reader.dataset, reader.plan), reader.lanes)
        return schedule.bytes_needed([shard.size for shard in reader.dataset.manifest.shards])

    def upcoming(self, readers: Sequence[Reader]) -> Iterator[tuple[float, ShardKey, int]]:
        """``(samples until its use, shard, bytes)`` over all readers, nearest first.

        Readers are taken to advance alike.
        """
        return merge(*(self._upcoming(reading) for reading in _gathered(readers)), key=itemgetter(0))

    def next_use(self, readers: Sequence[Reader]) -> Callable[[ShardKey], float]:
        """A function that tells in how many samples a shard is used next by any of ``readers``."""
        by_dataset: dict[str, tuple[Mapping[ShardKey, int], list[tuple[float, list[_Stretch]]]]] = {}
        for reading in _gathered(readers):
            _, readings = by_dataset.setdefault(reading.dataset.id, (reading.dataset.places, []))
            readings.append((reading.pace, list(self._stretches(reading))))

        def distance(key: ShardKey) -> float:
            places, readings = by_dataset.get(key.dataset, ({}, []))
            place = places.get(key)
            if place is None:
                return NEVER
            nearest = NEVER
            for pace, stretches in readings:
                for ahead, position, schedule in stretches:
                    use = schedule.next_use(place, position)
                    if use is not None:
                        nearest = min(nearest, (ahead + use) * pace)
                        break
            return nearest

        return distance

    def _upcoming(self, reading: _Reading) -> Iterator[tuple[float, ShardKey, int]]:
        shards, keys = reading.dataset.manifest.shards, reading.dataset.keys
        for ahead, position, schedule in self._stretches(reading):
            for use, place in schedule.upcoming(position):
                yield (ahead + use) * reading.pace, keys[place], shards[place].size

    def _stretches(self, reading: _Reading) -> Iterator[_Stretch]:
        ahead, position = -reading.position, reading.position
        for key in reading.keys_ahead():
            schedule = self._schedules.get(key)
            if schedule is None:
                schedule = EpochSchedule(self._order(reading.dataset, key[1]), key[2])
                self._schedules[key] = schedule
            yield ahead, position, schedule
            ahead += schedule.samples
            position = 0

    def _order(self, dataset: CachedDataset, plan: OrderPlan) -> EpochOrder:
        found = self._orders.get((dataset.id, plan))
        if found is None:
            found = self._orders[dataset.id, plan] = _make_order(dataset, plan)
        return found


def _gathered(readers: Sequence[Reader]) -> list[_Reading]:
    """Readers by what they read: the ranks of a job become one reading, of all their lanes."""
    groups: dict[tuple[str, OrderPlan, float], list[Reader]] = {}
    for reader in readers:
        groups.setdefault((reader.dataset.id, reader.plan, reader.pace), []).append(reader)
    return [
        _Reading(
            group[0].dataset,
            plan,
            min(reader.position for reader in group),
            tuple(sorted({lane for reader in group for lane in reader.lanes})),
            pace,
        )
        for (_, plan, pace), group in groups.items()
    ]


def _make_order(dataset: CachedDataset, plan: OrderPlan) -> EpochOrder:
    return EpochOrder(plan, [shard.samples for shard in dataset.manifest.shards])


def checked_reader(request: AnnounceRequest, dataset: CachedDataset, *, now_s: float) -> Reader:
    """A reader from its announcement.

    Raises:
        FormatError: The order is not what `encode_order` writes.
        UsageError: It is the order of another dataset, or its numbers do not divide.
    """
    plan, _ = decode_order(request.order, world=request.world, at="announce: order")
    if plan.fingerprint != dataset.fingerprint:
        raise UsageError(
            f"the announced order is of fingerprint {plan.fingerprint}; `{dataset.source}` has"
            f" {dataset.fingerprint} here",
            subject=dataset.source,
            hint="the dataset changed: open it again",
        )
    lanes = lanes_of_rank(request.rank, request.world, plan.lanes)
    pace = decode_pace(request.order, at="announce: order")
    return Reader(request.reader, dataset, plan, request.position, lanes, now_s, pace)
