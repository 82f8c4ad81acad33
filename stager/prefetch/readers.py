"""What readers announced, turned into the shards that this node needs next. Pure but for a small memory of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from typing import TypeVar

from stager.cache.datasets import CachedDataset
from stager.cache.layout import ShardKey
from stager.errors import UsageError
from stager.formats.batches import decode_order
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank
from stager.formats.wire import AnnounceRequest
from stager.offload import Offload
from stager.prefetch.planner import NEVER
from stager.prefetch.schedule import EpochSchedule

EPOCHS_AHEAD = 2
ORDERS_KEPT = 8
SCHEDULES_KEPT = 128

K = TypeVar("K")
V = TypeVar("V")
# Samples from the reader's place to an epoch's start, the place from which it is read, and its schedule.
_Stretch = tuple[int, int, EpochSchedule]


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader's order and place, checked."""

    name: str
    dataset: CachedDataset
    plan: OrderPlan
    position: int
    lanes: range
    announced_s: float

    def reads_as(self, other: Reader) -> bool:
        """Whether only place or epoch differ."""
        return (
            self.dataset.id == other.dataset.id
            and self.lanes == other.lanes
            and self.plan.at_epoch(0) == other.plan.at_epoch(0)
        )


class Schedules:
    """Computes schedules, and keeps the last few: an announcement usually moves only the position."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, OrderPlan], EpochOrder] = {}
        self._schedules: dict[tuple[str, OrderPlan, range], EpochSchedule] = {}
        self._needed: dict[tuple[str, OrderPlan, range], int] = {}

    async def prepare(self, readers: Sequence[Reader], offload: Offload) -> None:
        """Compute what `upcoming` and `next_use` will look into, off the loop: a large dataset takes a second."""
        for reader in readers:
            for plan in _plans_ahead(reader):
                key = reader.dataset.id, plan, reader.lanes
                if key not in self._schedules:
                    order = self._orders.get(key[:2])
                    if order is None:
                        order = await offload.run("hash", _make_order, reader.dataset, plan)
                    _keep(self._orders, key[:2], order, ORDERS_KEPT)
                    found = await offload.run("hash", EpochSchedule, order, reader.lanes)
                    _keep(self._schedules, key, found, SCHEDULES_KEPT)

    def bytes_needed(self, readers: Sequence[Reader]) -> int:
        """The cache with which all readers together fetch no shard twice in an epoch, in bytes."""
        # Another epoch's order needs about as much; two readers of the same lanes need no more than one.
        distinct = {(reader.dataset.id, reader.plan.at_epoch(0), reader.lanes): reader for reader in readers}
        for key, reader in distinct.items():
            if key not in self._needed:
                sizes = [shard.size for shard in reader.dataset.manifest.shards]
                needed = self._of(reader, reader.plan).bytes_needed(sizes)
                _keep(self._needed, key, needed, SCHEDULES_KEPT)
        return sum(self._needed.get(key, 0) for key in distinct)

    def upcoming(self, readers: Sequence[Reader]) -> Iterator[tuple[float, ShardKey, int]]:
        """``(samples until its use, shard, bytes)`` over all readers, nearest first.

        Readers are taken to advance alike.
        """
        return merge(*(self._upcoming(reader) for reader in readers), key=itemgetter(0))

    def next_use(self, readers: Sequence[Reader]) -> Callable[[ShardKey], float]:
        """A function that tells in how many samples a shard is used next by any of ``readers``."""
        by_dataset: dict[str, tuple[Mapping[ShardKey, int], list[list[_Stretch]]]] = {}
        for reader in readers:
            _, stretches = by_dataset.setdefault(reader.dataset.id, (reader.dataset.places, []))
            stretches.append(list(self._stretches(reader)))

        def distance(key: ShardKey) -> float:
            places, readings = by_dataset.get(key.dataset, ({}, []))
            place = places.get(key)
            if place is None:
                return NEVER
            nearest = NEVER
            for stretches in readings:
                for ahead, position, schedule in stretches:
                    use = schedule.next_use(place, position)
                    if use is not None:
                        nearest = min(nearest, ahead + use)
                        break
            return nearest

        return distance

    def _upcoming(self, reader: Reader) -> Iterator[tuple[float, ShardKey, int]]:
        shards, keys = reader.dataset.manifest.shards, reader.dataset.keys
        for ahead, position, schedule in self._stretches(reader):
            for use, place in schedule.upcoming(position):
                yield ahead + use, keys[place], shards[place].size

    def _stretches(self, reader: Reader) -> Iterator[_Stretch]:
        ahead, position = -reader.position, reader.position
        for plan in _plans_ahead(reader):
            schedule = self._of(reader, plan)
            yield ahead, position, schedule
            ahead += schedule.samples
            position = 0

    def _of(self, reader: Reader, plan: OrderPlan) -> EpochSchedule:
        key = reader.dataset.id, plan, reader.lanes
        found = self._schedules.get(key)
        if found is None:
            order = self._orders.get(key[:2]) or _make_order(reader.dataset, plan)
            _keep(self._orders, key[:2], order, ORDERS_KEPT)
            found = EpochSchedule(order, reader.lanes)
        _keep(self._schedules, key, found, SCHEDULES_KEPT)
        return found


def _plans_ahead(reader: Reader) -> list[OrderPlan]:
    epoch = reader.plan.epoch
    return [reader.plan.at_epoch(number) for number in range(epoch, epoch + EPOCHS_AHEAD)]


def _make_order(dataset: CachedDataset, plan: OrderPlan) -> EpochOrder:
    return EpochOrder(plan, [shard.samples for shard in dataset.manifest.shards])


def _keep(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Put ``key`` last, and let go of what was put there longest ago."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        kept.pop(next(iter(kept)))


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
    return Reader(request.reader, dataset, plan, request.position, lanes, now_s)
