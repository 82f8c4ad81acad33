"""Every implementation of the store protocol, as one parametrised fixture."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from s3_server import S3Endpoint
from stager.disk import LocalDisk
from stager.offload import ThreadOffload
from stager.store.api import ObjectStore
from stager.store.directory import DirectoryStore
from stager.store.memory import MemoryStore
from stager.store.prefixed import PrefixedStore
from stager.store.registry import StoreTools, open_store
from stager.store.s3 import open_s3
from stager.store.s3_settings import S3Settings
from tests.servers.choice import BUCKET, server_names

PROVIDERS = {"moto": "generic", "seaweedfs": "seaweedfs", "ceph": "ceph"}
_numbers = itertools.count()


def settings_of(endpoint: S3Endpoint, **changes: object) -> S3Settings:
    """How to reach a test server, by its provider's profile."""
    fields: dict[str, object] = {
        "provider": PROVIDERS[endpoint.name],
        "endpoint": endpoint.endpoint,
        "region": endpoint.region,
        "access_key": endpoint.access_key,
        "secret_key": endpoint.secret_key,
    }
    return S3Settings(**{**fields, **changes})  # type: ignore[arg-type]  # fields by name


@pytest.fixture(params=["memory", "directory", *server_names(), "stack-directory", "stack-seaweedfs"])
def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, start_server: Callable[[str], S3Endpoint]
) -> Callable[[], AsyncIterator[ObjectStore]]:
    """Opens the implementation whose turn it is, below a prefix of the test's own."""
    name = request.param

    async def open_it() -> AsyncIterator[ObjectStore]:
        if name == "memory":
            yield MemoryStore()
        elif name.startswith("stack-"):
            # As callers get it: retried, bounded, counted, below a prefix.
            offload = ThreadOffload(disk_threads=4, hash_threads=1)
            tools = StoreTools(LocalDisk(), offload, random.Random(1), durable=False)
            if name == "stack-directory":
                opened = await open_store(str(tmp_path / "stack"), S3Settings(), tools)
            else:
                url = f"s3://{BUCKET}/stack-{next(_numbers)}"
                opened = await open_store(url, settings_of(start_server("seaweedfs")), tools)
            yield opened
            await opened.aclose()
            offload.close()
        elif name == "directory":
            offload = ThreadOffload(disk_threads=4, hash_threads=1)
            disk = LocalDisk()
            yield DirectoryStore(
                str(tmp_path / "bucket"), disk=disk, offload=offload, chance=random.Random(1)
            )
            offload.close()
        else:
            store = await open_s3(BUCKET, settings_of(start_server(name)))
            yield PrefixedStore(store, f"test-{next(_numbers)}")
            await store.aclose()

    return open_it


@pytest.fixture
async def store(make_store: Callable[[], AsyncIterator[ObjectStore]]) -> AsyncIterator[ObjectStore]:
    """One implementation after the other."""
    async for opened in make_store():
        yield opened
