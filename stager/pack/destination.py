"""Where a dataset is packed to: a local directory, or a prefix of a bucket.

Besides shards and manifest a destination holds, until the pack is complete, what a killed pack goes on from: `plan.json`
and one record for each finished shard, below ``.stager/pack/``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from stager.disk import Disk
from stager.errors import NotFound
from stager.formats.manifest import DATASET_MANIFEST_BYTES_MAX
from stager.formats.names import STAGER_FOLDER, check_relative_path, join_key
from stager.offload import Offload
from stager.pack.plan import ShardPlan
from stager.pack.sinks import FileSink, ObjectSink, Sink
from stager.store.api import ObjectStore, read_all

PACK_FOLDER = join_key(STAGER_FOLDER, "pack")
PLAN_KEY = join_key(PACK_FOLDER, "plan.json")
RECORDS_FOLDER = join_key(PACK_FOLDER, "shards")


class Destination(Protocol):
    """Where shards go. Keys are relative to the dataset."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    async def read(self, key: str) -> bytes | None:
        """A small object whole, or None if there is none."""
        ...

    async def write(self, key: str, body: bytes) -> None:
        """Replace a small object, durably."""
        ...

    async def size(self, key: str) -> int | None:
        """Bytes of an object, or None if there is none."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are fine."""
        ...

    async def first_key(self) -> str | None:
        """Something that lies here and is not the packer's own state, or None."""
        ...

    async def recorded(self) -> set[str]:
        """Names of the shards that have a record."""
        ...

    def sink(self, plan: ShardPlan) -> Sink:
        """What takes the bytes of one shard."""
        ...

    def held(self, holder: str) -> AbstractAsyncContextManager[None]:
        """Keep other packers out, where that can be done; LockHeld names the one that is in."""
        ...

    async def clear_leftovers(self) -> None:
        """Remove what a killed pack left half-written."""
        ...

    async def forget_progress(self) -> None:
        """Remove plan and records."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


def record_key(shard: str) -> str:
    """Where the record of a finished shard lies."""
    return join_key(RECORDS_FOLDER, f"{shard}.json")


class LocalDestination:
    """A directory of this machine; its shards are written in place of a store's detour over parts."""

    def __init__(self, root: str, *, disk: Disk, offload: Offload) -> None:
        self.name = root
        self._root = root
        self._disk = disk
        self._offload = offload

    async def read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            size = (await self._offload.run("disk", self._disk.stat, path)).size
            return await self._offload.run("disk", self._disk.read_at, path, 0, size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def write(self, key: str, body: bytes) -> None:
        path = self._path(key)
        await self._offload.run("disk", self._disk.make_directory, os.path.dirname(path))
        await self._offload.run("disk", self._disk.write_file, path, body)

    async def size(self, key: str) -> int | None:
        try:
            return (await self._offload.run("disk", self._disk.stat, self._path(key))).size
        except FileNotFoundError:
            return None

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._offload.run("disk", self._disk.remove, self._path(key))

    async def first_key(self) -> str | None:
        return next((name for name in await self._names("") if not name.startswith(".")), None)

    async def recorded(self) -> set[str]:
        return {
            name.removesuffix(".json") for name in await self._names(RECORDS_FOLDER) if name.endswith(".json")
        }

    def sink(self, plan: ShardPlan) -> Sink:
        folder = self._path(join_key(PACK_FOLDER, "staging"))
        # Named by the process as well: what an orphan of a killed pack still writes is not ours.
        staged = os.path.join(folder, f"{plan.name}.{os.getpid()}")
        return FileSink(staged, self._path(plan.name), disk=self._disk, offload=self._offload)

    @asynccontextmanager
    async def held(self, holder: str) -> AsyncIterator[None]:
        folder = self._path(PACK_FOLDER)
        await self._offload.run("disk", self._disk.make_directory, folder)
        lock = self._disk.lock(os.path.join(folder, "lock"), holder)
        await self._offload.run("disk", lock.__enter__)
        try:
            yield
        finally:
            lock.__exit__(None, None, None)

    async def clear_leftovers(self) -> None:
        await self._offload.run("disk", self._disk.remove_tree, self._path(join_key(PACK_FOLDER, "staging")))

    async def forget_progress(self) -> None:
        await self._offload.run("disk", self._disk.remove_tree, self._path(RECORDS_FOLDER))
        await self._offload.run("disk", self._disk.remove, self._path(PLAN_KEY))
        only_ours = await self._names(STAGER_FOLDER) == ["pack"]
        folder = STAGER_FOLDER if only_ours else PACK_FOLDER
        await self._offload.run("disk", self._disk.remove_tree, self._path(folder))

    async def aclose(self) -> None:
        pass

    async def _names(self, folder: str) -> list[str]:
        try:
            return await self._offload.run("disk", self._disk.list_names, self._path(folder))
        except FileNotFoundError:
            return []

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_relative_path(key)) if key else self._root


class BucketDestination:
    """A store, whose keys are relative to the dataset already."""

    def __init__(self, store: ObjectStore, *, offload: Offload) -> None:
        self.name = store.properties.name
        self._store = store
        self._offload = offload

    async def read(self, key: str) -> bytes | None:
        try:
            return (await read_all(self._store, key, bytes_max=DATASET_MANIFEST_BYTES_MAX))[0]
        except NotFound:
            return None

    async def write(self, key: str, body: bytes) -> None:
        await self._store.put(key, body)

    async def size(self, key: str) -> int | None:
        try:
            return (await self._store.head(key)).size
        except NotFound:
            return None

    async def delete(self, keys: Sequence[str]) -> None:
        failures = await self._store.delete(keys) if keys else {}
        for error in failures.values():
            raise error

    async def first_key(self) -> str | None:
        async for info in self._store.list_objects():
            if not info.key.startswith(STAGER_FOLDER + "/"):
                return info.key
        return None

    async def recorded(self) -> set[str]:
        start = RECORDS_FOLDER + "/"
        return {
            info.key.removeprefix(start).removesuffix(".json")
            async for info in self._store.list_objects(start)
        }

    def sink(self, plan: ShardPlan) -> Sink:
        return ObjectSink(plan.name, plan.size, plan.fingerprint, store=self._store, offload=self._offload)

    @asynccontextmanager
    async def held(self, holder: str) -> AsyncIterator[None]:
        # A bucket has no lock that a killed process lets go of. Two packers of one plan write the same bytes, and
        # a packer of another plan is refused by `plan.json` or the manifest.
        yield

    async def clear_leftovers(self) -> None:
        stale = [(key, upload) async for key, upload in self._store.list_uploads() if key.endswith(".tar")]
        for key, upload in stale:
            await self._store.abort_upload(key, upload)

    async def forget_progress(self) -> None:
        keys = [info.key async for info in self._store.list_objects(RECORDS_FOLDER + "/")]
        for start in range(0, len(keys), 1000):
            await self.delete(keys[start : start + 1000])
        await self.delete([PLAN_KEY])

    async def aclose(self) -> None:
        await self._store.aclose()
