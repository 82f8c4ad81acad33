"""Packing on the simulation: any death of process or machine, any failing call, and the end is the same."""

from __future__ import annotations

import pytest

from stager.errors import StoreError
from stager.formats.manifest import MANIFEST_NAME, decode_dataset_manifest
from stager.offload import InlineOffload
from stager.pack import run
from stager.pack.destination import BucketDestination, Destination, LocalDestination
from stager.pack.plan import Limits
from stager.pack.survey import PackInput, take_input
from stager.pack.workers import LocalWriter
from stager.store.api import StoreProperties
from stager.store.memory import MemoryBucket, MemoryStore
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import World, run_process

ROOT = "/out"
LIVES_MAX = 300


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> PackInput:
    root = tmp_path_factory.mktemp("input")
    for number in range(20):
        (root / f"{number:03d}.bin").write_bytes(bytes([number]) * 900)
        (root / f"{number:03d}.txt").write_bytes(b"x" * number)
    return take_input([str(root)], None, limits=Limits(shard_samples_max=3))


@pytest.fixture(scope="module")
def whole(given: PackInput) -> dict[str, bytes]:
    """What an undisturbed pack leaves."""
    bucket = MemoryBucket()
    assert live(World(0), given, BucketDestination(MemoryStore(bucket), offload=InlineOffload()))
    return {key: item.body for key, item in bucket.objects.items()}


def live(world: World, given: PackInput, destination: Destination) -> bool:
    """One process; whether it came to its end."""
    offload = InlineOffload()

    async def main() -> None:
        writer = LocalWriter(destination, given.policies, offload=offload)
        await run.pack(given, destination, lambda _: writer, offload=offload, holder="simulated")

    return run_process(world, main)


def check(found: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """Whatever is visible under its name is whole, and a manifest names only what is there."""
    for name, body in found.items():
        if name.endswith(".tar"):
            assert body == whole[name], name
    if MANIFEST_NAME in found:
        for shard in decode_dataset_manifest(found[MANIFEST_NAME]).shards:
            assert len(found[shard.name]) == shard.size


def visible(disk: SimulatedDisk) -> dict[str, bytes]:
    return {
        path.removeprefix(f"{ROOT}/"): bytes(inode.live)
        for path, inode in disk.live.items()
        if not path.startswith(f"{ROOT}/.stager/")
    }


@pytest.mark.parametrize("seed", range(25))
def test_a_directory_survives_every_death(seed: int, given: PackInput, whole: dict[str, bytes]) -> None:
    """The machine loses power at random steps; what was not synced is lost; the end is the undisturbed one."""
    world = World(seed)
    disk = SimulatedDisk(world)
    finished: dict[str, int] = {}
    for _ in range(LIVES_MAX):
        world.revive(crash_within=60)
        if live(world, given, LocalDestination(ROOT, disk=disk, offload=InlineOffload())):
            break
        disk.crash() if world.random.random() < 0.5 else disk.kill()
        check(visible(disk), whole)
        for name, inode in kept(disk).items():
            assert finished.setdefault(name, inode) == inode, f"{name} was written again"
    assert visible(disk) == whole
    assert not [path for path in disk.live if "/.stager/" in path]


def kept(disk: SimulatedDisk) -> dict[str, int]:
    """Shards with a durable record, by inode."""
    folder = f"{ROOT}/.stager/pack/shards/"
    names = [
        path.removeprefix(folder).removesuffix(".json") for path in disk.durable if path.startswith(folder)
    ]
    return {name: disk.durable[f"{ROOT}/{name}"].number for name in names if not name.endswith(".tmp")}


@pytest.mark.parametrize("seed", range(25))
def test_a_bucket_survives_deaths_and_failing_calls(
    seed: int, given: PackInput, whole: dict[str, bytes]
) -> None:
    """Calls fail before or after their effect, and the process dies; no shard differs, no upload stays open."""
    world = World(seed)
    bucket = MemoryBucket()
    properties = StoreProperties("memory", part_bytes_min=1, part_bytes_max=2048)
    store = FaultyStore(MemoryStore(bucket, properties=properties), world, fault_ratio=0.03)
    for _ in range(LIVES_MAX):
        world.revive(crash_within=80)
        try:
            if live(world, given, BucketDestination(store, offload=InlineOffload())):
                break
        except StoreError:
            pass
        check({key: item.body for key, item in bucket.objects.items()}, whole)
    assert {key: item.body for key, item in bucket.objects.items()} == whole
    assert not bucket.uploads


@pytest.mark.parametrize("lost", [False, True])
def test_every_single_call_may_fail(given: PackInput, whole: dict[str, bytes], lost: bool) -> None:
    """For every n the n-th call fails once; the next pack ends as if nothing had been."""
    failing, failed = 1, 0
    while True:
        world, bucket = World(failing), MemoryBucket()
        properties = StoreProperties("memory", part_bytes_min=1, part_bytes_max=4096)
        store = FaultyStore(MemoryStore(bucket, properties=properties), world, fail_call=failing, lost=lost)
        try:
            live(world, given, BucketDestination(store, offload=InlineOffload()))
        except StoreError:
            failed += 1
            live(world, given, BucketDestination(store, offload=InlineOffload()))
        assert {key: item.body for key, item in bucket.objects.items()} == whole
        assert not bucket.uploads
        if store.calls < failing:
            break
        failing += 1
    assert failed > 30
