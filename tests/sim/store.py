"""A store that fails by plan or by seed: before the effect, after it (a lost answer), or in the middle of a body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from stager.errors import StagerError, Throttled, Unavailable
from stager.store.api import (
    OVERWRITE,
    Buffer,
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    ObjectVersion,
    PartTag,
    PutMode,
    Span,
    StoreProperties,
)
from tests.sim.world import World


class FaultyStore:
    """Decorates a store with a world's faults.

    Args:
        inner: What really holds the objects.
        world: Whose seed decides, and whose death ends every call.
        fault_ratio: How many of the calls fail, from 0 to 1.
        fail_call: Fail exactly this call (from 1), counted over all verbs; ``lost`` says whether after its effect.
    """

    def __init__(
        self,
        inner: ObjectStore,
        world: World,
        *,
        fault_ratio: float = 0.0,
        fail_call: int | None = None,
        lost: bool = False,
    ) -> None:
        self.inner = inner
        self.world = world
        self.fault_ratio = fault_ratio
        self.fail_call = fail_call
        self.lost = lost
        self.calls = 0
        self.counts: dict[str, int] = {}
        self.sent_bytes = 0

    @property
    def properties(self) -> StoreProperties:
        return self.inner.properties

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        lost = await self._before("put", key)
        self.sent_bytes += len(body)
        version = await self.inner.put(key, body, mode=mode, metadata=metadata, crc64nvme=crc64nvme)
        self._after("put", key, lost)
        return version

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[ObjectReader]:
        lost = await self._before("get", key)
        async with self.inner.get(key, span=span, if_match=if_match) as reader:
            yield _FaultyReader(reader, self.world, breaks=lost)

    async def head(self, key: str) -> ObjectInfo:
        lost = await self._before("head", key)
        info = await self.inner.head(key)
        self._after("head", key, lost)
        return info

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        lost = await self._before("list", prefix)
        async for info in self.inner.list_objects(prefix, after=after):
            yield info
        self._after("list", prefix, lost)

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        lost = await self._before("delete", ",".join(keys))
        outcome = await self.inner.delete(keys)
        self._after("delete", ",".join(keys), lost)
        return outcome

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        lost = await self._before("copy", target)
        version = await self.inner.copy(source, target, if_match=if_match)
        self._after("copy", target, lost)
        return version

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        lost = await self._before("begin_upload", key)
        upload_id = await self.inner.begin_upload(key, metadata=metadata)
        self._after("begin_upload", key, lost)
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        lost = await self._before("put_part", f"{key}#{number}")
        self.sent_bytes += len(body)
        tag = await self.inner.put_part(key, upload_id, number, body, crc64nvme=crc64nvme)
        self._after("put_part", f"{key}#{number}", lost)
        return tag

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        lost = await self._before("list_parts", key)
        parts = await self.inner.list_parts(key, upload_id)
        self._after("list_parts", key, lost)
        return parts

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        lost = await self._before("complete_upload", key)
        version = await self.inner.complete_upload(key, upload_id, parts, mode=mode)
        self._after("complete_upload", key, lost)
        return version

    async def abort_upload(self, key: str, upload_id: str) -> None:
        lost = await self._before("abort_upload", key)
        await self.inner.abort_upload(key, upload_id)
        self._after("abort_upload", key, lost)

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        lost = await self._before("list_uploads", prefix)
        async for found in self.inner.list_uploads(prefix):
            yield found
        self._after("list_uploads", prefix, lost)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _before(self, verb: str, subject: str) -> bool:
        """Fail before the effect, or say whether to fail after it."""
        self.world.step(f"{verb} {subject}")
        self.calls += 1
        self.counts[verb] = self.counts.get(verb, 0) + 1
        await asyncio.sleep(self.world.random.random() * 0.05)
        if self.world.dead:
            self.world.step(verb)
        fails = self.calls == self.fail_call or self.world.random.random() < self.fault_ratio
        if not fails:
            return False
        if self.fail_call is not None:
            if self.lost:
                return True
            raise Unavailable(f"{verb} `{subject}`: refused by the test", subject=subject)
        kind = self.world.random.randrange(3)
        if kind == 0:
            raise Unavailable(f"{verb} `{subject}`: connection reset", subject=subject)
        if kind == 1:
            raise Throttled(f"{verb} `{subject}`: slow down", subject=subject, retry_after_s=0.2)
        return True

    def _after(self, verb: str, subject: str, lost: bool) -> None:
        # The effect has happened; the process may die before it learns so, or the answer may be lost.
        self.world.step(f"{verb} answered {subject}")
        if lost:
            raise Unavailable(f"{verb} `{subject}`: the answer was lost", subject=subject)


class _FaultyReader:
    """Passes a body on; one that breaks gives half of its first piece, then fails."""

    def __init__(self, inner: ObjectReader, world: World, *, breaks: bool) -> None:
        self._inner = inner
        self._world = world
        self._breaks = breaks
        self._broken = False

    @property
    def info(self) -> ObjectInfo:
        return self._inner.info

    async def read(self, size: int) -> bytes:
        self._world.step(f"body {self.info.key}")
        if self._broken:
            raise Unavailable(f"`{self.info.key}`: the body broke off", subject=self.info.key)
        piece = await self._inner.read(size)
        if not self._breaks or len(piece) <= 1:
            return piece
        self._broken = True
        return piece[: len(piece) // 2]
