"""What readers announced, turned into the shards that this node needs next. Pure but for a small memory of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from stager.cache.layout import ShardKey
from stager.cache.shards import CachedDataset
from stager.errors import UsageError
from stager.formats.batches import decode_order
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank
from stager.formats.wire import AnnounceRequest
from stager.prefetch.planner import NEVER
from stager.prefetch.schedule import EpochSchedule

EPOCHS_AHEAD = 2
ORDERS_KEPT = 8
SCHEDULES_KEPT = 64


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

    def of(self, dataset: CachedDataset, plan: OrderPlan, lanes: range) -> EpochSchedule:
        """The schedule of ``lanes`` in the epoch of ``plan``."""
        found = self._schedules.pop((dataset.id, plan, lanes), None)
        if found is None:
            found = EpochSchedule(self._order(dataset, plan), lanes)
        self._schedules[dataset.id, plan, lanes] = found
        while len(self._schedules) > SCHEDULES_KEPT:
            self._schedules.pop(next(iter(self._schedules)))
        return found

    def bytes_needed(self, readers: Sequence[Reader]) -> int:
        """The cache with which all readers together fetch no shard twice in an epoch, in bytes."""
        distinct: list[Reader] = []
        for reader in readers:
            if not any(reader.reads_as(other) for other in distinct):
                distinct.append(reader)
        return sum(
            self.of(reader.dataset, reader.plan, reader.lanes).bytes_needed(
                [shard.size for shard in reader.dataset.manifest.shards]
            )
            for reader in distinct
        )

    def upcoming(self, readers: Sequence[Reader]) -> Iterator[tuple[float, ShardKey, int]]:
        """``(samples until its use, shard, bytes)`` over all readers, nearest first.

        Readers are taken to advance alike.
        """
        return merge(*(self._upcoming(reader) for reader in readers), key=lambda use: use[0])

    def next_use(self, readers: Sequence[Reader]) -> Callable[[ShardKey], float]:
        """A function that tells in how many samples a shard is used next by any of ``readers``."""

        def distance(key: ShardKey) -> float:
            return min((self._next_use(reader, key) for reader in readers), default=NEVER)

        return distance

    def _upcoming(self, reader: Reader) -> Iterator[tuple[float, ShardKey, int]]:
        shards, dataset = reader.dataset.manifest.shards, reader.dataset.id
        for ahead, position, schedule in self._epochs(reader):
            for use, place in schedule.upcoming(position):
                shard = shards[place]
                yield float(ahead + use), ShardKey(dataset, shard.name), shard.size

    def _next_use(self, reader: Reader, key: ShardKey) -> float:
        place = reader.dataset.places.get(key.name) if reader.dataset.id == key.dataset else None
        if place is None:
            return NEVER
        for ahead, position, schedule in self._epochs(reader):
            use = schedule.next_use(place, position)
            if use is not None:
                return float(ahead + use)
        return NEVER

    def _epochs(self, reader: Reader) -> Iterator[tuple[int, int, EpochSchedule]]:
        """The epochs that are looked into: samples from the reader's place to the epoch's start, place in it, schedule."""
        ahead, position = -reader.position, reader.position
        for epoch in range(reader.plan.epoch, reader.plan.epoch + EPOCHS_AHEAD):
            schedule = self.of(reader.dataset, reader.plan.at_epoch(epoch), reader.lanes)
            yield ahead, position, schedule
            ahead += schedule.samples
            position = 0

    def _order(self, dataset: CachedDataset, plan: OrderPlan) -> EpochOrder:
        found = self._orders.pop((dataset.id, plan), None)
        if found is None:
            found = EpochOrder(plan, [shard.samples for shard in dataset.manifest.shards])
        self._orders[dataset.id, plan] = found
        while len(self._orders) > ORDERS_KEPT:
            self._orders.pop(next(iter(self._orders)))
        return found


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
