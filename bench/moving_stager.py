"""stager's side of `bench/moving.py`: the daemon's own engine, without the daemon's other services.

Reads its work as JSON from the first argument, says ``ready``, and begins when a line comes in.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from typing import Any

import uvloop
from moving_cases import BUCKET, Work, decode_work

from stager.budget import ByteBudget
from stager.disk import LocalDisk
from stager.formats.digests import Digest
from stager.offload import ThreadOffload
from stager.store.registry import StoreTools, open_store
from stager.store.s3_settings import S3Settings
from stager.transfer.download import DownloadOptions, download
from stager.transfer.tools import Tools
from stager.transfer.upload import upload_file


class _Notes:
    """A journal in memory: the daemon's own writes a line for each file of several parts."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], dict[str, Any]] = {}

    def get(self, topic: str, key: str) -> dict[str, Any] | None:
        return self._notes.get((topic, key))

    def put(self, topic: str, key: str, value: dict[str, Any]) -> None:
        self._notes[topic, key] = value

    def forget(self, topic: str, key: str) -> None:
        self._notes.pop((topic, key), None)


async def run(work: Work) -> None:
    disk, offload, chance = LocalDisk(), ThreadOffload(), random.Random()
    tools = Tools(disk, offload, memory=ByteBudget(128 << 20), random=chance)
    settings = S3Settings(
        provider=work.provider,
        endpoint=work.endpoint,
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
    )
    store = await open_store(f"s3://{BUCKET}/{work.prefix}", settings, StoreTools(disk, offload, chance))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    pending = deque(zip(work.names, work.crcs, strict=True))
    journal = _Notes()

    async def one(name: str, crc: int) -> None:
        path = f"{work.folder}/{name}"
        if work.direction == "download":
            await download(
                store,
                name,
                path + ".staged",
                tools,
                size=work.size,
                digest=Digest("0" * 64, crc),
                options=DownloadOptions(concurrency=8),
            )
            await offload.run("disk", disk.publish, path + ".staged", path, durable=False)
        else:
            await upload_file(store, name, path, tools, journal)

    async def worker() -> None:
        while pending:
            await one(*pending.popleft())

    async with asyncio.TaskGroup() as group:
        for _ in range(4 if work.size >= 1 << 20 else 48):
            group.create_task(worker())
    print("done", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await store.aclose()
    offload.close()


if __name__ == "__main__":
    uvloop.run(run(decode_work(sys.argv[1])))
