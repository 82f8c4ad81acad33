"""From a URL to a destination, in this process and in each worker."""

from __future__ import annotations

import random
from dataclasses import dataclass

from stager.disk import LocalDisk
from stager.offload import Offload
from stager.pack.destination import BucketDestination, Destination, LocalDestination
from stager.store.registry import StoreTools, StoreUrl, open_store
from stager.store.s3_client import S3Settings


@dataclass(frozen=True, slots=True)
class DestinationOpener:
    """Opens one destination; travels to worker processes."""

    url: StoreUrl
    settings: S3Settings

    async def __call__(self, offload: Offload) -> Destination:
        if self.url.scheme == "file":
            return LocalDestination(self.url.bucket, disk=LocalDisk(), offload=offload)
        tools = StoreTools(LocalDisk(), offload, random.Random())
        return BucketDestination(await open_store(self.url, self.settings, tools), offload=offload)
