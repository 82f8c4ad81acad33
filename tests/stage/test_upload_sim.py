"""Uploads on the simulation: any death, any lost answer, and no byte sent twice that the store has proven to hold."""

from __future__ import annotations

import os
import random

import pytest

from stager.budget import ByteBudget
from stager.checksum import digest_of
from stager.errors import IntegrityError, StoreError
from stager.journal import Journal
from stager.offload import InlineOffload
from stager.store.api import StoreProperties
from stager.store.memory import MemoryBucket, MemoryStore
from stager.transfer.tools import Tools
from stager.transfer.upload import Uploaded, UploadOptions, abort_stale_uploads, upload_file
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import World, run_process

SEEDS = [int(os.environ["STAGER_SIM_SEED"])] if "STAGER_SIM_SEED" in os.environ else list(range(60))
PART = 1000
BODY = random.Random(1).randbytes(9_500)
OPTIONS = UploadOptions(part_bytes=PART, concurrency=3, attempts=6)


def make_disk(world: World, body: bytes = BODY) -> SimulatedDisk:
    disk = SimulatedDisk(world)
    disk.make_directory("/sealed")
    disk.write_file("/sealed/weights", body)
    return disk


def make_tools(disk: SimulatedDisk, seed: int = 0) -> Tools:
    return Tools(disk, InlineOffload(), memory=ByteBudget(4000), random=random.Random(seed))


def make_journal(disk: SimulatedDisk) -> Journal:
    return Journal(":memory:", disk)


def whole(bucket: MemoryBucket, key: str = "w") -> bytes:
    return bucket.objects[key].body


@pytest.mark.parametrize("seed", SEEDS)
def test_an_upload_survives_any_death(seed: int) -> None:
    """Killed at random steps, with or without its journal, the upload ends with the file's bytes and nothing half."""
    world = World(seed)
    disk = make_disk(world)
    bucket = MemoryBucket()
    journal = make_journal(disk)
    done: list[Uploaded] = []
    for life in range(9):
        last = life == 8
        world.revive(crash_within=None if last else 40)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.0 if last else 0.1)

        async def main(store: FaultyStore = store, journal: Journal = journal, last: bool = last) -> None:
            try:
                done.append(
                    await upload_file(
                        store, "w", "/sealed/weights", make_tools(disk), journal, options=OPTIONS
                    )
                )
            except StoreError:
                assert not last

        run_process(world, main)
        assert "w" not in bucket.objects or whole(bucket) == BODY
        disk.kill()
        if world.random.random() < 0.2:
            journal = make_journal(disk)
    assert whole(bucket) == BODY and done[-1].digest == digest_of(BODY)


@pytest.mark.parametrize("lost", [False, True])
def test_any_one_failing_call_is_survived(lost: bool) -> None:
    """Whichever request fails, before or after its effect, the object is right and its outcome known."""
    number = 0
    while True:
        number += 1
        world = World(number)
        disk = make_disk(world)
        bucket = MemoryBucket()
        store = FaultyStore(MemoryStore(bucket), world, fail_call=number, lost=lost)

        async def main(store: FaultyStore = store, disk: SimulatedDisk = disk) -> None:
            tools = make_tools(disk)
            got = await upload_file(store, "w", "/sealed/weights", tools, make_journal(disk), options=OPTIONS)
            assert got.digest == digest_of(BODY)

        assert run_process(world, main)
        assert whole(bucket) == BODY
        if store.calls < number:
            break
    assert number > 11


def test_a_resumed_upload_sends_only_what_is_missing() -> None:
    """After a kill, parts that the store holds are compared and not sent; those in flight are sent again."""
    world = World(4)
    disk = make_disk(world)
    bucket = MemoryBucket()
    journal = make_journal(disk)
    puts = 0
    for life in range(2):
        world.revive(crash_within=None)
        store = FaultyStore(MemoryStore(bucket), world)
        if life == 0:
            world.crash_at = world.steps + 24

        async def main(store: FaultyStore = store) -> None:
            await upload_file(store, "w", "/sealed/weights", make_tools(disk), journal, options=OPTIONS)

        assert run_process(world, main) is (life == 1)
        puts += store.counts["put_part"]
    assert 10 < puts <= 10 + OPTIONS.concurrency


def test_a_completed_upload_whose_answer_died_with_the_process_is_not_repeated() -> None:
    """The next life finds the object with its own write-id and sends nothing."""
    world = World(4)
    disk = make_disk(world)
    bucket = MemoryBucket()
    journal = make_journal(disk)

    async def main(store: FaultyStore) -> None:
        got = await upload_file(store, "w", "/sealed/weights", make_tools(disk), journal, options=OPTIONS)
        assert got.digest == digest_of(BODY)

    first = FaultyStore(MemoryStore(bucket), world)
    assert not run_process(_dying_at(world, "complete_upload answered w"), lambda: main(first))
    world.revive(crash_within=None)
    second = FaultyStore(MemoryStore(bucket), world)
    assert run_process(world, lambda: main(second))
    assert second.counts == {"list_parts": 1, "head": 2}


def _dying_at(world: World, name: str) -> World:
    """Make the world die when the step ``name`` comes."""
    plain = world.step

    def step(found: str) -> None:
        if found == name and not world.dead and world.crash_at is None:
            world.crash_at = world.steps + 1
        plain(found)

    world.step = step  # type: ignore[method-assign]  # the test decides when this one world ends
    return world


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1])
def test_small_files_are_one_request(size: int) -> None:
    """Up to one part a file is one put; its digest is right, empty or not."""
    world = World(1)
    body = BODY[:size]
    disk = make_disk(world, body)
    bucket = MemoryBucket()
    store = FaultyStore(MemoryStore(bucket), world)

    async def main() -> None:
        got = await upload_file(
            store, "w", "/sealed/weights", make_tools(disk), make_journal(disk), options=OPTIONS
        )
        assert (got.size, got.digest, got.sent_bytes) == (size, digest_of(body), size)

    assert run_process(world, main)
    assert whole(bucket) == body
    assert store.counts == (
        {"put": 1} if size <= PART else {"begin_upload": 1, "put_part": 2, "complete_upload": 1}
    )


def test_a_file_that_is_written_meanwhile_becomes_no_object() -> None:
    """A trainer that overwrites in place during the upload is found before anything is visible."""
    world = World(1)
    disk = make_disk(world)
    bucket = MemoryBucket()

    def overwrite(size: int) -> None:
        if size and disk.live["/sealed/weights"].live[0] != 0:
            disk.write_at("/sealed/weights", 0, b"\0")

    async def main() -> None:
        with pytest.raises(IntegrityError, match="changed while it was uploaded"):
            await upload_file(
                MemoryStore(bucket),
                "w",
                "/sealed/weights",
                make_tools(disk),
                make_journal(disk),
                options=OPTIONS,
                progress=overwrite,
            )

    assert run_process(world, main)
    assert not bucket.objects


def test_parts_that_the_store_holds_wrong_are_sent_again() -> None:
    """What another process left under the upload's number is compared by checksum, not believed."""
    world = World(1)
    disk = make_disk(world)
    bucket = MemoryBucket()
    journal = make_journal(disk)

    async def main() -> None:
        store = MemoryStore(bucket)
        upload_id = await store.begin_upload("w")
        await store.put_part("w", upload_id, 1, b"?" * PART)
        await store.put_part("w", upload_id, 2, BODY[PART : 2 * PART])
        status = disk.stat("/sealed/weights")
        note = {
            "bytes": status.size,
            "mtime_ns": status.mtime_ns,
            "part_bytes": PART,
            "upload_id": upload_id,
            "write_id": "",
        }
        journal.put("upload", "memory/w", note)
        got = await upload_file(store, "w", "/sealed/weights", make_tools(disk), journal, options=OPTIONS)
        assert got.sent_bytes == len(BODY) - PART

    assert run_process(world, main)
    assert whole(bucket) == BODY


def test_stores_with_few_parts_get_larger_ones() -> None:
    """The part grows until the file fits the number of parts that the store allows."""
    world = World(1)
    disk = make_disk(world)
    bucket = MemoryBucket()
    inner = MemoryStore(
        bucket, properties=StoreProperties("few", part_bytes_min=1, part_bytes_max=1 << 30, parts_max=4)
    )
    store = FaultyStore(inner, world)

    async def main() -> None:
        await upload_file(
            store, "w", "/sealed/weights", make_tools(disk), make_journal(disk), options=OPTIONS
        )

    assert run_process(world, main)
    assert whole(bucket) == BODY and store.counts["put_part"] <= 4


def test_stale_uploads_are_aborted_and_wanted_ones_kept() -> None:
    """What an earlier run left behind is removed; what is still being sent is not."""
    bucket = MemoryBucket()

    async def main() -> None:
        store = MemoryStore(bucket)
        for key in ("run/a", "run/b", "other/c"):
            await store.begin_upload(key)
        assert await abort_stale_uploads(store, "run/", frozenset({"run/a"})) == 1
        assert [key async for key, _ in store.list_uploads()] == ["other/c", "run/a"]

    assert run_process(World(1), main)
