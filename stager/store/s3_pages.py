"""Listings of an S3 bucket, page by page; every page is checked to be S3's and to move on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from stager.errors import FormatError, IntegrityError, StagerError
from stager.formats.names import check_key
from stager.logs import event
from stager.store.api import ObjectInfo, ObjectVersion
from stager.store.s3_body import not_an_object

_logger = logging.getLogger("stager.store")


class Caller(Protocol):
    """What the helpers of `S3Store` need of it."""

    async def call(
        self, operation: str, subject: str, *, size: int = 0, timeout_s: float = 0.0, **parameters: Any
    ) -> dict[str, Any]: ...


async def object_pages(store: Caller, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
    """Objects below ``prefix`` after ``after``, by ListObjectsV2."""
    parameters: dict[str, Any] = {"Prefix": prefix}
    if after:
        parameters["StartAfter"] = after
    last = after.encode()
    while True:
        page = await store.call("list_objects_v2", prefix, **parameters)
        if "IsTruncated" not in page and "Contents" not in page and "KeyCount" not in page:
            raise not_an_object(prefix, "the store")
        for entry in page.get("Contents", []):
            key = str(entry["Key"])
            if key.encode() <= last and last:
                raise _stuck(prefix)
            last = key.encode()
            if _is_usable(key, int(entry["Size"])):
                yield ObjectInfo(key, int(entry["Size"]), ObjectVersion(str(entry["ETag"]).strip('"')))
        token = page.get("NextContinuationToken")
        if not page.get("IsTruncated"):
            return
        if not token or token == parameters.get("ContinuationToken"):
            raise _stuck(prefix)
        parameters["ContinuationToken"] = token


async def part_pages(store: Caller, key: str, upload_id: str) -> AsyncIterator[dict[str, Any]]:
    """The parts of an upload, by ListParts."""
    parameters: dict[str, Any] = {"Key": key, "UploadId": upload_id}
    while True:
        page = await store.call("list_parts", key, **parameters)
        if "UploadId" not in page and "Parts" not in page:
            raise not_an_object(key, "the store")
        for part in page.get("Parts", []):
            yield part
        marker = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated"):
            return
        if marker is None or marker <= parameters.get("PartNumberMarker", 0):
            raise _stuck(key)
        parameters["PartNumberMarker"] = marker


async def upload_pages(store: Caller, prefix: str) -> AsyncIterator[tuple[str, str]]:
    """Unfinished uploads below ``prefix``, by ListMultipartUploads."""
    parameters: dict[str, Any] = {"Prefix": prefix}
    while True:
        page = await store.call("list_multipart_uploads", prefix, **parameters)
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
