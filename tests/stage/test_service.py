"""The staging service: demand before prefetching, many readers, and every failure kept to itself and shown."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from stager.errors import (
    Exhausted,
    IntegrityError,
    NotFound,
    OutOfSpace,
    PermissionDenied,
    StagerError,
    Unavailable,
    UsageError,
)
from stager.formats.batches import BatchGeometry, EpochBatches, encode_order
from stager.formats.manifest import DatasetManifest
from stager.formats.order import EpochOrder, OrderPlan
from stager.formats.wire import AnnounceRequest, OpenRequest, WantRequest
from stager.prefetch.service import StagingService
from stager.store.api import ObjectStore
from stager.store.memory import MemoryStore
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import World, run_process
from tests.stage.kit import Act, Asked, ScriptedStore, make_dataset
from tests.stage.material import announcement, make_service, running

ROOT = "/cache"
SOURCE = "mem://dataset"


async def dataset_of(service: StagingService) -> str:
    return (await service.open(OpenRequest(SOURCE, 600.0))).dataset


def simulate(main: Callable[[], Coroutine[Any, Any, None]], world: World | None = None) -> None:
    assert run_process(world or World(1), main)


def test_a_wanted_shard_does_not_queue_behind_prefetching() -> None:
    """While prefetching stands still in all its slots, a reader's shard comes."""
    dataset = make_dataset(1, [2000] * 10)
    last = dataset.names[-1]

    def script(number: int, asked: Asked) -> Act | None:
        return Act(stall_after=0) if asked.key not in (last, "manifest.json") else None

    async def main() -> None:
        store = ScriptedStore(MemoryStore(), script)
        await dataset.put_into(store.inner)
        service, cache = make_service(store, SimulatedDisk(World(1)), ROOT, memory_bytes=64 << 20)
        async with running(service):
            identity = await dataset_of(service)
            await asyncio.sleep(1)
            assert len(cache.coming) == 3
            await service.want(WantRequest(identity, last, 10.0))

    simulate(main)


def test_a_shard_that_is_wanted_while_it_comes_becomes_urgent() -> None:
    """Nothing is fetched twice when a reader asks for what is being prefetched, and it goes by the reader's priority."""
    dataset = make_dataset(1, [20_000])
    [name] = dataset.names

    async def main() -> None:
        store = ScriptedStore(
            MemoryStore(), lambda number, asked: Act(drip_s=0.01) if asked.key == name else None
        )
        await dataset.put_into(store.inner)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT)
        async with running(service):
            identity = await dataset_of(service)
            await asyncio.sleep(20)
            assert not service.status()["coming"][f"{identity}/{name}"]["wanted"]
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(service.want(WantRequest(identity, name, 600.0)))
                await asyncio.sleep(1)
                assert service.status()["coming"][f"{identity}/{name}"]["wanted"]
        assert len(store.gets_of(name)) == 20

    simulate(main)


def test_the_manifest_is_fetched_again_only_when_it_changed() -> None:
    """Opening an unchanged dataset again costs a HEAD; a changed one a GET."""
    dataset, changed = make_dataset(1, [100]), make_dataset(2, [100])

    async def main() -> None:
        store = ScriptedStore(MemoryStore())
        await dataset.put_into(store.inner)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT, sources=())
        async with running(service):
            first = [await dataset_of(service) for _ in range(5)]
            assert len(set(first)) == 1
            assert len(store.gets_of("manifest.json")) == 1
            assert store.other_calls == ["head"] * 4
            await changed.put_into(store.inner)
            assert await dataset_of(service) not in first
            assert service.status()["datasets"][0]["changes"] == 1

    simulate(main)


def test_shards_of_a_dataset_that_was_packed_anew_say_so() -> None:
    """A reader of the old content learns why its shards do not fit any more."""
    dataset, changed = make_dataset(1, [100, 100]), make_dataset(2, [100, 100])

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT, sources=())
        async with running(service):
            identity = await dataset_of(service)
            await changed.put_into(store)
            with pytest.raises(IntegrityError, match=r"shard-000001\.tar.*packed anew"):
                await service.want(WantRequest(identity, "shard-000001.tar", 60.0))

    simulate(main)


def test_a_restarted_daemon_serves_readers_that_do_not_open_again() -> None:
    """A reader that knows its dataset only asks for shards; the store is found from what the node knows."""
    dataset = make_dataset(1, [100, 100])
    disk = SimulatedDisk(World(1))
    store = MemoryStore()
    known: list[str] = []

    async def before() -> None:
        await dataset.put_into(store)
        service, _ = make_service(store, disk, ROOT, sources=())
        async with running(service):
            known.append(await dataset_of(service))

    async def after() -> None:
        service, _ = make_service(store, disk, ROOT, sources=())
        async with running(service):
            await service.want(WantRequest(known[0], dataset.names[1], 60.0))

    simulate(before)
    simulate(after)


@pytest.mark.parametrize("error", [Unavailable, Exhausted])
def test_a_bucket_that_is_away_is_waited_for(error: type[StagerError]) -> None:
    """A reader waits through an outage, whether the store still retries or has given up, and the state is shown."""
    dataset = make_dataset(1, [100])
    [name] = dataset.names

    async def main() -> None:
        away = [False]
        store = ScriptedStore(
            MemoryStore(),
            lambda number, asked: Act(refuse=lambda: error("away", subject="x")) if away[0] else None,
        )
        await dataset.put_into(store.inner)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT, sources=())
        async with running(service), asyncio.TaskGroup() as group:
            identity = await dataset_of(service)
            away[0] = True
            group.create_task(service.want(WantRequest(identity, name, 3600.0)))
            await asyncio.sleep(600)
            status = service.status()
            assert status["failures"] == {f"{identity}/{name}": "away"} and status["degraded"]
            away[0] = False
            await asyncio.sleep(60)
            assert service.status()["published"] == 1 and not service.status()["degraded"]

    simulate(main)


def test_a_configured_dataset_that_cannot_be_opened_is_waited_for() -> None:
    """Neither a missing manifest nor a refusal ends the daemon; readiness waits, the reason is shown."""
    dataset = make_dataset(1, [100])

    async def main() -> None:
        refusals: list[StagerError] = [PermissionDenied("no rights", subject="x")]
        store = ScriptedStore(
            MemoryStore(),
            lambda number, asked: Act(refuse=lambda: refusals[0]) if refusals else None,
        )
        service, cache = make_service(store, SimulatedDisk(World(1)), ROOT)
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(service.run(ready.set))
            await asyncio.sleep(100)
            assert service.status()["problems"] == {SOURCE: "no rights"} and not ready.is_set()
            refusals.clear()
            await asyncio.sleep(100)
            assert "manifest.json" in service.status()["problems"][SOURCE] and not ready.is_set()
            await dataset.put_into(store.inner)
            await asyncio.sleep(100)
            assert ready.is_set() and service.status()["problems"] == {} and len(cache.shards) == 1
            task.cancel()

    simulate(main)


def test_a_full_disk_gives_up_shards_for_what_is_wanted() -> None:
    """Where the disk holds less than the bound, old shards make room; where nothing is left, the reader is told."""
    dataset = make_dataset(1, [3000, 3000, 3000, 3000])
    world = World(1)
    # Room for two shards and the papers around them.
    disk = SimulatedDisk(world, capacity_bytes=9000)

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, cache = make_service(store, disk, ROOT, sources=())
        async with running(service):
            identity = await dataset_of(service)
            for name in [*dataset.names, *dataset.names]:
                path = (await service.want(WantRequest(identity, name, 60.0))).path
                assert bytes(disk.live[path].live) == dataset.bodies[name]
            assert len(cache.shards) == 2
            disk.capacity_bytes = 1000
            await asyncio.sleep(70)
            with pytest.raises(OutOfSpace):
                await service.want(WantRequest(identity, dataset.names[0], 60.0))

    simulate(main, world)


def test_a_cache_that_cannot_be_tidied_is_shown_and_recovers() -> None:
    """A disk that refuses to unlink costs prefetching, not the daemon, and not the bound."""
    dataset = make_dataset(1, [3000] * 4)
    disk = SimulatedDisk(World(1))
    whole = disk.remove

    def refusing(path: str) -> None:
        if path.startswith("/cache/shards/"):
            raise PermissionDenied(f"cannot remove `{path}`: Read-only file system", subject=path)
        whole(path)

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, cache = make_service(store, disk, ROOT, sources=(), capacity_bytes=6000)
        async with running(service), asyncio.TaskGroup() as group:
            identity = await dataset_of(service)
            for name in dataset.names[:2]:
                await service.want(WantRequest(identity, name, 60.0))
            disk.remove = refusing  # type: ignore[method-assign]
            group.create_task(service.want(WantRequest(identity, dataset.names[2], 600.0)))
            await asyncio.sleep(60)
            assert "Read-only" in service.status()["problems"]["cache"]
            assert cache.used_bytes == 6000 and service.status()["degraded"]
            disk.remove = whole  # type: ignore[method-assign]
            await asyncio.sleep(60)
            assert "cache" not in service.status()["problems"]

    simulate(main)


def test_a_cache_that_somebody_removed_is_filled_again() -> None:
    """With every file and folder gone under the running daemon, a reader still gets its shard."""
    dataset = make_dataset(1, [3000] * 2)
    disk = SimulatedDisk(World(1))

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, _ = make_service(store, disk, ROOT)
        async with running(service):
            identity = await dataset_of(service)
            await service.want(WantRequest(identity, dataset.names[0], 60.0))
            disk.remove_tree(ROOT)
            for name in dataset.names:
                path = (await service.want(WantRequest(identity, name, 600.0))).path
                assert bytes(disk.live[path].live) == dataset.bodies[name]

    simulate(main)


def test_announcements_that_do_not_fit_are_refused() -> None:
    """An unknown dataset, and an order of other content, are errors that say what to do."""
    dataset, other = make_dataset(1, [100]), make_dataset(2, [100])

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT)
        async with running(service):
            identity = await dataset_of(service)
            with pytest.raises(NotFound, match="open the dataset again"):
                service.announce(announcement("0" * 16, dataset.manifest))
            with pytest.raises(UsageError, match="changed"):
                service.announce(announcement(identity, other.manifest))

    simulate(main)


def test_all_readers_of_a_node_need_their_caches_together() -> None:
    """Two ranks with lanes of their own need twice the cache of one; a rank that announces again needs no more."""
    dataset = make_dataset(1, [1000] * 16)

    def rank(identity: str, number: int) -> AnnounceRequest:
        plan = OrderPlan(dataset.manifest.fingerprint, seed=1, window=2, lanes=2)
        order = encode_order(plan, BatchGeometry(2, 2))
        return AnnounceRequest(identity, f"rank-{number}", order, 0, number, 2)

    async def main() -> None:
        store = MemoryStore()
        await dataset.put_into(store)
        service, _ = make_service(store, SimulatedDisk(World(1)), ROOT)
        async with running(service):
            identity = await dataset_of(service)
            alone = service.announce(rank(identity, 0)).cache_bytes_needed
            assert 2000 <= alone <= 3000
            both = service.announce(rank(identity, 1)).cache_bytes_needed
            assert 2 * 2000 <= both <= 2 * 3000
            assert service.announce(rank(identity, 0)).cache_bytes_needed == both

    simulate(main)


SEEDS = [int(os.environ["STAGER_SIM_SEED"])] if "STAGER_SIM_SEED" in os.environ else list(range(12))


async def read_epochs(
    service: StagingService,
    disk: SimulatedDisk,
    bodies: dict[str, bytes],
    manifest: DatasetManifest,
    *,
    rank: int,
    world: int,
    epochs: int,
    chance: random.Random,
) -> None:
    """What a rank of a training job does: announce, open what its next batch needs, ask for what is not there."""
    identity = await dataset_of(service)
    geometry = BatchGeometry(2 * world, world)
    for epoch in range(epochs):
        plan = OrderPlan(manifest.fingerprint, seed=3, epoch=epoch, lanes=world, window=2)
        order = EpochOrder(plan, [shard.samples for shard in manifest.shards])
        batches = EpochBatches(order, geometry)
        for step in range(batches.steps):
            position = step * geometry.global_batch
            service.announce(
                AnnounceRequest(identity, f"rank-{rank}", encode_order(plan, geometry), position, rank, world)
            )
            for place, _ in batches.rank_batch(step, rank).places:
                name = manifest.shards[place].name
                path = f"{ROOT}/shards/{identity}/{name}"
                if path not in disk.live:
                    path = (await service.want(WantRequest(identity, name, 3600.0))).path
                assert bytes(disk.live[path].live) == bodies[name]
            await asyncio.sleep(chance.random())


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_read_their_epochs_through_deaths_and_faults(seed: int) -> None:
    """Readers of several ranks over a small cache and a failing store: always right bytes, never over the bound."""
    dataset = make_dataset(seed, [1000 + 37 * number for number in range(12)], samples=6)
    world = World(seed)
    disk = SimulatedDisk(world)
    bucket = MemoryStore()
    limit = 8 * 1500
    ranks = 1 + seed % 3

    async def fill() -> None:
        await dataset.put_into(bucket)

    simulate(fill)
    for life in range(4):
        last = life == 3
        world.revive(crash_within=None if last else 600)
        store: ObjectStore = FaultyStore(bucket, world, fault_ratio=0.05)

        async def watch_bound(service: StagingService) -> None:
            while True:
                assert service.status()["cache"]["bytes"] <= limit
                await asyncio.sleep(0.1)

        async def main(
            store: ObjectStore = store,
            watch: Callable[[StagingService], Awaitable[None]] = watch_bound,
        ) -> None:
            service, _ = make_service(store, disk, ROOT, capacity_bytes=limit, seed=seed, sources=())
            async with running(service), asyncio.TaskGroup() as group:
                watching = group.create_task(watch(service))
                async with asyncio.TaskGroup() as readers:
                    for rank in range(ranks):
                        readers.create_task(
                            read_epochs(
                                service,
                                disk,
                                dict(dataset.bodies),
                                dataset.manifest,
                                rank=rank,
                                world=ranks,
                                epochs=2,
                                chance=random.Random(seed * 10 + rank),
                            )
                        )
                watching.cancel()

        ended = run_process(world, main)
        assert ended or not last
        if not ended:
            disk.crash() if world.random.random() < 0.5 else disk.kill()
        for path, inode in disk.live.items():
            if path.startswith(f"{ROOT}/shards/"):
                assert bytes(inode.live) == dataset.bodies[os.path.basename(path)]
        disk.kill()
