"""Commits, retention and restore on the simulation: no death and no lost answer leaves anything half-visible."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from stager.budget import ByteBudget
from stager.checkpoint.commit import (
    Damaged,
    list_manifests,
    missing_parts,
    newest,
    publish_part,
    read_manifest,
    try_commit,
)
from stager.checkpoint.keep import KeepRule, Retention, plan_retention
from stager.checkpoint.restore import RestoreOptions, choose, restore
from stager.checkpoint.retain import carry_out, finish_retirements
from stager.checksum import digest_of
from stager.errors import AlreadyExists, IntegrityError, NotFound, OutOfSpace, StoreError
from stager.formats.commits import CheckpointManifest, CheckpointPart, CommitMarker, FileEntry
from stager.formats.names import join_key, manifest_key
from stager.offload import InlineOffload
from stager.store.api import ObjectStore
from stager.store.memory import MemoryBucket, MemoryStore
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools
from tests.sim.disk import SimulatedDisk
from tests.sim.store import FaultyStore
from tests.sim.world import VirtualClock, World, run_process

SEEDS = [int(os.environ["STAGER_SIM_SEED"])] if "STAGER_SIM_SEED" in os.environ else list(range(40))
OPTIONS = RestoreOptions(2, DownloadOptions(part_bytes=1000, concurrency=2, attempts=5, verify_sha256=True))


def make_tools(disk: SimulatedDisk, seed: int = 0) -> Tools:
    return Tools(disk, InlineOffload(), memory=ByteBudget(1 << 20), random=random.Random(seed))


def files_of(step: int, *, node: int = 0) -> dict[str, bytes]:
    chance = random.Random(step * 100 + node)
    return {f"__{node}_0.distcp": chance.randbytes(3300), f"shared/{node}.json": b"{}", f"empty-{node}": b""}


async def put_files(store: ObjectStore, checkpoint: str, files: dict[str, bytes]) -> tuple[FileEntry, ...]:
    for path, body in files.items():
        await store.put(join_key(checkpoint, path), body)
    return tuple(FileEntry(path, len(body), digest_of(body)) for path, body in sorted(files.items()))


async def commit_step(store: ObjectStore, step: int, tools: Tools, *, nodes: int = 1) -> CheckpointManifest:
    name = f"step-{step}"
    for node in range(nodes):
        entries = await put_files(store, name, files_of(step, node=node))
        marker = CommitMarker(step, {"loss": 1.0 / (step + 1)}, {"position": step})
        await publish_part(store, CheckpointPart(name, node, nodes, entries, marker), tools)
    manifest = await try_commit(
        store, name, layout="torch_dcp", nodes=nodes, tools=tools, clock=VirtualClock()
    )
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("lost", [False, True])
def test_a_commit_survives_any_one_failing_call(lost: bool) -> None:
    """Refused or with its answer lost, whichever call it was, the commit ends as one manifest, the writer's own."""
    number = 0
    while True:
        number += 1
        world = World(number)
        bucket = MemoryBucket()
        store = FaultyStore(MemoryStore(bucket), world, fail_call=number, lost=lost)

        async def main(store: FaultyStore = store, world: World = world) -> None:
            tools = make_tools(SimulatedDisk(world))
            entries = await put_files(store.inner, "step-1", files_of(1))
            await publish_part(store, CheckpointPart("step-1", 0, 1, entries, CommitMarker(1)), tools)
            got = await try_commit(store, "step-1", layout="x", nodes=1, tools=tools, clock=VirtualClock())
            assert got == await read_manifest(store.inner, "step-1")

        assert run_process(world, main)
        if store.calls < number:
            break
    assert number > 4


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_race_make_one_commit(seed: int) -> None:
    """Four nodes publish and commit over a failing store: one manifest, of all parts, and all agree on it."""
    world = World(seed)
    bucket = MemoryBucket()
    store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.2)
    outcomes: list[CheckpointManifest | None] = []

    async def node(number: int) -> None:
        tools = make_tools(SimulatedDisk(world), seed * 10 + number)
        entries = await put_files(MemoryStore(bucket), "step-7", files_of(7, node=number))
        await asyncio.sleep(world.random.random())
        while True:
            try:
                await publish_part(
                    store, CheckpointPart("step-7", number, 4, entries, CommitMarker(7)), tools
                )
                outcomes.append(
                    await try_commit(store, "step-7", layout="x", nodes=4, tools=tools, clock=VirtualClock())
                )
                return
            except StoreError:
                await asyncio.sleep(1)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(node(number))

    assert run_process(world, main)
    committed = {outcome.write_id for outcome in outcomes if outcome is not None}
    assert len(committed) == 1 and manifest_key("step-7") in bucket.objects
    assert {outcome.nodes for outcome in outcomes if outcome is not None} == {4}


def test_a_checkpoint_of_which_a_node_is_missing_does_not_exist() -> None:
    """Without every part there is no manifest, and the missing nodes are known by number."""
    world = World(1)

    async def main() -> None:
        store, tools = MemoryStore(), make_tools(SimulatedDisk(world))
        entries = await put_files(store, "step-1", files_of(1))
        await publish_part(store, CheckpointPart("step-1", 1, 3, entries, CommitMarker(1)), tools)
        assert (
            await try_commit(store, "step-1", layout="x", nodes=3, tools=tools, clock=VirtualClock()) is None
        )
        assert await missing_parts(store, "step-1", 3) == [0, 2]
        with pytest.raises(NotFound, match="no committed checkpoint"):
            await choose(store)

    assert run_process(world, main)


def test_contradictions_are_refused() -> None:
    """Parts that disagree on bytes, steps or the number of nodes commit nothing; nor does a second, other commit."""
    world = World(1)

    async def main() -> None:
        tools = make_tools(SimulatedDisk(world))
        one, other = (FileEntry("same", 1, digest_of(body)) for body in (b"a", b"b"))
        for first, second in (
            (CheckpointPart("c", 0, 2, (one,)), CheckpointPart("c", 1, 2, (other,))),
            (CheckpointPart("c", 0, 2, (one,)), CheckpointPart("c", 1, 3, (one,))),
            (CheckpointPart("c", 0, 2, (), CommitMarker(1)), CheckpointPart("c", 1, 2, (), CommitMarker(2))),
        ):
            store = MemoryStore()
            await publish_part(store, first, tools)
            await publish_part(store, second, tools)
            with pytest.raises(IntegrityError):
                await try_commit(store, "c", layout="x", nodes=2, tools=tools, clock=VirtualClock())
            assert await read_manifest(store, "c") is None
        store = MemoryStore()
        await commit_step(store, 5, tools)
        await publish_part(store, CheckpointPart("step-5", 0, 1, (one,), CommitMarker(5)), tools)
        with pytest.raises(IntegrityError, match="exists in memory with other files"):
            await try_commit(store, "step-5", layout="x", nodes=1, tools=tools, clock=VirtualClock())

    assert run_process(world, main)


def test_a_damaged_manifest_is_told_and_not_taken() -> None:
    """Garbage under a manifest's key is no checkpoint, hides no other, and is not the newest."""
    world = World(1)

    async def main() -> None:
        store, tools = MemoryStore(), make_tools(SimulatedDisk(world))
        good = await commit_step(store, 5, tools)
        await store.put(manifest_key("step-9"), b"{}")
        await store.put(manifest_key("step-8"), b'{"kind": "stager-checkpoint"}')
        found = await list_manifests(store)
        assert [entry.checkpoint for entry in found] == ["step-8", "step-9", "step-5"]
        assert sum(isinstance(entry, Damaged) for entry in found) == 2
        assert newest(found) == good and await choose(store) == good
        with pytest.raises(IntegrityError, match="step-9"):
            await choose(store, name="step-9")

    assert run_process(world, main)


@pytest.mark.parametrize(
    "rule", [KeepRule(), KeepRule(last=2), KeepRule(last=1, every_steps=20), KeepRule(every_steps=7)]
)
def test_what_is_kept_and_why(rule: KeepRule) -> None:
    """The plan follows the rule, always keeps the newest, and gives a reason for each."""
    manifests = [CheckpointManifest(f"step-{s}", s, "x", (), 1, "w", s) for s in (10, 20, 30, 40, 50)]
    plan = plan_retention(manifests, rule)
    kept = [retention.manifest.step for retention in plan if retention.keep]
    expected = (
        {None: [10, 20, 30, 40, 50], 2: [40, 50], 1: [20, 40, 50]}[rule.last]
        if rule != KeepRule(every_steps=7)
        else [50]
    )
    assert kept == expected
    assert all(retention.reason for retention in plan)
    assert [retention.manifest for retention in plan] == manifests


@pytest.mark.parametrize("seed", SEEDS)
def test_retention_that_dies_leaves_no_half_checkpoint(seed: int) -> None:
    """Killed at any step, every manifest that is left has all its files; in the end nothing of the dropped ones is left."""
    world = World(seed)
    bucket = MemoryBucket()
    tools = make_tools(SimulatedDisk(world))

    async def fill() -> None:
        for step in (1, 2, 3, 4):
            await commit_step(MemoryStore(bucket), step, tools)

    async def retain(store: ObjectStore) -> None:
        await finish_retirements(store, tools)
        manifests = [found for found in await list_manifests(store) if isinstance(found, CheckpointManifest)]
        await carry_out(store, plan_retention(manifests, KeepRule(last=2)), tools)

    assert run_process(World(0), fill)
    for life in range(3):
        world.revive(crash_within=None if life == 2 else 30)
        store = FaultyStore(MemoryStore(bucket), world)
        run_process(world, lambda store=store: retain(store))
        for name in ("step-1", "step-2", "step-3", "step-4"):
            if manifest_key(name) in bucket.objects:
                assert sum(key.startswith(f"{name}/") for key in bucket.objects) == 3
        assert manifest_key("step-3") in bucket.objects and manifest_key("step-4") in bucket.objects
    assert not [key for key in bucket.objects if "step-1/" in key or "step-2/" in key]


def test_retiring_takes_the_manifest_first() -> None:
    """A checkpoint stops existing before anything of it is touched; its tombstone goes last."""
    world = World(1)
    bucket = MemoryBucket()

    async def main() -> None:
        tools = make_tools(SimulatedDisk(world))
        manifest = await commit_step(MemoryStore(bucket), 3, tools, nodes=2)
        store = FaultyStore(MemoryStore(bucket), world)
        assert await carry_out(store, [Retention(manifest, False, "test")], tools) == 1
        deletes = [step for step in world.trace if step.startswith("delete .")]
        assert deletes == [
            "delete .stager/step-3/manifest.json",
            "delete .stager/step-3/node-0.json,.stager/step-3/node-1.json",
            "delete .stager/step-3/retired.json",
        ]
        assert list(bucket.objects) == [".stager/latest.json"]

    assert run_process(world, main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restore_appears_whole_or_not_at_all(seed: int) -> None:
    """Killed at random steps, by kill or power cut, over a failing store: the target is absent until it is right."""
    world = World(seed)
    bucket = MemoryBucket()
    disk = SimulatedDisk(world)
    tools = make_tools(disk, seed)
    manifests: list[CheckpointManifest] = []

    async def fill() -> None:
        manifests.append(await commit_step(MemoryStore(bucket), 3, tools, nodes=2))

    assert run_process(World(0), fill)
    disk.make_directory("/nvme")
    expected = {**files_of(3, node=0), **files_of(3, node=1)}
    for life in range(8):
        last = life == 7
        world.revive(crash_within=None if last else 90)
        store = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.0 if last else 0.1)

        async def main(store: FaultyStore = store, last: bool = last) -> None:
            try:
                await restore(store, manifests[0], "/nvme/step-3", tools, options=OPTIONS)
            except StoreError:
                assert not last

        ended = run_process(world, main)
        if not ended:
            disk.crash() if world.random.random() < 0.5 else disk.kill()
        world.revive(crash_within=None)
        if "/nvme/step-3" in disk.directories:
            break
        disk.kill()
    found = {path: bytes(disk.live[f"/nvme/step-3/{path}"].live) for path, _ in disk.walk("/nvme/step-3")}
    assert found == expected
    assert not [name for name in disk.list_names("/nvme") if name != "step-3"]


def test_a_damaged_file_is_named_and_nothing_appears() -> None:
    """An altered object ends the restore with its name; the directory does not appear, and mending the object mends it."""
    world = World(1)
    disk = SimulatedDisk(world)

    async def main() -> None:
        store, tools = MemoryStore(), make_tools(disk)
        manifest = await commit_step(store, 3, tools)
        disk.make_directory("/nvme")
        body = files_of(3)["__0_0.distcp"]
        await store.put("step-3/__0_0.distcp", b"?" + body[1:])
        with pytest.raises(IntegrityError, match=r"step-3/__0_0\.distcp"):
            await restore(store, manifest, "/nvme/step-3", tools, options=OPTIONS)
        assert "/nvme/step-3" not in disk.directories
        await store.put("step-3/__0_0.distcp", body)
        await restore(store, manifest, "/nvme/step-3", tools, options=OPTIONS)
        with pytest.raises(AlreadyExists, match="nothing was changed"):
            await restore(store, manifest, "/nvme/step-3", tools, options=OPTIONS)

    assert run_process(world, main)


def test_a_disk_that_is_too_small_is_found_first() -> None:
    """No byte is fetched for a checkpoint that cannot fit."""
    world = World(1)
    disk = SimulatedDisk(world, capacity_bytes=2000)

    async def main() -> None:
        tools = make_tools(disk)
        bucket = MemoryBucket()
        manifest = await commit_step(MemoryStore(bucket), 3, tools)
        store = FaultyStore(MemoryStore(bucket), world)
        disk.make_directory("/nvme")
        with pytest.raises(OutOfSpace, match="lacks"):
            await restore(store, manifest, "/nvme/step-3", tools, options=OPTIONS)
        assert not store.calls

    assert run_process(world, main)


def test_choosing_by_step_name_and_age() -> None:
    """The newest is the highest step; a step or name that is not there tells which are."""
    world = World(1)

    async def main() -> None:
        store, tools = MemoryStore(), make_tools(SimulatedDisk(world))
        for step in (20, 100, 3):
            await commit_step(store, step, tools)
        assert (await choose(store)).step == 100
        assert (await choose(store, step=3)).checkpoint == "step-3"
        assert (await choose(store, name="step-20")).step == 20
        with pytest.raises(NotFound, match="step-3, step-20, step-100"):
            await choose(store, step=4)
        with pytest.raises(NotFound, match="named `step-4`"):
            await choose(store, name="step-4")

    assert run_process(world, main)
