"""The Python peers of `bench/moving.py`: one of them moves one round of work, with its own defaults.

    python moving_peers.py PEER WORK

It is run by the interpreter of the peers' environment, imports nothing of stager, says ``ready`` when it is connected, and
begins when a line comes in, so that no peer is charged for the start of its interpreter.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moving_cases import BUCKET, Work, decode_work

FILES_AT_ONCE = 8
SMALL_AT_ONCE = 48


def at_once(work: Work) -> int:
    return FILES_AT_ONCE if work.size >= 1 << 20 else SMALL_AT_ONCE


def everywhere(work: Work, one: Callable[[str, str], None]) -> None:
    """``one(key, path)`` for every file, by threads."""
    with ThreadPoolExecutor(at_once(work)) as pool:
        for _ in pool.map(lambda name: one(work.prefix + name, f"{work.folder}/{name}"), work.names):
            pass


def boto3_plain(work: Work) -> Callable[[], None]:
    return _boto3(work, "classic")


def boto3_crt(work: Work) -> Callable[[], None]:
    return _boto3(work, "crt")


def _boto3(work: Work, manager: str) -> Callable[[], None]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=work.endpoint,
        config=Config(max_pool_connections=64, s3={"addressing_style": "path"}),
    )
    options = TransferConfig(preferred_transfer_client=manager)

    def one(key: str, path: str) -> None:
        if work.direction == "download":
            client.download_file(BUCKET, key, path, Config=options)
        else:
            client.upload_file(path, BUCKET, key, Config=options)

    return lambda: everywhere(work, one)


def obstore(work: Work) -> Callable[[], None]:
    import obstore as obs
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=work.endpoint,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "600s"},
    )
    part_bytes = 16 << 20

    async def get(name: str) -> None:
        with open(f"{work.folder}/{name}", "wb") as file:
            if work.size <= part_bytes:
                file.write(await (await obs.get_async(store, work.prefix + name)).bytes_async())
                return
            turns = asyncio.Semaphore(4)

            async def part(start: int) -> None:
                async with turns:
                    length = min(part_bytes, work.size - start)
                    data = await obs.get_range_async(store, work.prefix + name, start=start, length=length)
                    await asyncio.to_thread(os.pwrite, file.fileno(), data, start)

            await asyncio.gather(*(part(start) for start in range(0, work.size, part_bytes)))

    async def put(name: str) -> None:
        from pathlib import Path

        await obs.put_async(store, work.prefix + name, Path(f"{work.folder}/{name}"), chunk_size=part_bytes)

    async def everything() -> None:
        turns = asyncio.Semaphore(FILES_AT_ONCE // 2 if work.size >= 1 << 20 else SMALL_AT_ONCE)

        async def one(name: str) -> None:
            async with turns:
                await (get(name) if work.direction == "download" else put(name))

        await asyncio.gather(*map(one, work.names))

    return lambda: asyncio.run(everything())


def s3torchconnector(work: Work) -> Callable[[], None]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    client = S3Client(
        "us-east-1", endpoint=work.endpoint, s3client_config=S3ClientConfig(force_path_style=True)
    )

    def one(key: str, path: str) -> None:
        if work.direction == "download":
            reader = client.get_object(BUCKET, key)
            with open(path, "wb") as file:
                while piece := reader.read(4 << 20):
                    file.write(piece)
        else:
            with open(path, "rb") as file, client.put_object(BUCKET, key) as writer:
                while piece := file.read(4 << 20):
                    writer.write(piece)

    return lambda: everywhere(work, one)


def pyarrow(work: Work) -> Callable[[], None]:
    from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files

    remote = S3FileSystem(
        endpoint_override=work.endpoint.removeprefix("http://"), scheme="http", region="us-east-1"
    )
    local = LocalFileSystem()

    def one(key: str, path: str) -> None:
        if work.direction == "download":
            copy_files(f"{BUCKET}/{key}", path, source_filesystem=remote, destination_filesystem=local)
        else:
            copy_files(path, f"{BUCKET}/{key}", source_filesystem=local, destination_filesystem=remote)

    return lambda: everywhere(work, one)


PEERS = {
    "boto3": boto3_plain,
    "boto3+crt": boto3_crt,
    "obstore": obstore,
    "s3torchconnector": s3torchconnector,
    "pyarrow": pyarrow,
}


def main() -> None:
    work = decode_work(sys.argv[2])
    go = PEERS[sys.argv[1]](work)
    print("ready", flush=True)
    sys.stdin.readline()
    go()
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
