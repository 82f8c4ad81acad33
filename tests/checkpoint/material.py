"""A watched folder and its service over simulated or real parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from stager.budget import ByteBudget
from stager.checkpoint.copies import CopyOptions
from stager.checkpoint.hints import Hints, watching
from stager.checkpoint.keep import KeepRule
from stager.checkpoint.ledger import CheckpointJournal
from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.service import CheckpointService
from stager.checkpoint.tiers import Tier
from stager.checkpoint.watcher import WatchOptions
from stager.clock import Clock
from stager.disk import Disk
from stager.formats.commits import COMMIT_MARKER_NAME, CommitMarker, encode_marker
from stager.offload import InlineOffload, Offload
from stager.store.api import ObjectStore
from stager.transfer.tools import Tools
from stager.transfer.upload import UploadOptions

PART_BYTES = 1000
WATCH = "/ckpt"


@contextmanager
def no_hints(folder: str, hints: Hints) -> Iterator[None]:
    """Only rescans find anything."""
    yield


def make_service(
    store: ObjectStore | Callable[[], Awaitable[ObjectStore]],
    disk: Disk,
    journal: CheckpointJournal,
    clock: Clock,
    *,
    watch: str = WATCH,
    seed: int = 0,
    node: int = 0,
    nodes: int = 1,
    keep: KeepRule = KeepRule(),
    keep_local: int | None = None,
    rescan_s: float = 1.0,
    offload: Offload | None = None,
    part_bytes: int = PART_BYTES,
    hints: bool = False,
    commits: bool = True,
    before: Sequence[Tier] = (),
    copies: CopyOptions = CopyOptions(),
    **watch_options: Any,
) -> CheckpointService:
    async def open_store() -> ObjectStore:
        return await store() if callable(store) else store

    tools = Tools(disk, offload or InlineOffload(), memory=ByteBudget(64 << 20), random=random.Random(seed))
    upload = UploadOptions(part_bytes=part_bytes, concurrency=2, attempts=3)
    options = PublishOptions(node, nodes, commits, files_at_once=2, upload=upload, copies=copies)
    return CheckpointService(
        "memory://run",
        WatchOptions(watch, rescan_s=rescan_s, **watch_options),
        [*before, Tier("memory://run", open_store, keep=keep, publish=options)],
        tools,
        journal,
        clock,
        keep_local=keep_local,
        hinting=watching if hints else no_hints,
    )


@asynccontextmanager
async def running(*services: CheckpointService) -> AsyncIterator[None]:
    """The services run during the block, and are ready when it begins."""
    ready = [asyncio.Event() for _ in services]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(service.run(event.set)) for service, event in zip(services, ready, strict=True)
        ]
        for event in ready:
            await event.wait()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def bodies_of(step: int, *, save: int = 1, size: int = 3_300) -> dict[str, bytes]:
    """A checkpoint's files; another ``save`` of the same step has other bytes."""
    chance = random.Random(step * 1000 + save)
    return {
        "model.bin": chance.randbytes(size),
        "nested/optimizer.bin": chance.randbytes(size // 2),
        "empty.json": b"",
        "config.json": b'{"hidden": 8}',
    }


def write_checkpoint(
    disk: Disk, folder: str, step: int, *, save: int = 1, durable: bool = True
) -> dict[str, bytes]:
    """What a trainer does: files in place, then the commit marker. Returns all files by path."""
    bodies = bodies_of(step, save=save)
    for path, body in bodies.items():
        target = f"{folder}/{path}"
        disk.make_directory(target.rsplit("/", 1)[0])
        disk.create(target)
        disk.write_at(target, 0, body)
        if durable:
            disk.sync(target)
            disk.sync(target.rsplit("/", 1)[0])
    marker = encode_marker(CommitMarker(step, {"loss": 1.0}, {"position": step * 10}))
    disk.write_file(f"{folder}/{COMMIT_MARKER_NAME}", marker)
    return {**bodies, COMMIT_MARKER_NAME: marker}
