"""What is particular to a bucket in a directory: other people's files, kills, locks, and links."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stager.disk import LocalDisk
from stager.errors import DeadlineExceeded, FormatError, NotFound, PreconditionFailed, Unavailable, UsageError
from stager.offload import ThreadOffload
from stager.store import directory
from stager.store.api import CREATE, Replace, read_all
from stager.store.directory import DirectoryStore

HIDDEN = ".stager-store"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    offload = ThreadOffload(disk_threads=4, hash_threads=1)
    yield open_directory(tmp_path / "bucket", offload)
    offload.close()


def open_directory(root: Path, offload: ThreadOffload) -> DirectoryStore:
    return DirectoryStore(str(root), disk=LocalDisk(), offload=offload, chance=random.Random(os.getpid()))


async def keys(store: DirectoryStore, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list_objects(prefix)]


async def test_other_peoples_files_are_objects(store: DirectoryStore, tmp_path: Path) -> None:
    """A tree that stager never wrote is read in place; changing a file changes its version."""
    (tmp_path / "bucket/data").mkdir(parents=True)
    path = tmp_path / "bucket/data/a.tar"
    path.write_bytes(b"theirs")
    assert await keys(store) == ["data/a.tar"]
    body, info = await read_all(store, "data/a.tar", bytes_max=100)
    assert (body, info.metadata, info.crc64nvme) == (b"theirs", {}, None)
    path.write_bytes(b"theirs, longer")
    with pytest.raises(PreconditionFailed):
        async with store.get("data/a.tar", if_match=info.version):
            pass
    assert not (tmp_path / "bucket" / HIDDEN).exists(), "reading writes nothing"


async def test_objects_are_plain_files(store: DirectoryStore, tmp_path: Path) -> None:
    """Any tool finds an object under its key, and nothing else beside the hidden folder."""
    await store.put("a/b.bin", b"bytes", metadata={"k": "v"})
    assert (tmp_path / "bucket/a/b.bin").read_bytes() == b"bytes"
    assert sorted(os.listdir(tmp_path / "bucket")) == [HIDDEN, "a"]
    assert os.listdir(tmp_path / "bucket" / HIDDEN / "staging") == []


async def test_side_file_never_describes_another_file(store: DirectoryStore, tmp_path: Path) -> None:
    """Metadata does not survive a file that somebody replaced, and goes with a file that is deleted."""
    await store.put("k", b"ours", metadata={"k": "v"}, crc64nvme=None)
    path = tmp_path / "bucket/k"
    path.write_bytes(b"OURS")
    os.utime(path, ns=(1, 1))
    assert (await store.head("k")).metadata == {}
    await store.put("k", b"ours", metadata={"k": "v"})
    await store.put("k", b"ours", metadata={"k": "w"})
    assert (await store.head("k")).metadata == {"k": "w"}
    await store.delete(["k"])
    left = [name for _, _, names in os.walk(tmp_path / "bucket" / HIDDEN / "side") for name in names]
    assert len(left) == 1, "only the side file of the file that was changed behind our back"


async def test_damaged_side_file_says_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    """A side file full of rubbish costs the metadata, not the object."""
    await store.put("k", b"ours", metadata={"k": "v"})
    (side,) = (tmp_path / "bucket" / HIDDEN / "side").rglob("*.json")
    for rubbish in [b"", b"{", b"[]", b'{"metadata": 3}', b"\xff\xfe", b"null"]:
        side.write_bytes(rubbish)
        assert (await store.head("k")).metadata == {}
    assert (await read_all(store, "k", bytes_max=10))[0] == b"ours"


@pytest.mark.parametrize("key", [HIDDEN, f"{HIDDEN}/locks/00", f"a/{HIDDEN}/b"])
async def test_hidden_folder_is_no_key(store: DirectoryStore, key: str) -> None:
    """The store's own files can be neither read nor overwritten through it, and are never listed."""
    await store.put("k", b"x", metadata={"a": "b"})
    for attempt in [store.put(key, b"x"), store.head(key), store.delete([key]), store.begin_upload(key)]:
        with pytest.raises(FormatError, match="own"):
            await attempt
    assert await keys(store) == ["k"]


@pytest.mark.parametrize("upload_id", ["", "..", "../../x", "0" * 31, "G" * 32, "0" * 32])
async def test_hostile_upload_ids(store: DirectoryStore, upload_id: str) -> None:
    """An id that was not given out is NotFound, and is never part of a path."""
    for attempt in [store.put_part("k", upload_id, 1, b"x"), store.list_parts("k", upload_id)]:
        with pytest.raises(NotFound):
            await attempt
    await store.abort_upload("k", upload_id)


async def test_upload_belongs_to_its_key(store: DirectoryStore) -> None:
    """The id of one key's upload does nothing for another."""
    upload_id = await store.begin_upload("k")
    with pytest.raises(NotFound):
        await store.put_part("other", upload_id, 1, b"x")
    await store.abort_upload("other", upload_id)
    assert [found async for found in store.list_uploads()] == [("k", upload_id)]


async def test_what_is_no_regular_file(store: DirectoryStore, tmp_path: Path) -> None:
    """FIFOs, folders, dangling links and names that are not UTF-8 are no objects, and block nobody."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    os.mkfifo(bucket / "fifo")
    (bucket / "folder").mkdir()
    (bucket / "dangling").symlink_to("nowhere")
    (bucket / "real").write_bytes(b"x")
    (bucket / "link").symlink_to("real")
    Path(os.fsdecode(os.fsencode(bucket) + b"/\xff")).write_bytes(b"x")
    (bucket / "line\nbreak").write_bytes(b"x")
    assert await keys(store) == ["link", "real"]
    for key in ["fifo", "folder", "dangling"]:
        with pytest.raises(NotFound):
            async with asyncio.timeout(10), store.get(key):
                pass


async def test_reader_keeps_its_version(store: DirectoryStore) -> None:
    """Overwritten or deleted while it is read, an object still gives the bytes that were opened."""
    await store.put("k", b"old bytes")
    async with store.get("k") as reader:
        assert await reader.read(3) == b"old"
        await store.put("k", b"new bytes")
        await store.delete(["k"])
        assert await reader.read(100) == b" bytes"
        assert await reader.read(100) == b""


async def test_file_cut_while_it_is_read(store: DirectoryStore, tmp_path: Path) -> None:
    """Somebody who truncates a file in place makes an error, not a short answer."""
    await store.put("k", bytes(100))
    async with store.get("k") as reader:
        await reader.read(10)
        os.truncate(tmp_path / "bucket/k", 10)
        with pytest.raises(Unavailable, match="shorter"):
            await reader.read(10)


async def test_replacements_from_several_processes(tmp_path: Path) -> None:
    """A counter that four processes raise by compare-and-swap loses no step."""
    program = """
import asyncio, random, sys
from stager.disk import LocalDisk
from stager.errors import PreconditionFailed
from stager.offload import ThreadOffload
from stager.store.api import Replace, read_all
from stager.store.directory import DirectoryStore

async def main():
    store = DirectoryStore(sys.argv[1], disk=LocalDisk(), offload=ThreadOffload(), chance=random.Random(), durable=False)
    done = 0
    while done < 10:
        body, info = await read_all(store, "counter", bytes_max=100)
        try:
            await store.put("counter", b"%d" % (int(body) + 1), mode=Replace(info.version))
            done += 1
        except PreconditionFailed:
            pass

asyncio.run(main())
"""
    offload = ThreadOffload()
    store = open_directory(tmp_path / "bucket", offload)
    await store.put("counter", b"0")
    command = [sys.executable, "-c", program, str(tmp_path / "bucket")]
    writers = [subprocess.Popen(command) for _ in range(4)]
    assert [await asyncio.to_thread(writer.wait, 60) for writer in writers] == [0, 0, 0, 0]
    assert (await read_all(store, "counter", bytes_max=100))[0] == b"40"
    offload.close()


async def test_writers_wait_for_each_other_no_longer_than_allowed(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs while it holds a key's lock is named instead of waited for."""
    old = await store.put("k", b"x")
    monkeypatch.setattr(directory, "LOCK_TIMEOUT_S", 0.05)
    (lock,) = (tmp_path / "bucket" / HIDDEN / "locks").iterdir()
    with (
        LocalDisk().lock(str(lock), "the one who hangs"),
        pytest.raises(DeadlineExceeded, match="the one who hangs"),
    ):
        await store.put("k", b"y", mode=Replace(old))
    await store.put("k", b"y", mode=Replace(old))


WRITER = """
import asyncio, itertools, random, sys
from stager.checksum import crc64nvme
from stager.disk import LocalDisk
from stager.offload import ThreadOffload
from stager.store.directory import DirectoryStore

async def main():
    store = DirectoryStore(sys.argv[1], disk=LocalDisk(), offload=ThreadOffload(), chance=random.Random(), durable=False)
    for number in itertools.count():
        body = b"%06d" % number * 5000
        await store.put("put/k", body, metadata={"n": str(number)}, crc64nvme=crc64nvme(body))
        upload = await store.begin_upload("upload/k", metadata={"n": str(number)})
        parts = [await store.put_part("upload/k", upload, part, body) for part in (1, 2)]
        await store.complete_upload("upload/k", upload, parts)
        await store.copy("put/k", "copy/k")
        await store.delete(["put/k"])
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("turn", range(5))
async def test_killed_at_any_moment(tmp_path: Path, turn: int) -> None:
    """Whatever is there after SIGKILL is whole, with its own metadata and checksum, and the store works on."""
    offload = ThreadOffload()
    store = open_directory(tmp_path / "bucket", offload)
    chance = random.Random(turn)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "bucket")], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        await asyncio.to_thread(writer.stdout.readline)
        for _ in range(chance.randrange(20)):
            await asyncio.to_thread(writer.stdout.readline)
        end = time.monotonic() + chance.random() * 0.02
        while time.monotonic() < end:
            pass
        writer.send_signal(signal.SIGKILL)
    for key in await keys(store):
        body, info = await read_all(store, key, bytes_max=1 << 20)
        number = int(info.metadata["n"])
        assert body == (b"%06d" % number * 5000) * (2 if key == "upload/k" else 1)
    for key, upload_id in [found async for found in store.list_uploads()]:
        parts = await store.list_parts(key, upload_id) or [await store.put_part(key, upload_id, 1, b"x")]
        await store.complete_upload(key, upload_id, parts)
    await store.delete(["put/k"])
    await store.put("put/k", b"after", mode=CREATE)
    assert (await read_all(store, "put/k", bytes_max=10))[0] == b"after"
    offload.close()


async def test_stale_staging_is_swept(tmp_path: Path) -> None:
    """What killed writers left more than a day ago goes; what is younger may be a neighbour's, and stays."""
    staging = tmp_path / "bucket" / HIDDEN / "staging"
    staging.mkdir(parents=True)
    for name, age_s in [("old", 90_000), ("young", 1_000)]:
        (staging / name).write_bytes(b"x")
        os.utime(staging / name, (time.time() - age_s,) * 2)
    offload = ThreadOffload()
    await open_directory(tmp_path / "bucket", offload).put("k", b"x")
    assert os.listdir(staging) == ["young"]
    offload.close()


async def test_relative_root_is_refused() -> None:
    """A store must not move with the working directory."""
    offload = ThreadOffload()
    with pytest.raises(UsageError, match="absolute"):
        open_directory(Path("relative"), offload)
    offload.close()


async def test_side_file_is_json(store: DirectoryStore, tmp_path: Path) -> None:
    """A person can read what is kept beside an object."""
    await store.put("k", b"body", metadata={"a": "b"})
    (side,) = (tmp_path / "bucket" / HIDDEN / "side").rglob("*.json")
    assert json.loads(side.read_text())["metadata"] == {"a": "b"}
