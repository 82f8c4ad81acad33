"""The service of a watched folder on real files: detection, seals, rotation, overwriting, vanishing, restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stager.checkpoint.commit import list_manifests, read_manifest
from stager.checkpoint.keep import KeepRule
from stager.checkpoint.restore import restore
from stager.checkpoint.service import CheckpointService
from stager.clock import SystemClock
from stager.disk import LocalDisk
from stager.errors import DeadlineExceeded, IntegrityError, NotFound, Unavailable, UsageError
from stager.formats.commits import CheckpointManifest
from stager.formats.wire import SealRequest
from stager.journal import Journal
from stager.offload import InlineOffload, ThreadOffload
from stager.store.api import ObjectStore
from stager.store.memory import MemoryBucket, MemoryStore
from stager.transfer.tools import Tools
from tests.checkpoint.conftest import Copy, run_framework
from tests.checkpoint.material import make_service, running, write_checkpoint

DISK = LocalDisk()


class Place:
    """A watched folder, a bucket and a journal that outlive services."""

    def __init__(self, root: Path) -> None:
        self.watch = root / "watch"
        self.watch.mkdir(exist_ok=True)
        self.bucket = MemoryBucket()
        self.journal = Journal(":memory:", DISK)
        self.lives = 0
        self.threads = ThreadOffload(disk_threads=4, hash_threads=1)

    @property
    def store(self) -> MemoryStore:
        return MemoryStore(self.bucket)

    def service(self, store: object = None, **options: object) -> CheckpointService:
        """A new life over what is there."""
        self.lives += 1
        return make_service(
            store or self.store,  # type: ignore[arg-type]  # a store or what opens one
            DISK,
            self.journal,
            SystemClock(),
            watch=str(self.watch),
            seed=self.lives,
            rescan_s=0.1,
            **options,  # type: ignore[arg-type]  # passed through
        )

    def save(self, step: int, *, save: int = 1) -> dict[str, bytes]:
        return write_checkpoint(DISK, str(self.watch / f"step-{step}"), step, save=save)

    def bodies(self, checkpoint: str) -> dict[str, bytes]:
        """What the bucket holds below a checkpoint's name."""
        prefix = f"{checkpoint}/"
        return {
            key.removeprefix(prefix): found.body
            for key, found in self.bucket.objects.items()
            if key.startswith(prefix)
        }

    async def names(self) -> list[str]:
        return [found.checkpoint for found in await list_manifests(self.store)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.threads.close()
    made.journal.close()


async def until(condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def drained(service: CheckpointService) -> None:
    async with asyncio.timeout(30):
        await service.drain()


async def test_a_checkpoint_is_committed_with_its_cursor(place: Place) -> None:
    """What the trainer said travels into the manifest; the seal is gone afterwards, the trainer's files are untouched."""
    bodies = place.save(100)
    service = place.service()
    async with running(service):
        await drained(service)
    manifest = await read_manifest(place.store, "step-100")
    assert manifest is not None
    assert (manifest.step, manifest.metrics, manifest.cursor) == (100, {"loss": 1.0}, {"position": 1000})
    assert place.bodies("step-100") == bodies
    assert {entry.path: entry.size for entry in manifest.files} == {
        path: len(b) for path, b in bodies.items()
    }
    assert os.listdir(place.watch / ".stager-seals") == []
    assert {path: (place.watch / "step-100" / path).read_bytes() for path in bodies} == bodies


async def test_events_shorten_the_wait(place: Place) -> None:
    """With a rescan far away, a new checkpoint is found by its events."""
    service = make_service(
        place.store, DISK, place.journal, SystemClock(), watch=str(place.watch), rescan_s=3600.0, hints=True
    )
    async with running(service):
        place.save(1)
        await until(lambda: service.status()["committed"] == 1)


async def test_rotation_during_upload_takes_nothing(place: Place) -> None:
    """The trainer removes the directory while the store is away; what was sealed is committed all the same."""
    away = True

    async def open_store() -> ObjectStore:
        if away:
            raise Unavailable("the store is away", subject="test")
        return place.store

    bodies = place.save(1)
    service = place.service(open_store)
    async with running(service):
        await until(lambda: service.status()["sealed"] == 1)
        shutil.rmtree(place.watch / "step-1")
        await until(lambda: service.status()["checkpoints"][0]["state"] == "failing")
        away = False
        await until(lambda: service.status()["committed"] == 1)
    assert place.bodies("step-1") == bodies
    assert service.status()["vanished"] == 0


async def test_overwriting_in_place_discards_the_seal(place: Place) -> None:
    """A file written in place shares its inode with the seal: the seal is thrown away, the new state is taken."""
    gate = asyncio.Event()

    async def open_store() -> ObjectStore:
        await gate.wait()
        return place.store

    place.save(1)
    service = place.service(open_store)
    async with running(service):
        await until(lambda: service.status()["sealed"] == 1)
        second = place.save(1, save=2)
        gate.set()
        await until(lambda: service.status()["discarded"] == 1)
        await until(lambda: service.status()["committed"] == 1)
    assert await place.names() == ["step-1"]
    assert place.bodies("step-1") == second


async def test_saving_a_committed_step_again_makes_a_second_one(place: Place) -> None:
    """Nothing committed is overwritten: the later save has a name of its own, and is the newest of its step."""
    first = place.save(1)
    service = place.service()
    async with running(service):
        await drained(service)
        shutil.rmtree(place.watch / "step-1")
        second = place.save(1, save=2)
        await until(lambda: service.status()["committed"] == 2)
    assert await place.names() == ["step-1", "step-1.r2"]
    assert place.bodies("step-1") == first
    assert place.bodies("step-1.r2") == second


async def test_a_restart_sends_nothing_again(place: Place) -> None:
    """Committed states are known again from the journal; without a journal they are known by their bytes."""
    place.save(1)
    service = place.service()
    async with running(service):
        await drained(service)
    keys = dict(place.bucket.objects)
    again = place.service()
    async with running(again):
        await drained(again)
    assert again.status()["sealed"] == 0
    place.journal = Journal(":memory:", DISK)
    without = place.service()
    async with running(without):
        await drained(without)
    assert without.status()["committed"] == 1
    assert place.bucket.objects == keys


async def test_vanishing_before_it_is_complete_is_told(place: Place, copied: Copy) -> None:
    """A checkpoint that goes before its marker came is counted; nothing of it is in the bucket."""
    path = copied("save_dcp", "step-100")
    (path / ".metadata").unlink()
    service = place.service()
    async with running(service):
        await until(lambda: any(found["state"] == "writing" for found in service.status()["checkpoints"]))
        shutil.rmtree(path)
        await until(lambda: service.status()["vanished"] == 1)
    assert place.bucket.objects == {}


async def test_retention_in_the_run_and_in_the_folder(place: Place) -> None:
    """The run keeps the last two and every fourth step; the folder keeps one, and only what is committed goes."""
    service = place.service(keep=KeepRule(last=2, every_steps=4), keep_local=1)
    async with running(service):
        for step in range(3, 9):
            place.save(step)
            await drained(service)
        await until(lambda: service.status()["committed"] == 6)
        await until(lambda: sorted(os.listdir(place.watch)) == [".stager-seals", "step-8"])
    assert await place.names() == ["step-4", "step-7", "step-8"]
    assert place.bodies("step-3") == {} and place.bodies("step-8")


async def test_rotation_touches_only_what_is_committed_and_unchanged(place: Place) -> None:
    """What was sealed on request goes as well; what was written into since its commit stays."""
    service = place.service(keep_local=1)
    async with running(service):
        for name in ("first", "second"):
            folder = place.watch / name
            folder.mkdir()
            (folder / "weights.bin").write_bytes(name.encode() * 1000)
            await service.seal(SealRequest(str(folder), wait=True, deadline_s=20))
        (place.watch / "second" / "more.txt").write_text("written later")
        place.save(1)
        await drained(service)
        await until(lambda: not (place.watch / "first").exists())
        assert (place.watch / "second" / "more.txt").exists() and (place.watch / "step-1").exists()


async def test_a_trainer_that_rotates_at_once(place: Place, tmp_path: Path) -> None:
    """Real DCP saves, each removed when the next is there, while the service looks on: none is taken by halves.

    Each save is committed or told as vanished; the last one is committed; torch loads all that are committed.
    """
    service = make_service(
        place.store,
        DISK,
        place.journal,
        SystemClock(),
        watch=str(place.watch),
        offload=place.threads,
        rescan_s=0.5,
        hints=True,
    )
    async with running(service):
        await asyncio.to_thread(run_framework, ("save_dcp_rotating", str(place.watch)))
        await drained(service)
    names = await place.names()
    assert names[-1] == "step-5"
    assert len(names) + service.status()["vanished"] == 5
    for name in names:
        manifest = await read_manifest(place.store, name)
        assert manifest is not None
        await restore(place.store, manifest, str(tmp_path / "back" / name), Tools(DISK, InlineOffload()))
    await asyncio.to_thread(run_framework, ("load_dcp_rotated", str(tmp_path / "back")))


async def test_nodes_commit_together(tmp_path: Path) -> None:
    """Two nodes with disks of their own: no manifest before both parts, then one with the files of both."""
    (tmp_path / "other").mkdir()
    first, second = Place(tmp_path), Place(tmp_path / "other")
    second.bucket = first.bucket
    one = first.service(node=0, nodes=2)
    two = second.service(node=1, nodes=2)
    bodies = first.save(5)
    async with running(one, two):
        await until(lambda: any(found["state"] == "published" for found in one.status()["checkpoints"]))
        assert await first.names() == []
        folder = second.watch / "step-5"
        write_checkpoint(DISK, str(folder), 5)
        (folder / "model.bin").rename(folder / "model-1.bin")
        await until(lambda: one.status()["committed"] == 1 and two.status()["committed"] == 1)
    manifest = await read_manifest(first.store, "step-5")
    assert manifest is not None and manifest.nodes == 2
    assert {entry.path for entry in manifest.files} == {*bodies, "model-1.bin"}


async def test_seal_on_request(place: Place) -> None:
    """`stager seal` takes a directory without any marker, waits for its commit, and refuses what makes no sense."""
    folder = place.watch / "mine"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"w" * 5000)
    service = place.service()
    async with running(service):
        reply = await service.seal(SealRequest(str(folder), wait=True, deadline_s=20))
        assert (reply.checkpoint, reply.state) == ("mine", "committed")
        assert place.bodies("mine") == {"weights.bin": b"w" * 5000}
        reply = await service.seal(SealRequest(str(folder), wait=True, deadline_s=20))
        assert reply.state == "committed"
        with pytest.raises(NotFound):
            await service.seal(SealRequest(str(place.watch / "none")))
        with pytest.raises(UsageError):
            await service.seal(SealRequest(str(folder / "deeper")))
        with pytest.raises(UsageError):
            await service.seal(SealRequest("/elsewhere"))
        (place.watch / "empty").mkdir()
        with pytest.raises(UsageError, match="no files"):
            await service.seal(SealRequest(str(place.watch / "empty")))
        (place.watch / "x.r2").mkdir()
        with pytest.raises(UsageError):
            await service.seal(SealRequest(str(place.watch / "x.r2")))
    manifest = await read_manifest(place.store, "mine")
    assert manifest is not None and manifest.layout == "sealed"


async def test_seal_waits_no_longer_than_told(place: Place) -> None:
    """A store that is away: the answer names the state, and the checkpoint stays sealed."""

    async def open_store() -> ObjectStore:
        raise Unavailable("the store is away", subject="test")

    place.save(1)
    service = place.service(open_store)
    async with running(service):
        with pytest.raises(DeadlineExceeded, match="store is away"):
            await service.seal(SealRequest(str(place.watch / "step-1"), wait=True, deadline_s=0.5))
        assert service.unpublished() == ["step-1"]
    again = place.service()
    async with running(again):
        await drained(again)
    assert await place.names() == ["step-1"]


async def test_a_damaged_checkpoint_is_refused(place: Place, copied: Copy) -> None:
    """What its own marker contradicts is neither sealed on request nor found by itself."""
    path = copied("save_dcp", "step-100")
    (path / ".metadata").write_bytes(b"damage")
    service = place.service()
    async with running(service):
        with pytest.raises(IntegrityError, match="metadata"):
            await service.seal(SealRequest(str(path)))
        await until(lambda: any(found["state"] == "corrupt" for found in service.status()["checkpoints"]))
    assert place.bucket.objects == {}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("save_dcp", "step-100"),
        ("save_dcp_ranks", "step-100"),
        ("save_trainer", "checkpoint-4"),
        ("save_files", "model-100.pt"),
    ],
)
async def test_what_frameworks_wrote_comes_back(
    place: Place, copied: Copy, tmp_path: Path, command: str, name: str
) -> None:
    """Saved, found, uploaded, removed here, restored: every byte, and torch loads the same tensors."""
    path = copied(command, name)
    whole = {
        p.relative_to(path).as_posix() or name: p.read_bytes()
        for p in [path, *path.rglob("*")]
        if p.is_file()
    }
    service = place.service()
    async with running(service):
        await drained(service)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    manifest = await read_manifest(place.store, name)
    assert isinstance(manifest, CheckpointManifest)
    target = tmp_path / "restored" / "step-100"
    await restore(place.store, manifest, str(target), Tools(DISK, InlineOffload()))
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert list(found.values()) == list(whole.values()) if path.suffix else found == whole
    if command == "save_dcp":
        await asyncio.to_thread(run_framework, ("load_dcp", str(target)))
