"""Copies that the server makes: at once, or in parts where the object is too large for that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stager.errors import PreconditionFailed
from stager.store.api import ObjectInfo, ObjectVersion, PartTag
from stager.store.checks import other_version
from stager.store.s3_body import not_an_object
from stager.store.s3_pages import Caller

PARTS_MAX = 10_000
PARTS_AT_ONCE = 8


class Copier(Caller, Protocol):
    """What a copy needs of `S3Store`."""

    async def head(self, key: str) -> ObjectInfo: ...

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str: ...

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[PartTag]) -> ObjectVersion: ...

    async def abort_upload(self, key: str, upload_id: str) -> None: ...


async def copy_object(
    store: Copier,
    bucket: str,
    source: ObjectInfo,
    target: str,
    *,
    placing: Mapping[str, Any],
    bytes_max: int,
    timeout_s: float,
) -> ObjectVersion:
    """Copy ``source``, as it was described, to ``target``.

    Args:
        placing: Encryption and class of the target; a copy takes neither from its source.
        bytes_max: What one request may copy; larger objects go in parts of at most this size.
        timeout_s: For each request; the server moves the bytes before it answers.
    """
    pinned: dict[str, Any] = {
        "CopySource": {"Bucket": bucket, "Key": source.key},
        "CopySourceIfMatch": source.version.etag,
    }
    try:
        if source.size > bytes_max:
            return await _copy_in_parts(store, source, target, pinned, bytes_max, timeout_s)
        response = await store.call(
            "copy_object", target, timeout_s=timeout_s, Key=target, **placing, **pinned
        )
    except PreconditionFailed as error:
        raise other_version(source.key) from error
    etag = str(response.get("CopyObjectResult", {}).get("ETag") or "").strip('"')
    if not etag:
        raise not_an_object(target, "the store")
    return ObjectVersion(etag, response.get("VersionId"))


async def _copy_in_parts(
    store: Copier, source: ObjectInfo, target: str, pinned: dict[str, Any], bytes_max: int, timeout_s: float
) -> ObjectVersion:
    part_bytes = max(min(bytes_max, 1 << 30), -(-source.size // PARTS_MAX))
    upload_id = await store.begin_upload(target, metadata=source.metadata)
    width = asyncio.Semaphore(PARTS_AT_ONCE)

    async def copy_part(number: int, start: int) -> PartTag | PreconditionFailed:
        stop = min(start + part_bytes, source.size)
        try:
            async with width:
                response = await store.call(
                    "upload_part_copy",
                    target,
                    timeout_s=timeout_s,
                    Key=target,
                    UploadId=upload_id,
                    PartNumber=number,
                    CopySourceRange=f"bytes={start}-{stop - 1}",
                    **pinned,
                )
        except PreconditionFailed as error:
            return error
        return PartTag(number, str(response["CopyPartResult"]["ETag"]).strip('"'), stop - start)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(copy_part(number, start))
                for number, start in enumerate(range(0, source.size, part_bytes), 1)
            ]
        outcomes = [task.result() for task in tasks]
        for outcome in outcomes:
            if isinstance(outcome, PreconditionFailed):
                raise outcome
        return await store.complete_upload(
            target, upload_id, [outcome for outcome in outcomes if isinstance(outcome, PartTag)]
        )
    except BaseException as error:
        await store.abort_upload(target, upload_id)
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from error
        raise
