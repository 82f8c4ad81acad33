"""A node's checkpoints on the simulation: killed or cut off at any step, over a failing store, replayed by a seed.

The invariants, after every death: a manifest names only objects that are there with the bytes it says; nothing that was
sealed on request is lost; the trainer's own files are as the trainer left them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import pytest

from stager.checkpoint import publish
from stager.checksum import digest_of
from stager.errors import StagerError
from stager.formats.commits import decode_checkpoint_manifest
from stager.formats.wire import SealRequest
from stager.store.memory import MemoryBucket, MemoryStore
from tests.checkpoint.material import WATCH, bodies_of, make_service, running, write_checkpoint
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import VirtualClock, World, run_process

SEEDS = [int(os.environ["STAGER_SIM_SEED"])] if "STAGER_SIM_SEED" in os.environ else list(range(40))
STEPS = (10, 20, 30)


class MemoryJournal:
    """A journal that outlives a killed process, and forgets everything when it is told to."""

    def __init__(self) -> None:
        self.notes: dict[tuple[str, str], str] = {}

    def get(self, topic: str, key: str) -> dict[str, Any] | None:
        raw = self.notes.get((topic, key))
        return None if raw is None else json.loads(raw)

    def put(self, topic: str, key: str, value: dict[str, Any]) -> None:
        self.notes[topic, key] = json.dumps(value)

    def forget(self, topic: str, key: str) -> None:
        self.notes.pop((topic, key), None)

    def keys(self, topic: str) -> list[str]:
        return sorted(key for found, key in self.notes if found == topic)


def check_commits(bucket: MemoryBucket) -> dict[str, dict[str, bytes]]:
    """Every manifest is true of the bucket; what is committed, by checkpoint and path."""
    committed = {}
    for key, found in bucket.objects.items():
        if not key.endswith("/manifest.json"):
            continue
        manifest = decode_checkpoint_manifest(found.body, of=key)
        files = {}
        for entry in manifest.files:
            held = bucket.objects.get(f"{manifest.checkpoint}/{entry.path}")
            assert held is not None, f"{manifest.checkpoint}/{entry.path} is committed and not there"
            assert digest_of(held.body) == entry.digest, f"{manifest.checkpoint}/{entry.path} has other bytes"
            files[entry.path] = held.body
        committed[manifest.checkpoint] = files
    return committed


def is_save(files: dict[str, bytes], step: int, save: int) -> bool:
    """Whether files are those of one save, no more, no less, no mixture."""
    return {path: body for path, body in files.items() if path[0] != "."} == bodies_of(step, save=save)


def check_saves(bucket: MemoryBucket, saves: int = 1) -> set[int]:
    """Every commit is one whole save; the steps that are committed."""
    steps = set()
    for name, files in check_commits(bucket).items():
        step = int(name.split("-")[1].split(".")[0])
        assert any(is_save(files, step, save) for save in range(1, saves + 1)), f"{name} is a mixture"
        steps.add(step)
    return steps


@pytest.mark.parametrize("seed", SEEDS)
def test_any_death_leaves_whole_commits(seed: int) -> None:
    """Lives that end at random steps, by kill or power cut; sometimes the journal is lost. The last one commits all."""
    world = World(seed)
    disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
    for step in STEPS:
        write_checkpoint(disk, f"{WATCH}/step-{step}", step)
    trainers = {path: bytes(inode.live) for path, inode in disk.live.items()}
    for life in range(8):
        last = life == 7
        world.revive(crash_within=None if last else 400)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.0 if last else 0.1)

        async def main(store: FaultyStore = store, life: int = life, last: bool = last) -> None:
            service = make_service(store, disk, journal, VirtualClock(), seed=seed * 100 + life)
            async with running(service), asyncio.timeout(3600):
                await service.drain()
                if last:
                    assert service.status()["vanished"] == 0

        ended = run_process(world, main)
        if not ended:
            disk.crash() if world.random.random() < 0.5 else disk.kill()
            if world.random.random() < 0.3:
                journal.notes.clear()
        check_saves(bucket)
        disk.kill()
    assert check_saves(bucket) == set(STEPS)
    assert len(check_commits(bucket)) == len(STEPS), "a restart took the same bytes for another save"
    assert {path: bytes(disk.live[path].live) for path in trainers} == trainers


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_a_trainer_that_saves_again_and_again(seed: int) -> None:
    """Steps are overwritten in place and removed while the node dies again and again; no commit is ever a mixture."""
    world = World(seed)
    chance = random.Random(seed)
    disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
    latest: dict[int, int] = {}
    for life in range(6):
        last = life == 5
        world.revive(crash_within=None if last else 600)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.05)

        async def train() -> None:
            for _ in range(3):
                step = chance.choice(STEPS)
                if chance.random() < 0.3:
                    latest.pop(step, None)
                    disk.remove_tree(f"{WATCH}/step-{step}")
                else:
                    latest[step] = chance.randint(1, 3)
                    write_checkpoint(disk, f"{WATCH}/step-{step}", step, save=latest[step])
                await asyncio.sleep(chance.random() * 3)

        async def main(store: FaultyStore = store, life: int = life, last: bool = last) -> None:
            service = make_service(store, disk, journal, VirtualClock(), seed=seed * 100 + life)
            async with running(service), asyncio.timeout(3600):
                await train()
                await service.drain()
                if last:
                    await service.drain()

        if not run_process(world, main):
            disk.kill()
            world.dead, world.crash_at = False, None
            # The trainer's writes were part of the process that died; it starts over with what it can trust.
            for step in STEPS:
                disk.remove_tree(f"{WATCH}/step-{step}")
            latest.clear()
        check_saves(bucket, saves=3)
    committed = check_commits(bucket)
    for step, save in latest.items():
        names = [name for name in committed if name.split(".")[0] == f"step-{step}"]
        assert any(is_save(committed[name], step, save) for name in names), f"step {step} is not committed"


@pytest.mark.parametrize("lost", [False, True])
def test_any_one_failing_call_is_survived(lost: bool) -> None:
    """Whichever call to the store fails, refused or with its answer lost, the checkpoint is committed once."""
    number = 0
    while True:
        number += 1
        world = World(number)
        disk, bucket = SimulatedDisk(world), MemoryBucket()
        write_checkpoint(disk, f"{WATCH}/step-10", 10)
        store = FaultyStore(MemoryStore(bucket), world, fail_call=number, lost=lost)

        async def main(store: FaultyStore = store, disk: SimulatedDisk = disk) -> None:
            service = make_service(store, disk, MemoryJournal(), VirtualClock())
            async with running(service), asyncio.timeout(3600):
                await service.drain()

        assert run_process(world, main)
        assert list(check_commits(bucket)) == ["step-10"] and check_saves(bucket) == {10}
        assert not bucket.uploads
        if store.calls < number:
            break
    assert number > 15


def _count_steps() -> int:
    world = World(1)
    disk = SimulatedDisk(world)
    write_checkpoint(disk, f"{WATCH}/step-10", 10)
    world.steps = 0
    _live(world, disk, MemoryBucket(), MemoryJournal(), life=0)
    return world.steps


def _live(
    world: World, disk: SimulatedDisk, bucket: MemoryBucket, journal: MemoryJournal, *, life: int
) -> tuple[bool, FaultyStore]:
    """One life over what is there."""
    store = FaultyStore(MemoryStore(bucket), world)

    async def main() -> None:
        service = make_service(store, disk, journal, VirtualClock(), seed=life)
        async with running(service), asyncio.timeout(3600):
            await service.drain()

    return run_process(world, main), store


@pytest.mark.parametrize("power", [False, True])
def test_killed_at_every_step(power: bool) -> None:
    """Killed at each elementary step of disk and store in turn: the next life commits the same bytes under the same name."""
    steps = _count_steps()
    assert steps > 60
    for at in range(1, steps + 1):
        world = World(at)
        disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
        write_checkpoint(disk, f"{WATCH}/step-10", 10)
        world.steps, world.crash_at = 0, at
        ended, _ = _live(world, disk, bucket, journal, life=0)
        if not ended:
            disk.crash() if power else disk.kill()
        check_saves(bucket)
        world.dead, world.crash_at = False, None
        again, _ = _live(world, disk, bucket, journal, life=1)
        assert again
        assert list(check_commits(bucket)) == ["step-10"], f"killed at step {at}"
        assert check_saves(bucket) == {10}


def test_a_finished_file_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each step: the second life sends at most one part a file in flight, of what the first had sent."""
    # Notes as for large files, each on its own: a batch of small ones is sent again at a death, up to 8 MiB of them.
    monkeypatch.setattr(publish, "NOTE_FILES", 1)
    sizes = {path: len(body) for path, body in bodies_of(10).items()}
    for at in range(1, _count_steps() + 1):
        world = World(at)
        disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
        write_checkpoint(disk, f"{WATCH}/step-10", 10)
        world.steps, world.crash_at = 0, at
        _live(world, disk, bucket, journal, life=0)
        disk.kill()
        held = sum(len(found.body) for key, found in bucket.objects.items() if key.startswith("step-10/"))
        held += sum(len(body) for upload in bucket.uploads.values() for _, body in upload.parts.values())
        world.dead, world.crash_at = False, None
        _, second = _live(world, disk, bucket, journal, life=1)
        in_flight = 2 * 1000 * 2  # two files at once, two parts of each
        documents = 4000  # the commit marker, the node's part, the manifest, the hint at the newest
        left = sum(sizes.values()) + documents - held
        assert second.sent_bytes <= max(0, left) + in_flight, f"killed at step {at}"


def test_a_multipart_file_goes_on_where_it_was() -> None:
    """Killed while the third part goes up, the next life sends the parts that are missing, not those that are there."""
    world = World(5)
    disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
    write_checkpoint(disk, f"{WATCH}/step-10", 10)
    world.trace.clear()
    store = FaultyStore(MemoryStore(bucket), world)
    real_put_part = store.put_part

    async def put_part(key: str, upload_id: str, number: int, body: bytes, *, crc64nvme: int | None = None):  # type: ignore[no-untyped-def]
        if number == 4:
            world.crash_at = world.steps + 1
        return await real_put_part(key, upload_id, number, body, crc64nvme=crc64nvme)

    store.put_part = put_part  # type: ignore[method-assign]

    async def main() -> None:
        service = make_service(store, disk, journal, VirtualClock())
        async with running(service), asyncio.timeout(3600):
            await service.drain()

    assert not run_process(world, main)
    held = {number for upload in bucket.uploads.values() for number in upload.parts}
    disk.kill()
    world.dead, world.crash_at = False, None
    ended, second = _live(world, disk, bucket, journal, life=1)
    assert ended and check_saves(bucket) == {10}
    # model.bin has four parts, optimizer.bin two.
    assert held and second.counts["put_part"] <= 6 - len(held)


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_what_was_sealed_on_request_is_never_lost(seed: int) -> None:
    """Once `seal` has answered, the trainer may remove its files and the machine may lose power."""
    world = World(seed)
    disk, bucket, journal = SimulatedDisk(world), MemoryBucket(), MemoryJournal()
    write_checkpoint(disk, f"{WATCH}/step-10", 10)
    acknowledged = False
    for life in range(5):
        last = life == 4
        world.revive(crash_within=None if last else 150)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.0 if last else 0.2)

        async def main(store: FaultyStore = store, life: int = life) -> None:
            nonlocal acknowledged
            service = make_service(store, disk, journal, VirtualClock(), seed=seed * 100 + life)
            async with running(service), asyncio.timeout(3600):
                if not acknowledged:
                    await service.seal(SealRequest(f"{WATCH}/step-10"))
                    acknowledged = True
                    disk.remove_tree(f"{WATCH}/step-10")
                await service.drain()

        try:
            ended = run_process(world, main)
        except BaseExceptionGroup as group:
            assert group.subgroup(StagerError) is not None
            ended = True
        if not ended:
            disk.crash()
        check_saves(bucket)
        disk.kill()
    assert acknowledged and check_saves(bucket) == {10}


def test_one_seed_is_one_trace() -> None:
    """The same seed replays the same steps of disk and store."""

    def trace() -> list[str]:
        world = World(11)
        disk = SimulatedDisk(world)
        write_checkpoint(disk, f"{WATCH}/step-10", 10)
        _live(world, disk, MemoryBucket(), MemoryJournal(), life=3)
        return world.trace

    assert trace() == trace()
