"""Listings of an S3 bucket, page by page; every page is checked to be S3's and to move on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from stager.errors import FormatError, IntegrityError, NotSupported, StagerError
from stager.formats.names import check_key
from stager.logs import event
from stager.store.api import ObjectInfo, ObjectVersion, PartTag
from stager.store.s3_body import checksum_of, not_an_object

_logger = logging.getLogger("stager.store")


class Caller(Protocol):
    """What the helpers of `S3Store` need of it."""

    async def call(
        self, operation: str, subject: str, *, size: int = 0, timeout_s: float = 0.0, **parameters: Any
    ) -> dict[str, Any]: ...


SORTED_KEYS_MAX = 5_000_000


async def objects_in_order(store: Caller, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Objects below ``prefix`` after ``after``, from a server that lists them in order."""
    last = after
    async for info in _object_pages(store, prefix, after):
        if info.key.encode() <= last.encode() and last:
            raise _stuck(prefix)
        last = info.key
        if _is_usable(info.key, info.size):
            yield info


async def objects_sorted_here(store: Caller, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """The same from a server with an order of its own: the whole listing is held, at most `SORTED_KEYS_MAX` of it."""
    found: dict[bytes, ObjectInfo] = {}
    async for info in _object_pages(store, prefix, ""):
        if info.key.encode() > after.encode() and _is_usable(info.key, info.size):
            found[info.key.encode()] = info
        if len(found) > SORTED_KEYS_MAX:
            raise NotSupported(
                f"`{prefix}` holds more than {SORTED_KEYS_MAX} objects",
                subject=prefix,
                hint="set store.provider to one whose listings are known to be in order, or list a longer prefix",
            )
    for key in sorted(found):
        yield found[key]


async def _object_pages(store: Caller, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """ListObjectsV2, page by page, in the server's order."""
    parameters: dict[str, Any] = {"Prefix": prefix}
    if after:
        parameters["StartAfter"] = after
    while True:
        page = await store.call("list_objects_v2", prefix, **parameters)
        if "IsTruncated" not in page and "Contents" not in page and "KeyCount" not in page:
            raise not_an_object(prefix, "the store")
        for entry in page.get("Contents", []):
            version = ObjectVersion(str(entry["ETag"]).strip('"'))
            yield ObjectInfo(str(entry["Key"]), int(entry["Size"]), version)
        token = page.get("NextContinuationToken")
        if not page.get("IsTruncated"):
            return
        if not token or token == parameters.get("ContinuationToken"):
            raise _stuck(prefix)
        parameters["ContinuationToken"] = token


async def parts_of(store: Caller, key: str, upload_id: str) -> list[PartTag]:
    """The parts of an upload by number, by ListParts."""
    parameters: dict[str, Any] = {"Key": key, "UploadId": upload_id}
    found: dict[int, tuple[str, PartTag]] = {}
    while True:
        page = await store.call("list_parts", key, **parameters)
        if "UploadId" not in page and "Parts" not in page:
            raise not_an_object(key, "the store")
        for part in page.get("Parts", []):
            number, written = int(part["PartNumber"]), str(part.get("LastModified", ""))
            # SeaweedFS also lists a part that was replaced; the later one counts.
            if number not in found or found[number][0] <= written:
                tag = PartTag(number, str(part["ETag"]).strip('"'), int(part["Size"]), checksum_of(part))
                found[number] = (written, tag)
        marker = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated"):
            return [found[number][1] for number in sorted(found)]
        if marker is None or marker <= parameters.get("PartNumberMarker", 0):
            raise _stuck(key)
        parameters["PartNumberMarker"] = marker


async def upload_pages(store: Caller, prefix: str) -> AsyncIterator[tuple[str, str]]:
    """Unfinished uploads below ``prefix``, by ListMultipartUploads."""
    parameters: dict[str, Any] = {"Prefix": prefix}
    while True:
        page = await store.call("list_multipart_uploads", prefix, **parameters)
        if not {"Bucket", "IsTruncated", "Uploads"} & page.keys():
            raise not_an_object(prefix, "the store")
        for upload in page.get("Uploads", []):
            if str(upload["Key"]).startswith(prefix):
                yield str(upload["Key"]), str(upload["UploadId"])
        if not page.get("IsTruncated"):
            return
        markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
        if not markers["KeyMarker"] or markers.items() <= parameters.items():
            raise _stuck(prefix)
        parameters |= {name: value for name, value in markers.items() if value}


def _is_usable(key: str, size: int) -> bool:
    """Whether stager can name this key. Others belong to somebody else: folder markers of consoles, odd names."""
    if key.endswith("/") and size == 0:
        return False
    try:
        check_key(key)
    except FormatError as error:
        event(_logger, logging.WARNING, "store.key_left_out", key=key[:120], reason=error.message)
        return False
    return True


def _stuck(subject: str) -> StagerError:
    return IntegrityError(
        f"the listing of `{subject}` repeats itself or is out of order",
        subject=subject,
        hint="the server's listing is broken; a manifest, where there is one, needs no listing",
    )
