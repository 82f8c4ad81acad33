"""From a URL and the configuration's values to a store.

    s3://bucket/prefix     S3 and everything that speaks its dialect
    file:///path, /path    a directory
    memory://name          a bucket of this process, for tests and simulations
    az://, gs://           not yet

`open_store` gives the store as callers want it: retried, counted and bounded, below the URL's prefix.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from stager.budget import RateLimit
from stager.disk import Disk
from stager.errors import FormatError, NotSupported, StagerError, UsageError
from stager.formats.names import check_relative_path
from stager.offload import Offload
from stager.store.api import ObjectStore
from stager.store.directory import DirectoryStore
from stager.store.limited import LimitedStore
from stager.store.memory import MemoryBucket, MemoryStore
from stager.store.metered import MeteredStore, StoreMeter
from stager.store.prefixed import PrefixedStore
from stager.store.retrying import RetryingStore, RetryPolicy
from stager.store.s3_settings import S3Settings

_FORMS = "a store is named by s3://bucket/prefix, file:///path or a plain path"
_SCHEMES = frozenset({"s3", "file", "memory", "az", "gs", "http", "https"})
_MEMORY: dict[str, MemoryBucket] = {}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL taken apart. ``bucket`` is a path for directories; ``prefix`` has no slash at either end."""

    scheme: str
    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{quote(self.bucket)}"
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True)
class StoreTools:
    """What stores need besides their settings; one set serves all stores of a process.

    Attributes:
        disk: For directories.
        offload: Where their blocking calls run.
        chance: For names, and for the jitter of retries.
        meter: Counts what is sent, over all stores that share it.
        upload: Cap on what goes out.
        download: Cap on what comes in.
        durable: Whether writes into directories survive a power failure once they return.
    """

    disk: Disk
    offload: Offload
    chance: random.Random
    meter: StoreMeter = field(default_factory=StoreMeter)
    upload: RateLimit = field(default_factory=RateLimit)
    download: RateLimit = field(default_factory=RateLimit)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    durable: bool = True


def parse_url(url: str, *, base: str = "") -> StoreUrl:
    """Take a URL or a path apart.

    Args:
        base: The absolute folder that relative paths start from; without one they are refused.

    Raises:
        UsageError: It names no store that could exist.
        NotSupported: It names a kind of store that stager does not speak yet.
    """
    if "://" not in url:
        return _directory(url, url, base)
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise UsageError(
                f"`{url}` names another machine", subject=url, hint="write file:///path, with three slashes"
            )
        return _directory(unquote("/" + path), url, "")
    if scheme in ("az", "gs"):
        raise NotSupported(
            f"`{url}`: stager does not speak {'Azure Blob Storage' if scheme == 'az' else 'the API of GCS'} yet",
            subject=url,
            hint=(
                "for GCS make HMAC keys and use s3:// with store.provider = 'gcs-xml'"
                if scheme == "gs"
                else "use a bucket with an S3 interface, or a directory"
            ),
        )
    if scheme not in ("s3", "memory"):
        raise UsageError(f"`{url}` is of no kind that stager knows", subject=url, hint=_FORMS)
    bucket, _, prefix = rest.partition("/")
    if not bucket or any(character in bucket for character in "@?#:\\ ") or not bucket.isascii():
        raise UsageError(f"`{url}` names no bucket", subject=url, hint=_FORMS)
    prefix = prefix.strip("/")
    if prefix:
        try:
            check_relative_path(prefix, of="prefix")
        except FormatError as error:
            raise UsageError(f"`{url}`: {error.message}", subject=url, hint=error.hint) from error
    return StoreUrl(scheme, bucket, prefix)


async def open_store(
    url: str | StoreUrl, settings: S3Settings, tools: StoreTools, *, base: str = ""
) -> ObjectStore:
    """The store that ``url`` names, retried, counted and bounded; keys are relative to the URL's prefix.

    The caller closes it. Nothing is asked of the server yet: a missing bucket or wrong credentials show at the first call.

    Raises:
        UsageError, NotSupported, ConfigError: As `parse_url` and `open_client` say.
    """
    parsed = parse_url(url, base=base) if isinstance(url, str) else url
    plain = await _open(parsed, settings, tools)
    bounded = LimitedStore(
        MeteredStore(plain, tools.meter),
        calls_max=settings.requests_max,
        upload=tools.upload,
        download=tools.download,
    )
    retried = RetryingStore(bounded, chance=tools.chance, policy=tools.retries)
    return PrefixedStore(retried, parsed.prefix) if parsed.prefix else retried


async def _open(url: StoreUrl, settings: S3Settings, tools: StoreTools) -> ObjectStore:
    if url.scheme == "s3":
        # Imported here: a directory needs no aiobotocore, which takes most of a second to import.
        from stager.store.s3 import open_s3

        return await open_s3(url.bucket, settings, tools.offload)
    if url.scheme == "memory":
        return MemoryStore(_MEMORY.setdefault(url.bucket, MemoryBucket()))
    await tools.offload.run("disk", _check_directory, tools.disk, url.bucket)
    return DirectoryStore(
        url.bucket, disk=tools.disk, offload=tools.offload, chance=tools.chance, durable=tools.durable
    )


def _check_directory(disk: Disk, path: str) -> None:
    """UsageError if something that is no directory stands in the bucket's place; the first write makes a missing one."""
    try:
        is_directory = disk.stat(path).is_directory
    except FileNotFoundError:
        return
    except StagerError as error:
        # Whatever else is wrong, the first call says for its key.
        is_directory = not isinstance(error.__cause__, NotADirectoryError)
    if not is_directory:
        raise UsageError(f"`{path}` is no directory, and a bucket on disk is one", subject=path, hint=_FORMS)


def _directory(path: str, url: str, base: str) -> StoreUrl:
    if not path or "\0" in path:
        raise UsageError(f"`{url!r}` names no directory", subject=url, hint=_FORMS)
    scheme, colon, rest = path.partition(":")
    if colon and scheme.lower() in _SCHEMES:
        # As a path it would be taken, and fill a folder called `s3:`.
        raise UsageError(
            f"`{url}` looks like a URL and is none",
            subject=url,
            hint=f"write {scheme.lower()}://{rest.lstrip('/')}",
        )
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if not os.path.isabs(path):
        if not base:
            raise UsageError(f"`{url}` is not an absolute path", subject=url, hint=_FORMS)
        path = os.path.join(base, path)
    return StoreUrl("file", os.path.normpath(path))
