"""Stores for commands that work without a daemon: settings from ``--config`` and the environment, tools of this process."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stager.offload import Offload
    from stager.store.api import ObjectStore
    from stager.store.registry import StoreTools
    from stager.store.s3_settings import S3Settings

ConfigForStore = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Take [store] from this TOML file; else from STAGER_STORE__* and the SDK.",
    ),
]


def store_settings(config: str | None) -> S3Settings:
    """How buckets are reached; ConfigError with all that is wrong."""
    from stager.config import load_store_section
    from stager.sidecar.stores import s3_settings

    return s3_settings(load_store_section(config))


def make_store_tools(offload: Offload) -> StoreTools:
    """Disk and randomness of this process."""
    from stager.disk import LocalDisk
    from stager.store.registry import StoreTools

    return StoreTools(LocalDisk(), offload, random.Random())


@asynccontextmanager
async def opened_store(url: str, settings: S3Settings, offload: Offload) -> AsyncIterator[ObjectStore]:
    """The store that a URL or a path names, closed at the end of the block."""
    from stager.store.registry import open_store

    store = await open_store(url, settings, make_store_tools(offload), base=os.getcwd())
    try:
        yield store
    finally:
        await store.aclose()
