"""An S3 bucket, through aiobotocore.

Every wait is bounded: connecting, the next bytes of an answer, and each call as a whole. Failures are translated and not
retried here. Bodies travel with their CRC-64/NVME as a header where the provider checks it, never as a trailer, which
many compatible servers store inside the object.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from stager.checksum import combine_all
from stager.checksum import crc64nvme as compute_crc64nvme
from stager.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StagerError,
    Unavailable,
    UsageError,
)
from stager.formats.digests import encode_crc64nvme
from stager.formats.names import check_key
from stager.offload import Offload
from stager.store.api import (
    OVERWRITE,
    Buffer,
    Create,
    ObjectInfo,
    ObjectVersion,
    PartTag,
    PutMode,
    Replace,
    Span,
    StoreProperties,
)
from stager.store.checks import check_metadata, check_part_number, other_version, span_beyond_end
from stager.store.s3_body import S3Reader, announced_sizes, checksum_of, not_an_object
from stager.store.s3_client import endpoint_of_the_sdk, open_client
from stager.store.s3_copy import copy_object
from stager.store.s3_delete import delete_objects
from stager.store.s3_errors import translate
from stager.store.s3_pages import objects_in_order, objects_sorted_here, parts_of, upload_pages
from stager.store.s3_settings import S3Settings


class S3Store:
    """A bucket at an S3 endpoint. Made by `open_s3`."""

    def __init__(self, client: Any, bucket: str, settings: S3Settings, stack: AsyncExitStack) -> None:
        self._client = client
        self._bucket = bucket
        self._settings = settings
        self._profile = settings.profile
        self._stack = stack
        self._properties = StoreProperties(
            name=f"s3://{bucket}",
            part_bytes_min=self._profile.part_bytes_min,
            part_bytes_max=self._profile.part_bytes_max,
            parts_max=self._profile.parts_max,
            put_bytes_max=self._profile.put_bytes_max,
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
        parameters = {
            "Key": self._checked(key),
            "Metadata": check_metadata(key, metadata),
            **self._body(body, crc64nvme),
            **_condition(mode),
        }
        try:
            response = await self.call("put_object", key, size=len(body), **parameters)
        except StagerError as error:
            raise _conditional(error, key, mode, self._properties.name) from error
        return self._version(response, key)

    @asynccontextmanager
    async def get(
        self, key: str, *, span: Span | None = None, if_match: ObjectVersion | None = None
    ) -> AsyncIterator[S3Reader]:
        parameters: dict[str, Any] = {"Key": self._checked(key)}
        if span is not None:
            parameters["Range"] = f"bytes={span.start}-{span.stop - 1}"
        if if_match is not None:
            # In quotes, as HTTP has it: nginx compares nothing else. Reads take both forms everywhere that was tried.
            parameters["IfMatch"] = f'"{if_match.etag}"'
        try:
            response = await self.call("get_object", key, **parameters)
        except PreconditionFailed as error:
            raise other_version(key) from error
        except IntegrityError as error:
            if span is None:
                raise
            raise span_beyond_end(key, (await self.head(key)).size, span.start, span.stop) from error
        body = response["Body"]
        try:
            whole, length = announced_sizes(response, key, span, self._properties.name)
            info = self._info(response, key, whole)
            if if_match is not None and info.version.etag != if_match.etag:
                raise other_version(key)
        except BaseException:
            body.close()
            raise
        reader = S3Reader(body, info, length, store=self._properties.name)
        try:
            yield reader
        finally:
            reader.close()

    async def head(self, key: str) -> ObjectInfo:
        parameters: dict[str, Any] = {"Key": self._checked(key)}
        if self._profile.checksum_header:
            parameters["ChecksumMode"] = "ENABLED"
        response = await self.call("head_object", key, **parameters)
        size = response.get("ContentLength")
        if not isinstance(size, int) or not response.get("ETag"):
            raise not_an_object(key, self._properties.name)
        return self._info(response, key, size)

    async def list_objects(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        listing = objects_in_order if self._profile.lists_in_order else objects_sorted_here
        async for info in listing(self, prefix, after):
            yield info

    async def delete(self, keys: Sequence[str]) -> Mapping[str, StagerError]:
        checked = list(dict.fromkeys(self._checked(key) for key in keys))
        return await delete_objects(
            self, self._properties.name, checked, batch_max=self._profile.delete_batch_max
        )

    async def copy(self, source: str, target: str, *, if_match: ObjectVersion | None = None) -> ObjectVersion:
        info = await self.head(source)
        if if_match is not None and info.version.etag != if_match.etag:
            raise other_version(source)
        # From here on the source is pinned, so that a copy in parts cannot mix two versions.
        return await copy_object(
            self,
            self._bucket,
            info,
            self._checked(target),
            bytes_max=self._profile.copy_bytes_max,
            timeout_s=self._settings.complete_timeout_s,
        )

    async def begin_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        parameters: dict[str, Any] = {"Key": self._checked(key), "Metadata": check_metadata(key, metadata)}
        if self._profile.checksum_header:
            parameters |= {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        response = await self.call("create_multipart_upload", key, **parameters)
        upload_id = response.get("UploadId")
        if not isinstance(upload_id, str) or not upload_id:
            raise not_an_object(key, self._properties.name)
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Buffer, *, crc64nvme: int | None = None
    ) -> PartTag:
        if crc64nvme is None and self._profile.checksum_header:
            crc64nvme = compute_crc64nvme(body)  # an upload begun with an algorithm wants it for each part
        parameters = {
            "Key": self._checked(key),
            "UploadId": upload_id,
            "PartNumber": check_part_number(key, number),
            **self._body(body, crc64nvme),
        }
        response = await self.call("upload_part", key, size=len(body), **parameters)
        etag = _etag(response)
        if not etag:
            raise not_an_object(key, self._properties.name)
        return PartTag(number, etag, len(body), checksum_of(response))

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartTag]:
        return await parts_of(self, self._checked(key), upload_id)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[PartTag], *, mode: PutMode = OVERWRITE
    ) -> ObjectVersion:
        if not parts:
            raise UsageError(f"`{key}`: an upload without parts cannot be completed", subject=key)
        listed = [{"PartNumber": part.number, "ETag": part.etag} for part in parts]
        parameters: dict[str, Any] = {
            "Key": self._checked(key),
            "UploadId": upload_id,
            "MultipartUpload": {"Parts": listed},
            **_condition(mode),
        }
        known = [(part.crc64nvme, part.size) for part in parts if part.crc64nvme is not None]
        if self._profile.checksum_header and len(known) == len(parts):
            parameters |= {
                "ChecksumCRC64NVME": encode_crc64nvme(combine_all(known)),
                "ChecksumType": "FULL_OBJECT",
            }
        try:
            response = await self.call(
                "complete_multipart_upload", key, timeout_s=self._settings.complete_timeout_s, **parameters
            )
        except Unavailable as error:
            # Ceph 16 says InternalError when the upload is gone; whether it is, the list of its parts tells.
            await self.list_parts(key, upload_id)
            raise error
        except StagerError as error:
            raise _conditional(error, key, mode, self._properties.name) from error
        # Ceph 16 answers with an empty etag; the object has the right one.
        return self._version(response, key) if _etag(response) else (await self.head(key)).version

    async def abort_upload(self, key: str, upload_id: str) -> None:
        try:
            await self.call("abort_multipart_upload", key, Key=self._checked(key), UploadId=upload_id)
        except NotFound:
            pass

    async def list_uploads(self, prefix: str = "") -> AsyncIterator[tuple[str, str]]:
        async for found in upload_pages(self, prefix):
            yield found

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def call(
        self, operation: str, subject: str, *, size: int = 0, timeout_s: float = 0.0, **parameters: Any
    ) -> dict[str, Any]:
        """One request with its deadline, its failure translated; for the helpers beside this module.

        Args:
            operation: A method of the client.
            subject: The key or prefix that errors name.
            size: Bytes that go up, which lengthen the deadline.
            timeout_s: Instead of the settings' ``call_timeout_s``.
        """
        limit_s = (timeout_s or self._settings.call_timeout_s) + size / self._settings.bytes_per_second_min
        try:
            async with asyncio.timeout(limit_s):
                response: dict[str, Any] = await getattr(self._client, operation)(
                    Bucket=self._bucket, **parameters
                )
                return response
        except TimeoutError as error:
            raise translate(
                TimeoutError(f"no answer within {limit_s:.0f} s"),
                doing=operation.replace("_", " "),
                subject=subject,
                store=self._properties.name,
            ) from error
        except Exception as error:
            raise translate(
                error, doing=operation.replace("_", " "), subject=subject, store=self._properties.name
            ) from error

    def _checked(self, key: str) -> str:
        check_key(key)
        if len(key.encode()) > self._profile.key_bytes_max:
            raise FormatError(
                f"key `{key[:80]}` is longer than the {self._profile.key_bytes_max} bytes that"
                f" {self._profile.name} allows",
                subject=key,
            )
        return key

    def _body(self, body: Buffer, crc: int | None) -> dict[str, Any]:
        # BytesIO shares the bytes it is made of; aiohttp sends it in pieces and lets the loop breathe.
        parameters: dict[str, Any] = {"Body": io.BytesIO(bytes(body)), "ContentLength": len(body)}
        if crc is not None and self._profile.checksum_header:
            parameters["ChecksumCRC64NVME"] = encode_crc64nvme(crc)
        return parameters

    def _version(self, response: Mapping[str, Any], key: str) -> ObjectVersion:
        etag = _etag(response)
        if not etag:
            raise not_an_object(key, self._properties.name)
        return ObjectVersion(etag, response.get("VersionId"))

    def _info(self, response: Mapping[str, Any], key: str, size: int) -> ObjectInfo:
        metadata = {str(name).lower(): str(value) for name, value in response.get("Metadata", {}).items()}
        return ObjectInfo(key, size, self._version(response, key), metadata, checksum_of(response))


async def open_s3(bucket: str, settings: S3Settings, offload: Offload | None = None) -> S3Store:
    """A store over ``bucket``, which must exist when it is used; `S3Store.aclose` ends its connections.

    With ``offload`` bodies travel by its threads, else by the event loop.
    """
    stack = AsyncExitStack()
    try:
        client = await open_client(settings, stack, offload)
        elsewhere = endpoint_of_the_sdk(client, settings)
        if elsewhere:
            # AWS_ENDPOINT_URL, or a profile's endpoint_url: as much another server as one named by store.endpoint.
            await stack.aclose()
            settings = replace(settings, endpoint=elsewhere)
            client = await open_client(settings, stack, offload)
        return S3Store(client, bucket, settings, stack)
    except BaseException:
        await stack.aclose()
        raise


def _etag(response: Mapping[str, Any]) -> str:
    return str(response.get("ETag") or "").strip('"')


def _condition(mode: PutMode) -> dict[str, str]:
    if isinstance(mode, Create):
        return {"IfNoneMatch": "*"}
    if isinstance(mode, Replace):
        return {"IfMatch": mode.version.etag}
    return {}


def _conditional(error: StagerError, key: str, mode: PutMode, store: str) -> StagerError:
    """A failure in the terms of the condition that was sent."""
    if isinstance(error, PreconditionFailed):
        if isinstance(mode, Create):
            return AlreadyExists(f"`{key}` exists already in {store}", subject=key)
        return other_version(key)
    if isinstance(mode, Replace) and isinstance(error, NotFound):
        return other_version(key)  # nothing is not the version that was named
    return error
