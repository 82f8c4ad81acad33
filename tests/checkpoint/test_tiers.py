"""A directory, then a bucket: hand-on, retention that waits for the tier behind, copies on the server."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stager.checkpoint.commit import list_manifests
from stager.checkpoint.copies import CopyOptions
from stager.checkpoint.keep import Best, KeepRule, NextTier, plan_retention
from stager.checkpoint.publish import PublishOptions
from stager.checkpoint.retain import pin, read_pins, unpin
from stager.checkpoint.service import CheckpointService
from stager.checkpoint.tiers import Tier
from stager.clock import SystemClock
from stager.disk import LocalDisk
from stager.errors import NotFound, Unavailable
from stager.formats.commits import CheckpointManifest, FileEntry
from stager.formats.digests import Digest
from stager.journal import Journal
from stager.offload import ThreadOffload
from stager.store.api import ObjectStore
from stager.store.directory import DirectoryStore
from stager.store.memory import MemoryBucket, MemoryStore
from stager.transfer.tools import Tools
from tests.checkpoint.material import make_service, running, write_checkpoint

DISK = LocalDisk()


class Tiers:
    """A watched folder, a directory tier and a bucket that may be away."""

    def __init__(self, root: Path) -> None:
        self.watch, self.folder = root / "watch", root / "lustre"
        self.watch.mkdir()
        self.bucket = MemoryBucket()
        self.journal = Journal(":memory:", DISK)
        self.offload = ThreadOffload(disk_threads=4, hash_threads=1)
        self.tools = Tools(DISK, self.offload)
        self.away = False
        self.directory = DirectoryStore(
            str(self.folder), disk=DISK, offload=self.offload, chance=self.tools.random
        )
        self.store = MemoryStore(self.bucket)

    async def open_bucket(self) -> ObjectStore:
        if self.away:
            raise Unavailable("the bucket is away", subject="test")
        return self.store

    async def open_directory(self) -> ObjectStore:
        return self.directory

    def service(self, *, near: KeepRule = KeepRule(), far: KeepRule = KeepRule()) -> CheckpointService:
        copies = CopyOptions(bytes_min=1)
        options = PublishOptions(files_at_once=2, copies=copies)
        before = Tier("lustre", self.open_directory, folder=str(self.folder), keep=near, publish=options)
        return make_service(
            self.open_bucket,
            DISK,
            self.journal,
            SystemClock(),
            watch=str(self.watch),
            rescan_s=0.1,
            offload=self.offload,
            before=[before],
            keep=far,
            copies=copies,
        )

    def save(self, step: int) -> dict[str, bytes]:
        return write_checkpoint(DISK, str(self.watch / f"step-{step}"), step)

    async def names(self, store: ObjectStore) -> list[str]:
        return [found.checkpoint for found in await list_manifests(store)]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.offload.close()
    made.journal.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def committed(service: CheckpointService, tier: int) -> int:
    count: int = service.status()["tiers"][tier]["committed"]
    return count


async def test_one_tier_after_another(tiers: Tiers) -> None:
    """The directory has it first and frees the hot seal; the bucket gets the same bytes when it is back."""
    tiers.away = True
    bodies = tiers.save(10)
    service = tiers.service()
    async with running(service):
        await until(lambda: committed(service, 0) == 1)
        await until(lambda: list((tiers.watch / ".stager-seals").iterdir()) == [])
        shutil.rmtree(tiers.watch / "step-10")
        assert service.unpublished() == ["step-10"]
        standing = service.status()["tiers"]
        assert [tier["newest_step"] for tier in standing] == [10, None]
        assert [tier["steps_at_risk"] for tier in standing] == [0, 10]
    assert await tiers.names(tiers.store) == []
    tiers.away = False
    again = tiers.service()
    async with running(again):
        await until(lambda: committed(again, 1) == 1)
        assert again.status()["tiers"][1]["newest_age_s"] >= 0
        assert again.status()["tiers"][1]["commit_s"] > 0
    sent = {key: found.body for key, found in tiers.bucket.objects.items() if key.startswith("step-10/")}
    assert {key.removeprefix("step-10/"): body for key, body in sent.items()} == bodies
    assert list(tiers.folder.glob(".stager-relay/*/*")) == []


async def test_nothing_goes_before_the_next_tier_holds_it(tiers: Tiers) -> None:
    """While the bucket is away the directory keeps all; afterwards its own rule holds."""
    tiers.away = True
    service = tiers.service(near=KeepRule(last=1), far=KeepRule(last=2))
    async with running(service):
        for step in (1, 2, 3, 4):
            tiers.save(step)
            await until(lambda step=step: committed(service, 0) == step)  # type: ignore[misc]
        assert await tiers.names(tiers.directory) == ["step-1", "step-2", "step-3", "step-4"]
        tiers.away = False
        await until(lambda: committed(service, 1) == 4)
        tiers.save(5)
        await until(lambda: committed(service, 1) == 5)
        await until(lambda: service.status()["retired"] >= 3)
    assert (await tiers.names(tiers.directory))[-1] == "step-5"
    assert (await tiers.names(tiers.store))[-2:] == ["step-4", "step-5"]


async def test_a_directory_that_alters_a_file_is_told(tiers: Tiers) -> None:
    """What the directory holds is compared with what it committed before the bucket commits it."""
    tiers.away = True
    tiers.save(10)
    service = tiers.service()
    async with running(service):
        await until(lambda: committed(service, 0) == 1)
        path = tiers.folder / "step-10" / "model.bin"
        status = path.stat()
        body = bytearray(path.read_bytes())
        body[0] ^= 1
        path.write_bytes(body)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        tiers.away = False
        await until(lambda: not service.unpublished())
        assert service.status()["tiers"][1]["committed"] == 0
    assert await tiers.names(tiers.store) == []


async def test_unchanged_files_are_copied_by_the_store(tiers: Tiers) -> None:
    """The second checkpoint's equal files are not sent again, in either tier; its bytes are right all the same."""
    service = tiers.service()
    async with running(service):
        tiers.save(1)
        await until(lambda: committed(service, 1) == 1)
        bodies = tiers.save(2)
        await until(lambda: committed(service, 1) == 2)
        copied = [tier["copied_bytes"] for tier in service.status()["tiers"]]
    assert copied == [len(bodies["config.json"])] * 2
    assert tiers.bucket.objects["step-2/config.json"].body == bodies["config.json"]


async def test_pins(tiers: Tiers) -> None:
    """A pin keeps a checkpoint against every rule until it is taken away; only what is committed can be pinned."""
    service = tiers.service(far=KeepRule(last=1))
    async with running(service):
        for step in (1, 2, 3):
            tiers.save(step)
            await until(lambda step=step: committed(service, 1) == step)  # type: ignore[misc]
            if step == 1:
                await pin(tiers.store, "step-1", tiers.tools)
    assert await read_pins(tiers.store) == {"step-1"}
    assert "step-1" in await tiers.names(tiers.store)
    with pytest.raises(NotFound):
        await pin(tiers.store, "step-9", tiers.tools)
    await unpin(tiers.store, "step-1", tiers.tools)
    assert await read_pins(tiers.store) == frozenset()


def manifest(step: int, hour: float = 0.0, **metrics: float) -> CheckpointManifest:
    entry = FileEntry("w", 1, Digest(f"{step:064x}", step))
    return CheckpointManifest(
        f"step-{step}", step, "x", (entry,), 1, "w", int(hour * 3600e9), metrics=metrics
    )


HISTORY = [
    manifest(1, 0, loss=5.0),
    manifest(2, 1, loss=1.0),
    manifest(3, 2, loss=float("nan")),
    manifest(4, 3, loss=2.0),
    manifest(5, 4),
]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (KeepRule(every_hours=2), [1, 3, 5]),
        (KeepRule(best=Best("loss")), [2, 5]),
        (KeepRule(best=Best("loss", 2)), [2, 4, 5]),
        (KeepRule(best=Best("loss", 1, "max")), [1, 5]),
        (KeepRule(names=("*-4", "none")), [4, 5]),
        (KeepRule(last=1, pinned=frozenset({"step-3"})), [3, 5]),
        (KeepRule(every_steps=2, best=Best("loss", 1, "max")), [1, 2, 4, 5]),
    ],
)
def test_rules(rule: KeepRule, kept: list[int]) -> None:
    """Any rule keeps; what is kept is kept again when the rest has gone."""
    plan = plan_retention(HISTORY, rule)
    assert [found.manifest.step for found in plan if found.keep] == kept
    left = [found.manifest for found in plan if found.keep]
    assert [found.manifest for found in plan_retention(left, rule) if found.keep] == left


def test_the_tier_behind_decides_with() -> None:
    """Not there and wanted there: it stays. There under another name, or of no interest there: it goes."""
    behind = NextTier("s3://b/r", [replace(HISTORY[1], checkpoint="step-2.r2"), HISTORY[4]], KeepRule(last=2))
    plan = plan_retention(HISTORY, KeepRule(last=1), behind)
    assert [found.manifest.step for found in plan if found.keep] == [3, 4, 5]
    assert plan[3].reason == "s3://b/r does not hold it yet"
