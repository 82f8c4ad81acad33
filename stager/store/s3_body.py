"""The body of a GET: counted, checked against what was asked for, and cut off hard when it is left early."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from stager.errors import FormatError, IntegrityError, StagerError, Unavailable
from stager.formats.digests import decode_crc64nvme
from stager.store.api import ObjectInfo, Span
from stager.store.s3_errors import translate

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


class S3Reader:
    """An open body of ``expected`` bytes."""

    def __init__(self, body: Any, info: ObjectInfo, expected: int, *, store: str) -> None:
        self._body = body
        self._info = info
        self._left = expected
        self._expected = expected
        self._store = store

    @property
    def info(self) -> ObjectInfo:
        return self._info

    async def read(self, size: int) -> bytes:
        """See `ObjectReader`. The wait for the next bytes is bounded by the client's read timeout."""
        try:
            piece: bytes = await self._body.read(size)
        except Exception as error:
            raise self._broken(error) from error
        self._left -= len(piece)
        if self._left < 0:
            raise IntegrityError(
                f"`{self._info.key}`: {self._store} sent more than the {self._expected} bytes it announced",
                subject=self._info.key,
            )
        if not piece and size > 0 and self._left:
            raise self._early_end()
        return piece

    def close(self) -> None:
        """Give the connection back if the body was read whole; otherwise end it at once."""
        raw = self._body.raw_stream
        if (
            self._left
            and isinstance(raw, aiohttp.ClientResponse)
            and raw.connection
            and raw.connection.transport
        ):
            # uvloop lets a cancelled TLS download flow on for half a minute; an abort ends it now.
            raw.connection.transport.abort()
        self._body.close()

    def _broken(self, error: Exception) -> StagerError:
        failure = translate(error, doing="read", subject=self._info.key, store=self._store)
        # What was announced and did not come is a broken answer, whatever the library calls it.
        return failure if failure.retryable else self._early_end()

    def _early_end(self) -> Unavailable:
        return Unavailable(
            f"`{self._info.key}`: the answer of {self._store} ended {self._left} bytes early",
            subject=self._info.key,
        )


def announced_sizes(response: dict[str, Any], key: str, span: Span | None, store: str) -> tuple[int, int]:
    """What a GET's answer announces: bytes of the whole object, bytes of this body.

    Raises:
        IntegrityError: The answer is not the span that was asked for.
        Unavailable: The answer is not an object at all.
    """
    length = response.get("ContentLength")
    if not isinstance(length, int) or not response.get("ETag"):
        raise not_an_object(key, store)
    if span is None:
        return length, length
    declared = response.get("ContentRange")
    if declared is None:
        # Some servers answer a range that covers everything, or any range, with the whole object.
        if length == span.size and span.start == 0:
            return length, length
        raise IntegrityError(
            f"`{key}`: {store} ignored the range {span.start} to {span.stop} and sent {length} bytes",
            subject=key,
        )
    match = _CONTENT_RANGE.fullmatch(declared)
    first, last, whole = (int(group) for group in match.groups()) if match else (-1, -1, -1)
    if (first, last + 1) != (span.start, span.stop) or length != span.size or whole < span.stop:
        raise IntegrityError(
            f"`{key}`: {span.start} to {span.stop} were asked for, {store} sent `{declared[:60]}` with {length} bytes",
            subject=key,
            hint="the object is shorter than expected, or a proxy rewrites ranges",
        )
    return whole, length


def not_an_object(key: str, store: str) -> Unavailable:
    """An answer with status 200 that no S3 server gives."""
    return Unavailable(
        f"`{key}`: the answer of {store} is not S3's",
        subject=key,
        hint="something else answers at store.endpoint: a proxy, a console or a web site",
    )


def checksum_of(response: Mapping[str, Any]) -> int | None:
    """The CRC-64/NVME of the whole that an answer carries, if it does."""
    text = response.get("ChecksumCRC64NVME")
    if not isinstance(text, str) or "-" in text:  # "-N" marks a checksum of checksums
        return None
    try:
        return decode_crc64nvme(text)
    except FormatError:
        return None
