"""From a URL to a destination, in this process and in each worker."""

from __future__ import annotations

import random
from dataclasses import dataclass

from stager.disk import LocalDisk
from stager.errors import UsageError
from stager.offload import Offload
from stager.pack.destination import BucketDestination, Destination, LocalDestination
from stager.store.registry import StoreTools, StoreUrl, open_store
from stager.store.s3_settings import S3Settings


@dataclass(frozen=True, slots=True)
class DestinationOpener:
    """Opens one destination; travels to worker processes.

    Attributes:
        url: A directory, or a prefix of a bucket.
        settings: How buckets are reached; a directory needs none.
    """

    url: StoreUrl
    settings: S3Settings | None = None

    async def __call__(self, offload: Offload) -> Destination:
        if self.url.scheme == "file":
            return LocalDestination(self.url.bucket, disk=LocalDisk(), offload=offload)
        if self.settings is None:
            raise UsageError(f"`{self.url}` was opened without settings", subject=str(self.url))
        tools = StoreTools(LocalDisk(), offload, random.Random())
        return BucketDestination(await open_store(self.url, self.settings, tools), offload=offload)
