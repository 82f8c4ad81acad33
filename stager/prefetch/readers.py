"""What readers announced, turned into the shards that this node needs next. Pure but for a small memory of orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from stager.cache.layout import ShardKey
from stager.cache.shards import CachedDataset
from stager.errors import UsageError
from stager.formats.batches import decode_order
from stager.formats.order import EpochOrder, OrderPlan, lanes_of_rank, peak_live_bytes
from stager.formats.wire import AnnounceRequest

EPOCHS_AHEAD = 2
ORDERS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader's order and place, checked."""

    name: str
    dataset: CachedDataset
    plan: OrderPlan
    position: int
    lanes: range
    announced_s: float


class Orders:
    """Computes orders, and keeps the last few: an announcement usually moves only the position."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, OrderPlan], EpochOrder] = {}

    def of(self, dataset: CachedDataset, plan: OrderPlan) -> EpochOrder:
        """The order of ``plan`` over the dataset's shards."""
        found = self._kept.pop((dataset.id, plan), None)
        if found is None:
            found = EpochOrder(plan, [shard.samples for shard in dataset.manifest.shards])
        self._kept[dataset.id, plan] = found
        while len(self._kept) > ORDERS_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return found

    def bytes_needed(self, reader: Reader) -> int:
        """The cache with which a reader's epoch fetches no shard twice, in bytes."""
        order = self.of(reader.dataset, reader.plan)
        sizes = [shard.size for shard in reader.dataset.manifest.shards]
        return peak_live_bytes(order.iter_uses(0, reader.lanes), sizes)

    def upcoming(self, reader: Reader) -> Iterator[tuple[int, ShardKey, int]]:
        """``(samples until its use, shard, bytes)`` of what a reader needs from its place on, nearest first."""
        samples_before = -reader.position
        position = reader.position
        for epoch in range(reader.plan.epoch, reader.plan.epoch + EPOCHS_AHEAD):
            order = self.of(reader.dataset, reader.plan.at_epoch(epoch))
            for use in order.iter_uses(position, reader.lanes):
                shard = reader.dataset.manifest.shards[use.shard]
                yield samples_before + use.first, ShardKey(reader.dataset.id, shard.name), shard.size
            samples_before += order.samples
            position = 0

    def merged(self, readers: list[Reader]) -> Iterator[tuple[ShardKey, int]]:
        """What all readers need, by how soon; readers are taken to advance alike."""
        streams = (self.upcoming(reader) for reader in readers)
        for _, key, size in merge(*streams, key=lambda use: use[0]):
            yield key, size


def checked_reader(request: AnnounceRequest, dataset: CachedDataset, *, now_s: float) -> Reader:
    """A reader from its announcement.

    Raises:
        FormatError: The order is not what `encode_order` writes.
        UsageError: It is the order of another dataset, or its numbers do not divide.
    """
    plan, _ = decode_order(request.order, world=request.world, at="announce: order")
    if plan.fingerprint != dataset.manifest.fingerprint:
        raise UsageError(
            f"the announced order is of fingerprint {plan.fingerprint}; `{dataset.source}` has"
            f" {dataset.manifest.fingerprint} here",
            subject=dataset.source,
            hint="the dataset changed: open it again",
        )
    lanes = lanes_of_rank(request.rank, request.world, plan.lanes)
    return Reader(request.reader, dataset, plan, request.position, lanes, now_s)
