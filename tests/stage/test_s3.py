"""Staging from a real S3 server, through the store as the daemon gets it: retried, bounded, counted."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from s3_server import S3Endpoint
from stager.budget import ByteBudget
from stager.cache.shards import ShardCache
from stager.disk import LocalDisk
from stager.errors import IntegrityError
from stager.formats.wire import OpenRequest, WantRequest
from stager.offload import ThreadOffload
from stager.prefetch.service import StagingOptions, StagingService
from stager.store.api import ObjectStore
from stager.store.registry import StoreTools, open_store
from stager.store.s3_client import S3Settings
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools
from tests.servers.choice import BUCKET
from tests.stage.kit import make_dataset
from tests.stage.material import running

PART_BYTES = 1 << 20
_numbers = itertools.count()


class Rig:
    """A prefix in the server's bucket, and a node that stages from it."""

    def __init__(self, endpoint: S3Endpoint, cache: Path) -> None:
        self.url = f"s3://{BUCKET}/stage-{os.getpid()}-{next(_numbers)}"
        self.cache = cache
        self.disk, self.offload = LocalDisk(), ThreadOffload(disk_threads=4, hash_threads=1)
        self.store_tools = StoreTools(self.disk, self.offload, random.Random(1))
        self.settings = S3Settings(
            provider="generic" if endpoint.name == "moto" else endpoint.name,
            endpoint=endpoint.endpoint,
            region=endpoint.region,
            access_key=endpoint.access_key,
            secret_key=endpoint.secret_key,
        )
        self.stores: list[ObjectStore] = []

    async def open_store(self, url: str) -> ObjectStore:
        self.stores.append(await open_store(url, self.settings, self.store_tools))
        return self.stores[-1]

    def service(self) -> StagingService:
        tools = Tools(self.disk, self.offload, ByteBudget(64 << 20), random=random.Random(1))
        options = StagingOptions(2, DownloadOptions(PART_BYTES, concurrency=3))
        cache = ShardCache(str(self.cache), 1 << 30, tools)
        return StagingService(cache, self.open_store, sources=[self.url], options=options)

    async def aclose(self) -> None:
        for store in self.stores:
            await store.aclose()
        self.offload.close()


@pytest.fixture
async def rig(s3_server: S3Endpoint, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(s3_server, tmp_path / "cache")
    yield made
    await made.aclose()


async def test_a_dataset_is_staged_with_one_get_a_part(rig: Rig) -> None:
    """Right bytes, one GET for the manifest and one a part, no LIST and no HEAD but for opening again."""
    dataset = make_dataset(1, [3_500_000, 2_000_000, 10])
    await dataset.put_into(await rig.open_store(rig.url))
    rig.store_tools.meter.requests.clear()
    service = rig.service()
    async with running(service), asyncio.timeout(60):
        identity = (await service.open(OpenRequest(rig.url, 30.0))).dataset
        for name, body in dataset.bodies.items():
            path = (await service.want(WantRequest(identity, name, 30.0))).path
            assert Path(path).read_bytes() == body
    assert dict(rig.store_tools.meter.requests) == {"get": 1 + 4 + 2 + 1, "head": 1}


async def test_a_spoilt_shard_is_named_and_never_visible(rig: Rig) -> None:
    """Truncated, longer and altered objects end in an error that names them; the others are served."""
    dataset = make_dataset(2, [2_500_000] * 4)
    store = await rig.open_store(rig.url)
    await dataset.put_into(store)
    shorter, longer, altered, sound = dataset.names
    await store.put(shorter, dataset.bodies[shorter][:-1])
    await store.put(longer, dataset.bodies[longer] + b"x")
    await store.put(altered, b"?" + dataset.bodies[altered][1:])
    service = rig.service()
    async with running(service), asyncio.timeout(60):
        identity = (await service.open(OpenRequest(rig.url, 30.0))).dataset
        for name in (shorter, longer, altered):
            with pytest.raises(IntegrityError, match=name):
                await service.want(WantRequest(identity, name, 30.0))
        await service.want(WantRequest(identity, sound, 30.0))
        # A retry of a spoilt one may be under way; between two of them nothing is left.
        while list(rig.cache.glob("staging/*")):
            await asyncio.sleep(0.01)
    assert [path.name for path in rig.cache.glob("shards/*/*")] == [sound]
