"""Retries, as a decorator of a store: bounded in number, in time and by a budget that all calls share.

Only errors marked ``retryable`` are tried again. After `Unavailable` a write may have taken effect although its answer
was lost; a conditional write that is then refused is read back before the refusal is believed. A body that breaks off is
opened again where it broke, pinned to its version.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from stager.backoff import backoff_s
from stager.errors import (
    AlreadyExists,
    Exhausted,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StagerError,
    Throttled,
)
from stager.logs import event
from stager.store.api import (
    OVERWRITE,
    Buffer,
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    ObjectVersion,
    Overwrite,
    PartTag,
    PutMode,
    Span,
    StoreProperties,
)

R = TypeVar("R")
WRITE_ID = "stager-write-id"
_logger = logging.getLogger("stager.store")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to give up.

    Attributes:
        attempts_max: Tries of one call; of a body or a listing, tries without progress.
        total_s_max: No try begins later than this after the first.
        retries_banked_max: Retries that a store may make before successes refill the budget, so that an outage
            is not answered with a storm. A success brings back a tenth of a retry.
    """

    attempts_max: int = 6
    total_s_max: float = 180.0
    retries_banked_max: float = 200.0


class RetryingStore:
    """``inner``, with failed calls tried again."""

    def __init__(
        self, inner: ObjectStore, *, chance: random.Random, policy: RetryPolicy | None = None
    ) -> None:
        self._inner = inner
        self._chance = chance
        self._policy = policy or RetryPolicy()
        self._banked = self._policy.retries_banked_max

    @property
    def properties(self) -> StoreProperties:
        return self._inner.properties

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        """See `ObjectStore`. A conditional write carries its own id in the metadata, by which it knows itself again."""
        if isinstance(mode, Overwrite):
            return await self._call(
                "put", key, lambda: self._inner.put(key, body, metadata=metadata, crc64nvme=crc64nvme)
            )
        write_id = f"{self._chance.getrandbits(128):032x}"
        marked = {**(metadata or {}), WRITE_ID: write_id}

        async def settle(error: StagerError) -> ObjectVersion | None:
            if not isinstance(error, AlreadyExists | PreconditionFailed | Exhausted):
                return None
            info = await self._look(key, error)
            return info.version if info is not None and info.metadata.get(WRITE_ID) == write_id else None

        return await self._call(
            "put",
            key,
            lambda: self._inner.put(key, body, mode=mode, metadata=marked, crc64nvme=crc64nvme),
            settle,
        )

    def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AbstractAsyncContextManager[ObjectReader]:
        return self._get(key, span, if_match)

    async def head(self, key: str) -> ObjectInfo:
        return await self._call("head", key, lambda: self._inner.head(key))

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        attempts = _Attempts(self, "list", prefix)
        while True:
            try:
                async for info in self._inner.list_objects(prefix, after=after):
                    after = info.key
                    attempts.progressed()
                    yield info
                return
            except StagerError as error:
                await attempts.failed(error)

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        left = list(keys)
        failures: dict[str, StagerError] = {}

        async def once() -> None:
            nonlocal left, failures
            outcome = await self._inner.delete(left)
            failures = {key: error for key, error in failures.items() if key not in left} | dict(outcome)
            left = [key for key, error in outcome.items() if error.retryable]
            if left:
                raise outcome[left[0]]

        try:
            await self._call("delete", keys[0] if keys else "", once)
        except Exhausted:
            if not failures:
                raise
        return failures

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        return await self._call("copy", target, lambda: self._inner.copy(source, target, if_match=if_match))

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """See `ObjectStore`. A lost answer leaves an upload that nobody continues; `list_uploads` finds it."""
        return await self._call("begin upload", key, lambda: self._inner.begin_upload(key, metadata=metadata))

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        return await self._call(
            "put part", key, lambda: self._inner.put_part(key, upload_id, number, body, crc64nvme=crc64nvme)
        )

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        return await self._call("list parts", key, lambda: self._inner.list_parts(key, upload_id))

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        """See `ObjectStore`. Refused after a lost answer, it asks whether the upload is gone because it was completed."""

        async def settle(error: StagerError) -> ObjectVersion | None:
            if not isinstance(
                error, NotFound | AlreadyExists | PreconditionFailed | IntegrityError | Exhausted
            ):
                return None
            try:
                lister = self._inner if isinstance(error, Exhausted) else self
                await lister.list_parts(key, upload_id)
                return None  # it is still there, so no attempt completed it
            except NotFound:
                info = await self._look(key, error)
            whole = sum(part.size for part in parts)
            return info.version if info is not None and info.size == whole else None

        return await self._call(
            "complete upload",
            key,
            lambda: self._inner.complete_upload(key, upload_id, parts, mode=mode),
            settle,
        )

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._call("abort upload", key, lambda: self._inner.abort_upload(key, upload_id))

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        attempts = _Attempts(self, "list uploads", prefix)
        seen: set[tuple[str, str]] = set()
        while True:
            try:
                async for found in self._inner.list_uploads(prefix):
                    if found not in seen:
                        seen.add(found)
                        attempts.progressed()
                        yield found
                return
            except StagerError as error:
                await attempts.failed(error)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _call(
        self,
        doing: str,
        subject: str,
        once: Callable[[], Awaitable[R]],
        settle: Callable[[StagerError], Awaitable[R | None]] | None = None,
    ) -> R:
        """Try until it works.

        Args:
            settle: What an earlier try may have done although it failed, asked when a later one is refused.
        """
        attempts = _Attempts(self, doing, subject)
        while True:
            try:
                result = await once()
                attempts.progressed()
                return result
            except StagerError as error:
                refusal: StagerError | None = None
                try:
                    await attempts.failed(error)
                except StagerError as last:
                    refusal = last
            if refusal is not None:
                settled = None
                if settle is not None and attempts.in_doubt:
                    try:
                        settled = await settle(refusal)
                    except StagerError as unsettled:
                        # Whether it was done is unknown, and that must not pass for a refusal.
                        raise (refusal if isinstance(refusal, Exhausted) else unsettled) from refusal
                if settled is None:
                    raise refusal
                event(_logger, logging.INFO, "store.lost_answer_settled", doing=doing, key=subject)
                return settled

    async def _look(self, key: str, error: StagerError) -> ObjectInfo | None:
        """What is there after ``error``; asked once only if the store has been tried often enough."""
        try:
            return await (self._inner.head(key) if isinstance(error, Exhausted) else self.head(key))
        except NotFound:
            return None

    @asynccontextmanager
    async def _get(
        self, key: str, span: Span | None, if_match: ObjectVersion | None
    ) -> AsyncIterator[ObjectReader]:
        async with AsyncExitStack() as opened:

            async def open_at(part: Span | None, version: ObjectVersion | None) -> ObjectReader:
                await opened.aclose()
                return await opened.enter_async_context(self._inner.get(key, span=part, if_match=version))

            first = await self._call("get", key, lambda: open_at(span, if_match))
            yield _ResumingReader(first, span, open_at, _Attempts(self, "read", key))


class _Attempts:
    """The tries of one call: how many, since when, and whether one of them may have taken effect."""

    def __init__(self, store: RetryingStore, doing: str, subject: str) -> None:
        self._store = store
        self._doing = doing
        self._subject = subject
        self._made = 0
        self._since = asyncio.get_running_loop().time()
        self.in_doubt = False

    def progressed(self) -> None:
        """A try brought something."""
        policy = self._store._policy
        self._store._banked = min(self._store._banked + 0.1, policy.retries_banked_max)
        self._made = 0
        self._since = asyncio.get_running_loop().time()

    async def failed(self, error: StagerError) -> None:
        """Wait before the next try, or raise: the error itself if another try is useless, else `Exhausted`."""
        if not error.retryable:
            raise error
        self._made += 1
        # Whoever is throttled knows that nothing happened.
        self.in_doubt = self.in_doubt or not isinstance(error, Throttled)
        policy, store = self._store._policy, self._store
        wait_s = backoff_s(self._made, store._chance, error)
        elapsed_s = asyncio.get_running_loop().time() - self._since
        if (
            self._made >= policy.attempts_max
            or elapsed_s + wait_s > policy.total_s_max
            or store._banked < 1.0
        ):
            raise Exhausted(
                f"gave up to {self._doing} `{self._subject}` in {store.properties.name} after"
                f" {self._made} tries in {elapsed_s:.1f} s: {error.message}",
                subject=self._subject,
                hint=error.hint or "the store is not to be reached or overloaded; see the message above",
            ) from error
        store._banked -= 1.0
        event(
            _logger,
            logging.WARNING if self._made == 1 else logging.DEBUG,
            "store.retried",
            doing=self._doing,
            key=self._subject,
            attempt=self._made,
            wait_s=wait_s,
            reason=error.message,
        )
        await asyncio.sleep(wait_s)


class _ResumingReader:
    """A body that is opened again at the byte where it broke off."""

    def __init__(
        self,
        first: ObjectReader,
        span: Span | None,
        open_at: Callable[[Span | None, ObjectVersion | None], Awaitable[ObjectReader]],
        attempts: _Attempts,
    ) -> None:
        self._current: ObjectReader | None = first
        self._info = first.info
        self._position = span.start if span else 0
        self._stop = span.stop if span else first.info.size
        self._open_at = open_at
        self._attempts = attempts

    @property
    def info(self) -> ObjectInfo:
        return self._info

    async def read(self, size: int) -> bytes:
        """See `ObjectReader`."""
        while True:
            if self._position == self._stop:
                return b""
            try:
                if self._current is None:
                    self._current = await self._open_at(Span(self._position, self._stop), self._info.version)
                piece = await self._current.read(size)
            except StagerError as error:
                self._current = None
                await self._attempts.failed(error)
                continue
            self._position += len(piece)
            if piece:
                self._attempts.progressed()
            return piece
