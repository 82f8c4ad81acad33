"""Staging on the simulation: crashes at any step, faults in any call, and the invariants after each."""

from __future__ import annotations

import asyncio
import os

import pytest

from stager.errors import DeadlineExceeded, IntegrityError, NotFound, OutOfSpace, StagerError
from stager.formats.wire import OpenRequest, WantRequest
from stager.store.memory import MemoryBucket, MemoryStore
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import World, run_process
from tests.stage.material import (
    PART_BYTES,
    announcement,
    make_bodies,
    make_manifest,
    make_service,
    put_dataset,
    running,
)

SEEDS = [int(os.environ["STAGER_SIM_SEED"])] if "STAGER_SIM_SEED" in os.environ else list(range(60))
ROOT = "/cache"
SOURCE = "mem://dataset"


def filled_bucket(bodies: dict[str, bytes]) -> MemoryBucket:
    bucket = MemoryBucket()

    async def fill() -> None:
        await put_dataset(MemoryStore(bucket), bodies)

    run_process(World(0), fill)
    return bucket


def check_visible(disk: SimulatedDisk, bodies: dict[str, bytes]) -> int:
    """Every visible shard is whole and right; returns how many there are."""
    visible = [path for path in disk.live if path.startswith(f"{ROOT}/shards/")]
    for path in visible:
        assert bytes(disk.live[path].live) == bodies[os.path.basename(path)], path
    return len(visible)


@pytest.mark.parametrize("seed", SEEDS)
def test_staging_survives_any_death(seed: int) -> None:
    """Lives that end at random steps, by kill or power cut, over a failing store; the last one ends with everything."""
    bodies = make_bodies(6)
    bucket = filled_bucket(bodies)
    world = World(seed)
    disk = SimulatedDisk(world)
    limit = 4 * max(len(body) for body in bodies.values()) if seed % 2 else 1 << 30
    for life in range(8):
        last = life == 7
        world.revive(crash_within=None if last else 250)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.0 if last else 0.15)

        async def main(store: FaultyStore = store) -> None:
            service, cache = make_service(store, disk, ROOT, capacity_bytes=limit, seed=seed)
            async with running(service):
                for name in bodies:
                    opened = await service.open(OpenRequest(SOURCE, 600.0))
                    await service.want(WantRequest(opened.dataset, name, 600.0))
                    assert cache.used_bytes <= limit
                    assert disk.used_bytes() <= limit + 20_000

        try:
            ended = run_process(world, main)
        except BaseExceptionGroup as group:
            # Without a crash a wait may fail for a store that fails too often; that is an error, not a loss.
            assert not last and group.subgroup(StagerError) is not None
            ended = True
        if not ended:
            disk.crash() if world.random.random() < 0.5 else disk.kill()
        check_visible(disk, bodies)
        disk.kill()
    if not seed % 2:
        assert check_visible(disk, bodies) == len(bodies)


@pytest.mark.parametrize("lost", [False, True])
def test_any_one_failing_call_is_survived(lost: bool) -> None:
    """Whichever call fails, before its effect or in the middle of its body, every shard arrives."""
    bodies = make_bodies(3)
    bucket = filled_bucket(bodies)
    number = 0
    while True:
        number += 1
        world = World(number)
        disk = SimulatedDisk(world)
        store = FaultyStore(MemoryStore(bucket), world, fail_call=number, lost=lost)

        async def main(store: FaultyStore = store, disk: SimulatedDisk = disk) -> None:
            service, _ = make_service(store, disk, ROOT)
            async with running(service):
                dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
                for name in bodies:
                    await service.want(WantRequest(dataset, name, 60.0))

        assert run_process(world, main)
        assert check_visible(disk, bodies) == len(bodies)
        if store.calls < number:
            break
    assert number > 12


def test_requests_are_one_a_part_and_never_a_list() -> None:
    """A dataset costs one GET for its manifest and one for every part, no LIST and no HEAD."""
    bodies = make_bodies(4)
    world = World(1)
    store = FaultyStore(MemoryStore(filled_bucket(bodies)), world)

    async def main() -> None:
        service, cache = make_service(store, SimulatedDisk(world), ROOT)
        async with running(service), asyncio.timeout(600):
            while len(cache.shards) < len(bodies):
                await asyncio.sleep(1)

    assert run_process(world, main)
    parts = sum(-(-len(body) // PART_BYTES) for body in bodies.values())
    assert store.counts == {"get": parts + 1}


def test_a_killed_download_goes_on_where_it_was() -> None:
    """After a kill the parts that were written are not fetched again."""
    bodies = make_bodies(1, size=20_000)
    bucket = filled_bucket(bodies)
    world = World(5)
    disk = SimulatedDisk(world)
    [name] = bodies
    sent = 0
    for life in range(2):
        store = FaultyStore(MemoryStore(bucket), world)
        world.revive(crash_within=None)
        if life == 0:
            world.crash_at = world.steps + 120

        async def main(store: FaultyStore = store) -> None:
            service, _ = make_service(store, disk, ROOT)
            async with running(service):
                dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
                await service.want(WantRequest(dataset, name, 60.0))

        assert run_process(world, main) is (life == 1)
        disk.kill()
        sent += store.counts["get"] - 1  # the manifest
    parts = -(-len(bodies[name]) // PART_BYTES)
    # Two parts were in flight.
    assert parts < sent <= parts + 2
    assert check_visible(disk, bodies) == 1


@pytest.mark.parametrize("damage", ["shorter", "longer", "altered", "gone"])
def test_a_damaged_shard_is_named_and_never_visible(damage: str) -> None:
    """Truncated, extended, altered or missing in the bucket: the waiter learns which shard, the others go on."""
    bodies = make_bodies(3)
    bucket = filled_bucket(bodies)
    world = World(2)
    disk = SimulatedDisk(world)
    bad, good = "shard-000001.tar", "shard-000002.tar"
    body = bodies[bad]

    async def main() -> None:
        plain = MemoryStore(bucket)
        if damage == "gone":
            await plain.delete([bad])
        else:
            spoilt = {"shorter": body[:-1], "longer": body + b"x", "altered": b"?" + body[1:]}[damage]
            await plain.put(bad, spoilt)
        service, _ = make_service(plain, disk, ROOT)
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            with pytest.raises(NotFound if damage == "gone" else IntegrityError, match=bad):
                await service.want(WantRequest(dataset, bad, 60.0))
            await service.want(WantRequest(dataset, good, 60.0))
            assert f"{dataset}/{bad}" in service.status()["failures"]
            await plain.put(bad, body)
            await service.want(WantRequest(dataset, bad, 600.0))

    assert run_process(world, main)
    assert check_visible(disk, bodies) == 3


def test_a_damaged_copy_is_set_aside_and_fetched_again() -> None:
    """A reader that finds its shard damaged gets a good one; a sound copy is kept."""
    bodies = make_bodies(2)
    bucket = filled_bucket(bodies)
    world = World(2)
    disk = SimulatedDisk(world)
    store = FaultyStore(MemoryStore(bucket), world)

    async def main() -> None:
        service, _ = make_service(store, disk, ROOT)
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            paths = [(await service.want(WantRequest(dataset, name, 60.0))).path for name in bodies]
            before = store.counts["get"]
            disk.live[paths[0]].live[7] ^= 1
            for name in bodies:
                await service.want(WantRequest(dataset, name, 60.0, damaged=True))
            first = next(iter(bodies.values()))
            assert store.counts["get"] - before == -(-len(first) // PART_BYTES)
            assert service.status()["cache"]["quarantined"] == 1

    assert run_process(world, main)
    assert check_visible(disk, bodies) == 2


def test_a_restart_needs_no_bucket_for_what_is_here() -> None:
    """With the store away, a known dataset opens from the node's own manifest and its shards are served."""
    bodies = make_bodies(2)
    bucket = filled_bucket(bodies)
    world = World(2)
    disk = SimulatedDisk(world)

    async def fill() -> None:
        service, _ = make_service(MemoryStore(bucket), disk, ROOT)
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            for name in bodies:
                await service.want(WantRequest(dataset, name, 60.0))

    async def serve() -> None:
        away = FaultyStore(MemoryStore(bucket), world, fault_ratio=1.0)
        service, _ = make_service(away, disk, ROOT, sources=())
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            for name in bodies:
                await service.want(WantRequest(dataset, name, 60.0))

    assert run_process(world, fill)
    disk.crash()
    assert run_process(world, serve)


def test_a_changed_dataset_is_another_dataset() -> None:
    """New content under the same URL gets its own place; the old shards are not served for it."""
    world = World(2)
    disk = SimulatedDisk(world)
    bucket = filled_bucket(make_bodies(2, seed=1))

    async def main() -> None:
        store = MemoryStore(bucket)
        service, _ = make_service(store, disk, ROOT)
        async with running(service):
            first = await service.open(OpenRequest(SOURCE, 60.0))
            changed = make_bodies(2, seed=9)
            await put_dataset(store, changed)
            second = await service.open(OpenRequest(SOURCE, 60.0))
            assert first.dataset != second.dataset and first.fingerprint != second.fingerprint
            path = (await service.want(WantRequest(second.dataset, "shard-000000.tar", 60.0))).path
            assert bytes(disk.live[path].live) == changed["shard-000000.tar"]

    assert run_process(world, main)


def test_what_a_reader_needs_first_comes_first_and_what_it_has_read_goes() -> None:
    """With room for half, shards follow the announced order, and each is fetched once an epoch."""
    bodies = make_bodies(10)
    manifest = make_manifest(bodies)
    world = World(2)
    store = FaultyStore(MemoryStore(filled_bucket(bodies)), world)
    capacity = 6 * max(len(body) for body in bodies.values())

    async def main() -> None:
        service, cache = make_service(store, SimulatedDisk(world), ROOT, capacity_bytes=capacity, sources=())
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            reply = service.announce(announcement(dataset, manifest))
            assert 0 < reply.cache_bytes_needed <= capacity
            for position in range(0, manifest.samples - 20, 10):
                service.announce(announcement(dataset, manifest, position=position))
                await asyncio.sleep(30)
                assert cache.used_bytes <= capacity
        assert service.status()["published"] <= len(bodies) + 6

    assert run_process(world, main)
    assert store.counts["get"] - 1 <= sum(-(-len(body) // PART_BYTES) for body in bodies.values()) * 1.7


def test_waits_end_and_say_what_they_waited_for() -> None:
    """A store that never answers right, an unknown shard and a shard larger than the cache are errors, not hangs."""
    bodies = make_bodies(2)
    world = World(2)
    bucket = filled_bucket(bodies)

    async def main() -> None:
        store = FaultyStore(MemoryStore(bucket), world)
        service, _ = make_service(store, SimulatedDisk(world), ROOT, capacity_bytes=3550)
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            with pytest.raises(OutOfSpace, match="raise cache_bytes"):
                await service.want(WantRequest(dataset, "shard-000001.tar", 60.0))
            with pytest.raises(NotFound, match="no shard"):
                await service.want(WantRequest(dataset, "shard-9.tar", 60.0))
            await service.want(WantRequest(dataset, "shard-000000.tar", 60.0))
        store.fault_ratio = 1.0
        service, _ = make_service(store, SimulatedDisk(world), "/other", sources=())
        async with running(service):
            with pytest.raises(StagerError):
                await service.open(OpenRequest(SOURCE, 60.0))
        store.fault_ratio = 0.0
        service, _ = make_service(store, SimulatedDisk(world), "/third")
        async with running(service):
            dataset = (await service.open(OpenRequest(SOURCE, 60.0))).dataset
            store.fault_ratio = 1.0
            with pytest.raises(DeadlineExceeded, match=r"shard-000001\.tar.*the last try failed"):
                await service.want(WantRequest(dataset, "shard-000001.tar", 60.0))

    assert run_process(world, main)
