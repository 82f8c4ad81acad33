"""A small dataset in a store, and a staging service over simulated or real parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stager.budget import ByteBudget
from stager.cache.shards import ShardCache
from stager.checksum import digest_of
from stager.disk import Disk
from stager.formats.batches import BatchGeometry, encode_order
from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest
from stager.formats.order import OrderPlan
from stager.formats.wire import AnnounceRequest
from stager.offload import InlineOffload, Offload
from stager.prefetch.service import StagingOptions, StagingService
from stager.store.api import ObjectStore
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools

PART_BYTES = 1000


def make_bodies(count: int, *, seed: int = 1, size: int = 3500) -> dict[str, bytes]:
    """Shards by name; what is in them does not matter to staging."""
    chance = random.Random(seed)
    return {f"shard-{number:06d}.tar": chance.randbytes(size + 100 * number) for number in range(count)}


def make_manifest(bodies: dict[str, bytes], *, samples: int = 10) -> DatasetManifest:
    return DatasetManifest(
        tuple(ShardEntry(name, len(body), samples, digest_of(body)) for name, body in bodies.items())
    )


async def put_dataset(store: ObjectStore, bodies: dict[str, bytes]) -> DatasetManifest:
    manifest = make_manifest(bodies)
    for name, body in bodies.items():
        await store.put(name, body)
    await store.put("manifest.json", encode_dataset_manifest(manifest))
    return manifest


def make_service(
    store: ObjectStore,
    disk: Disk,
    root: str,
    *,
    capacity_bytes: int = 1 << 30,
    sources: tuple[str, ...] = ("mem://dataset",),
    seed: int = 0,
    offload: Offload | None = None,
    memory_bytes: int = 1 << 20,
) -> tuple[StagingService, ShardCache]:
    tools = Tools(
        disk, offload or InlineOffload(), memory=ByteBudget(memory_bytes), random=random.Random(seed)
    )
    cache = ShardCache(root, capacity_bytes, tools)

    async def open_store(_: str) -> ObjectStore:
        return store

    options = StagingOptions(3, DownloadOptions(part_bytes=PART_BYTES, concurrency=2, attempts=4))
    return StagingService(cache, open_store, sources=sources, options=options), cache


@asynccontextmanager
async def running(service: StagingService) -> AsyncIterator[None]:
    """The service runs during the block, and is ready when it begins."""
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(service.run(ready.set))
        await ready.wait()
        try:
            yield
        finally:
            task.cancel()


def announcement(
    dataset: str,
    manifest: DatasetManifest,
    *,
    position: int = 0,
    seed: int = 3,
    window: int = 2,
    reader: str = "r",
) -> AnnounceRequest:
    plan = OrderPlan(manifest.fingerprint, seed=seed, window=window)
    return AnnounceRequest(dataset, reader, encode_order(plan, BatchGeometry(1)), position)
