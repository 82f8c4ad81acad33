"""The simulation itself: virtual time, one seed one trace, crashes that lose what was not synced."""

from __future__ import annotations

import asyncio

import pytest

from stager.errors import StoreError
from stager.store.memory import MemoryBucket, MemoryStore
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import Stuck, VirtualClock, World, run_process


def test_days_pass_without_waiting() -> None:
    """Sleeping moves the virtual clock by exactly as much."""

    async def main() -> None:
        before = VirtualClock().wall_ns()
        await asyncio.sleep(86_400.0)
        assert round((VirtualClock().wall_ns() - before) / 1e9) == 86_400

    assert run_process(World(1), main)


def test_a_hang_is_an_error() -> None:
    """Waiting for what nobody will do fails instead of hanging the test."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_process(World(1), main)


def _noisy_life(seed: int) -> list[str]:
    world = World(seed)
    disk = SimulatedDisk(world)
    store = FaultyStore(MemoryStore(), world, fault_ratio=0.3)
    world.revive(crash_within=60)

    async def writer(name: str) -> None:
        disk.make_directory("/d")
        for number in range(10):
            disk.write_file(f"/d/{name}{number}", b"x" * 10)
            try:
                await store.put(f"{name}{number}", b"y")
            except StoreError:
                await asyncio.sleep(1)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(writer("a"))
            group.create_task(writer("b"))

    run_process(world, main)
    disk.crash()
    return [*world.trace, *sorted(disk.live)]


def test_one_seed_is_one_trace() -> None:
    """The same seed replays the same steps and the same losses; another seed does not."""
    assert _noisy_life(7) == _noisy_life(7)
    assert len({tuple(_noisy_life(seed)) for seed in range(8)}) > 4


def test_what_was_synced_survives_and_the_rest_may_not() -> None:
    """A durable publish survives every crash; an unsynced one is sometimes lost and sometimes torn."""
    outcomes = set()
    for seed in range(40):
        world = World(seed)
        disk = SimulatedDisk(world)
        disk.make_directory("/d")
        disk.write_file("/d/durable", b"kept")
        disk.write_file("/d/hasty", b"perhaps", durable=False)
        disk.crash()
        assert disk.read_at("/d/durable", 0, 100) == b"kept"
        outcomes.add(bytes(disk.live["/d/hasty"].live) if "/d/hasty" in disk.live else None)
    assert None in outcomes and b"perhaps" in outcomes and len(outcomes) > 2


def test_nothing_happens_after_death() -> None:
    """Clean-up code of a killed process changes neither disk nor bucket."""
    world = World(3)
    disk = SimulatedDisk(world)
    bucket = MemoryBucket()
    store = FaultyStore(MemoryStore(bucket), world)
    disk.make_directory("/d")
    world.crash_at = world.steps + 2

    async def main() -> None:
        try:
            disk.write_file("/d/a", b"1")
        finally:
            try:
                disk.write_file("/d/b", b"2")
            finally:
                await store.put("late", b"3")

    assert not run_process(world, main)
    assert "/d/b" not in disk.live and not bucket.objects
