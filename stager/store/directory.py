"""A bucket in a POSIX directory: the embedded default, and the tier on a parallel file system.

An object is a file of its key's name, so that any tool reads it, and files that somebody else put there are objects. What
a file cannot hold (metadata, checksum) lies in a side file in a hidden folder, bound to the file's inode, time and size, so
that a side file never describes another file than its own. The order of every write is: stage, side file, rename;
a kill at any point leaves the old object or the new one, each with its own side file, and at worst a stray side file.

Writers of one key take turns by an advisory lock, so that `Replace` compares and writes in one step; `Create` is a hard
link, atomic without it. All of it runs in the disk lane; only reading goes through a descriptor of its own, which keeps
giving the bytes of the version that was opened.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from stager.disk import Disk
from stager.errors import (
    DeadlineExceeded,
    LockHeld,
    NotFound,
    StagerError,
    UsageError,
)
from stager.offload import Offload
from stager.store.api import (
    OVERWRITE,
    Buffer,
    ObjectInfo,
    ObjectVersion,
    PartTag,
    PutMode,
    Span,
    StoreProperties,
)
from stager.store.checks import (
    check_crc64nvme,
    check_metadata,
    check_part_number,
    other_version,
    span_beyond_end,
)
from stager.store.directory_list import list_folder, plan_folders
from stager.store.directory_objects import ObjectFolder, Side
from stager.store.directory_read import FileReader, open_file
from stager.store.directory_uploads import UploadFolder

P = ParamSpec("P")
R = TypeVar("R")

LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.02


class DirectoryStore:
    """An object store over the directory ``root``, which is made when something is written.

    Args:
        root: An absolute path.
        disk: How names are published and removed.
        offload: Where blocking calls run.
        chance: Makes names of staging files and uploads.
        durable: Whether a write returns only once it survives a power failure.
    """

    def __init__(
        self, root: str, *, disk: Disk, offload: Offload, chance: random.Random, durable: bool = True
    ) -> None:
        if not os.path.isabs(root):
            raise UsageError(f"`{root}` is not an absolute path", subject=root)
        self._root = os.path.normpath(root)
        self._offload = offload
        self._chance = chance
        self._objects = ObjectFolder(self._root, disk, durable=durable)
        self._uploads = UploadFolder(self._objects, disk)
        self._properties = StoreProperties(
            name=self._root, part_bytes_min=1, put_bytes_max=1 << 40, local=True
        )

    @property
    def properties(self) -> StoreProperties:
        return self._properties

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        self._objects.path(key)
        kept = check_metadata(key, metadata)
        if crc64nvme is not None:
            await self._offload.run("hash", check_crc64nvme, key, body, crc64nvme)
        staged = self._objects.staging_path(self._nonce())
        try:
            await self._run(self._objects.stage, staged, body, self._chance.randrange(1_000_000))
            side = Side(kept, crc64nvme)
            return await self._take_turns(self._objects.publish, key, staged, side, mode)
        finally:
            await self._run(self._objects.discard, staged)

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[FileReader]:
        descriptor, info = await self._run(self._open, key)
        try:
            if if_match is not None and info.version.etag != if_match.etag:
                raise other_version(key)
            if span is not None and span.stop > info.size:
                raise span_beyond_end(key, info.size, span.start, span.stop)
            yield FileReader(descriptor, info, span, self._offload)
        finally:
            os.close(descriptor)

    async def head(self, key: str) -> ObjectInfo:
        return await self._run(self._objects.describe, key)

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        folders = plan_folders(prefix)
        while folders:
            folder = folders.pop()
            if isinstance(folder, ObjectInfo):
                yield folder
                continue
            # In reverse, so that the next to look at stands last.
            folders.extend(
                reversed(await self._run(list_folder, self._root, folder, prefix=prefix, after=after))
            )

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        for key in keys:
            self._objects.path(key)
        failures: dict[str, StagerError] = {}
        for key in keys:
            try:
                await self._take_turns(self._objects.remove, key)
            except StagerError as error:
                failures[key] = error
        return failures

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        self._objects.path(target)
        descriptor, info = await self._run(self._open, source)
        staged = self._objects.staging_path(self._nonce())
        try:
            if if_match is not None and info.version.etag != if_match.etag:
                raise other_version(source)
            await self._run(
                self._objects.stage_copy, staged, [(descriptor, info.size)], self._chance.randrange(1_000_000)
            )
            side = Side(dict(info.metadata), info.crc64nvme)
            return await self._take_turns(self._objects.publish, target, staged, side, OVERWRITE)
        finally:
            os.close(descriptor)
            await self._run(self._objects.discard, staged)

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self._objects.path(key)
        upload_id = self._nonce()
        await self._run(self._uploads.begin, upload_id, key, check_metadata(key, metadata))
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        check_part_number(key, number)
        crc = await self._offload.run("hash", check_crc64nvme, key, body, crc64nvme)
        tag = PartTag(number, f"{crc:016x}-{len(body)}", len(body), crc)
        await self._run(self._uploads.put_part, upload_id, key, tag, body, self._nonce())
        return tag

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        return await self._run(self._uploads.list_parts, upload_id, key)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        if not parts:
            raise UsageError(f"`{key}`: an upload without parts cannot be completed", subject=key)
        staged = self._objects.staging_path(self._nonce())
        try:
            side = await self._run(
                self._uploads.assemble, upload_id, key, parts, staged, self._chance.randrange(1_000_000)
            )
            version = await self._take_turns(self._objects.publish, key, staged, side, mode)
            await self._run(self._uploads.forget, upload_id)
            return version
        finally:
            await self._run(self._objects.discard, staged)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        try:
            await self._run(self._uploads.check, upload_id, key)
        except NotFound:
            return
        await self._run(self._uploads.forget, upload_id)

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        for key, upload_id in await self._run(self._uploads.list_all):
            if key.startswith(prefix):
                yield key, upload_id

    async def aclose(self) -> None:
        pass

    def _open(self, key: str) -> tuple[int, ObjectInfo]:
        descriptor, status = open_file(self._objects.path(key), key, self._properties.name)
        try:
            return descriptor, self._objects.describe_status(key, status)
        except BaseException:
            os.close(descriptor)
            raise

    async def _take_turns(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that locks its key, again and again while another writer holds the lock."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOCK_TIMEOUT_S
        while True:
            try:
                return await self._run(function, *args, **kwargs)
            except LockHeld as error:
                if loop.time() > deadline:
                    raise DeadlineExceeded(
                        f"waited {LOCK_TIMEOUT_S:.0f} s for the writers of a key in {self._root}: {error.message}",
                        subject=self._root,
                        hint="another process hangs while it holds the lock; end it",
                    ) from error
            await asyncio.sleep(_LOCK_POLL_S * self._chance.random())

    async def _run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._offload.run("disk", function, *args, **kwargs)

    def _nonce(self) -> str:
        return f"{self._chance.getrandbits(128):032x}"
