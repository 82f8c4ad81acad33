"""Stores by URL, opened once and shared by everything in a process that reads or writes below the same URL."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from stager.budget import RateLimit
from stager.config import StoreSection
from stager.disk import Disk
from stager.offload import Offload
from stager.store.api import ObjectStore
from stager.store.metered import StoreMeter
from stager.store.registry import StoreTools, open_store
from stager.store.retrying import RetryPolicy
from stager.store.s3_settings import S3Settings

# Transfers have patience of their own; below them a call is tried a few times and then told.
RETRIES = RetryPolicy(attempts_max=3, total_s_max=60.0)


def s3_settings(section: StoreSection) -> S3Settings:
    """How buckets are reached, by the configuration."""
    return S3Settings(
        provider=section.provider,
        endpoint=section.endpoint,
        region=section.region,
        aws_profile=section.profile,
        access_key=section.access_key.get_secret_value(),
        secret_key=section.secret_key.get_secret_value(),
        session_token=section.session_token.get_secret_value(),
        kms_key=section.kms_key,
    )


class Stores:
    """Opens stores by URL and closes them all."""

    def __init__(
        self,
        section: StoreSection,
        disk: Disk,
        offload: Offload,
        chance: random.Random,
        *,
        upload: RateLimit | None = None,
        download: RateLimit | None = None,
        base: str = "",
    ) -> None:
        self.meter = StoreMeter()
        self._settings = s3_settings(section)
        self._base = base
        self._tools = StoreTools(
            disk,
            offload,
            chance,
            meter=self.meter,
            upload=upload or RateLimit(),
            download=download or RateLimit(),
            retries=RETRIES,
        )
        self._open: dict[tuple[str, str], ObjectStore] = {}
        self._opening = asyncio.Lock()

    async def open(self, url: str, storage_class: str = "") -> ObjectStore:
        """The store below ``url``; relative paths start from ``base`` where the caller gave one."""
        key = (url.rstrip("/") or url, storage_class)
        async with self._opening:
            if key not in self._open:
                settings = replace(self._settings, storage_class=storage_class)
                self._open[key] = await open_store(key[0], settings, self._tools, base=self._base)
            return self._open[key]

    async def aclose(self) -> None:
        """Close every store that was opened."""
        while self._open:
            _, store = self._open.popitem()
            await store.aclose()
