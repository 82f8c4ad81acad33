"""The node's cache: what a start takes up, what it doubts, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stager.budget import ByteBudget, Priority
from stager.cache.layout import ShardKey
from stager.cache.records import Record, decode_records, encode_record
from stager.cache.shards import ShardCache
from stager.disk import LocalDisk
from stager.errors import IntegrityError, NotFound, OutOfSpace, StagerError
from stager.offload import InlineOffload, ThreadOffload
from stager.store.memory import MemoryStore
from stager.transfer.download import DownloadOptions
from stager.transfer.tools import Tools
from tests.sim.disk import SimulatedDisk
from tests.sim.world import World, run_process
from tests.stage.kit import Dataset, ScriptedStore, make_dataset

ROOT = "/cache"
SOURCE = "mem://dataset"
OPTIONS = DownloadOptions(part_bytes=1000, concurrency=2, attempts=2)


class Node:
    """A machine's disk and a bucket, on which caches are started one after the other."""

    def __init__(self, dataset: Dataset, *, disk_bytes: int = 1 << 30) -> None:
        self.world = World(1)
        self.disk = SimulatedDisk(self.world, capacity_bytes=disk_bytes)
        self.dataset = dataset
        self.store = ScriptedStore(MemoryStore())
        self.reads: list[str] = []

    def life(self, main: Callable[[ShardCache], Awaitable[None]], *, capacity_bytes: int = 1 << 30) -> None:
        """Start a cache and do ``main`` with it; then the process is killed."""

        async def whole() -> None:
            if not self.store.gets:
                await self.dataset.put_into(self.store.inner)
            tools = Tools(self.disk, InlineOffload(), ByteBudget(1 << 24), random=random.Random(1))
            cache = ShardCache(ROOT, capacity_bytes, tools)
            await cache.start()
            await main(cache)

        self.world.trace.clear()
        assert run_process(self.world, whole)
        self.disk.kill()

    async def fetch(self, cache: ShardCache, *names: str) -> None:
        added = await cache.add_dataset(SOURCE, self.dataset.manifest)
        for name in names or self.dataset.names:
            key = ShardKey(added.id, name)
            cache.reserve(key, cache.entry(key).size)
            await cache.fetch(self.store, key, priority=Priority.PREFETCH, options=OPTIONS)

    def path(self, name: str) -> str:
        [path] = [
            path for path in self.disk.live if path.startswith("/cache/shards/") and path.endswith(name)
        ]
        return path

    def shard_reads(self) -> int:
        """How often the disk was asked to read a shard since the last start."""
        return sum(step.startswith("read /cache/shards/") for step in self.world.trace)


@pytest.fixture
def node() -> Node:
    return Node(make_dataset(1, [3000, 3100, 3200]))


async def nothing(cache: ShardCache) -> None:
    """Only start."""


def test_a_start_takes_up_what_was_verified_without_reading_it(node: Node) -> None:
    """After a kill, recorded shards are there at once; no byte of them is read."""
    node.life(node.fetch)

    async def main(cache: ShardCache) -> None:
        assert len(cache.shards) == 3
        assert cache.used_bytes == 9300

    node.life(main)
    assert node.shard_reads() == 0


def test_a_shard_without_record_is_read_once(node: Node) -> None:
    """A lost or damaged record costs one reading, and the next start none."""
    node.life(node.fetch)
    [record] = [path for path in node.disk.live if path.endswith("/verified")]
    del node.disk.live[record].live[-30:]

    async def main(cache: ShardCache) -> None:
        assert len(cache.shards) == 3

    node.life(main)
    assert node.shard_reads() > 0
    node.life(main)
    assert node.shard_reads() == 0


def test_a_shard_that_was_written_to_is_found_at_the_start(node: Node) -> None:
    """A file of the right size whose time is another is compared with the manifest, and set aside if it differs."""
    node.life(node.fetch)
    damaged, touched = node.dataset.names[:2]
    node.disk.write_at(node.path(damaged), 5, b"???")
    node.disk.write_at(node.path(touched), 5, node.dataset.bodies[touched][5:8])

    async def main(cache: ShardCache) -> None:
        assert sorted(key.name for key in cache.shards) == node.dataset.names[1:]
        assert cache.quarantined_count == 1
        assert cache.used_bytes == 9300

    node.life(main)
    assert sum(path.startswith("/cache/quarantine/") for path in node.disk.live) == 1
    node.life(nothing)
    assert sum(path.startswith("/cache/quarantine/") for path in node.disk.live) == 0


def test_what_fits_no_manifest_is_set_aside(node: Node) -> None:
    """A short file, a stranger's file and a dataset without manifest are not served."""
    node.life(node.fetch)
    short = node.path(node.dataset.names[0])
    node.disk.truncate(short, 10)
    folder = short.rpartition("/")[0]
    node.disk.write_file(f"{folder}/stranger.tar", b"x")
    node.disk.make_directory("/cache/shards/0123456789abcdef")
    node.disk.write_file("/cache/shards/0123456789abcdef/a.tar", b"x")

    async def main(cache: ShardCache) -> None:
        assert sorted(key.name for key in cache.shards) == node.dataset.names[1:]

    node.life(main)
    assert sum(path.startswith("/cache/shards/") for path in node.disk.live) == 2


@pytest.mark.parametrize("spoilt", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_damaged_manifest_is_forgotten_with_its_shards(node: Node, spoilt: bytes) -> None:
    """Shards that nothing vouches for go; the start succeeds."""
    node.life(node.fetch)
    [manifest] = [path for path in node.disk.live if path.endswith("manifest.json")]
    node.disk.write_file(manifest, spoilt)

    async def main(cache: ShardCache) -> None:
        assert cache.datasets == {} and cache.shards == {} and cache.used_bytes == 0

    node.life(main)
    assert not [path for path in node.disk.live if path.startswith("/cache/shards/")]


def test_superseded_content_is_forgotten_when_none_of_it_is_here(node: Node) -> None:
    """Of the manifests of one URL, those without shards here and not the newest go."""
    other = make_dataset(2, [100])

    async def main(cache: ShardCache) -> None:
        await cache.add_dataset(SOURCE, node.dataset.manifest)
        await cache.add_dataset(SOURCE, other.manifest)
        await cache.add_dataset("mem://another", other.manifest)

    async def after(cache: ShardCache) -> None:
        kept = {(dataset.source, dataset.fingerprint) for dataset in cache.datasets.values()}
        assert kept == {(SOURCE, other.manifest.fingerprint), ("mem://another", other.manifest.fingerprint)}

    node.life(main)
    node.life(after)


def test_the_bound_holds_from_the_start(node: Node) -> None:
    """With a lower bound than what is here, a start gives up what is too much."""
    node.life(node.fetch)

    async def main(cache: ShardCache) -> None:
        assert cache.used_bytes <= 6400 and len(cache.shards) == 2

    node.life(main, capacity_bytes=6400)
    assert sum(path.startswith("/cache/shards/") for path in node.disk.live) == 2


def test_staging_is_gone_on_from_or_swept(node: Node) -> None:
    """A file with its part map stays, counted; a file or map alone, and a stranger's, go."""

    async def main(cache: ShardCache) -> None:
        added = await cache.add_dataset(SOURCE, node.dataset.manifest)
        first, second = (cache.layout.staged(ShardKey(added.id, name)) for name in node.dataset.names[:2])
        for path in (first, f"{first}.parts", f"{second}.parts", "/cache/staging/stranger"):
            node.disk.write_file(path, b"123")

    async def after(cache: ShardCache) -> None:
        assert [key.name for key in cache.partial] == node.dataset.names[:1]
        assert cache.used_bytes == 3

    node.life(main)
    node.life(after)
    assert sum(path.startswith("/cache/staging/") for path in node.disk.live) == 2


def test_a_full_disk_lowers_the_bound_for_a_while(node: Node) -> None:
    """OutOfSpace leaves nothing behind, and until it is forgotten no more is held than the disk held then."""
    node = Node(make_dataset(1, [3000, 3100, 3200]), disk_bytes=8000)

    async def main(cache: ShardCache) -> None:
        import asyncio

        await node.fetch(cache, *node.dataset.names[:2])
        with pytest.raises(OutOfSpace):
            await node.fetch(cache, node.dataset.names[2])
        assert cache.coming == {} and cache.partial == {}
        assert cache.bound_bytes() == cache.used_bytes == 6100
        await asyncio.sleep(61)
        assert cache.bound_bytes() == 1 << 30

    node.life(main)


def test_a_shard_that_cannot_be_read_is_damaged(node: Node) -> None:
    """An error of the disk under a shard sets it aside instead of failing the daemon."""

    async def main(cache: ShardCache) -> None:
        await node.fetch(cache)
        [key] = [key for key in cache.shards if key.name == node.dataset.names[0]]
        whole = node.disk.read_at

        def broken(path: str, offset: int, size: int) -> bytes:
            if path.endswith(key.name):
                raise StagerError(f"cannot read `{path}`: Input/output error", subject=path)
            return whole(path, offset, size)

        node.disk.read_at = broken  # type: ignore[method-assign]
        assert not await cache.is_sound(key)
        assert key not in cache.shards and len(cache.quarantined) == 1

    node.life(main)


def test_a_shard_that_is_not_the_manifests_stays_out(node: Node) -> None:
    """An altered object is an IntegrityError that names it; nothing of it is visible, staged or counted."""

    async def main(cache: ShardCache) -> None:
        name = node.dataset.names[0]
        await node.store.inner.put(name, b"?" * 3000)
        with pytest.raises(IntegrityError, match=name):
            await node.fetch(cache, name)
        assert cache.used_bytes == 0
        with pytest.raises(NotFound, match="no shard"):
            cache.entry(ShardKey("0" * 16, name))

    node.life(main)
    assert not [path for path in node.disk.live if path.startswith(("/cache/shards/", "/cache/staging/"))]


def test_records_survive_what_lies_between_them() -> None:
    """Torn lines, holes and strangers' lines are passed over; the last record of a name counts."""
    good = encode_record("a", Record(1, 2))
    newer = encode_record("a", Record(3, 4))
    raw = b"\0\0" + good + b'{"name": "b"' + b"\n[]\n\n{}\n" + newer + good[:10]
    assert decode_records(raw) == {"a": Record(3, 4)}


async def test_a_start_on_a_real_disk_tidies_and_leaves_strangers(tmp_path: Path) -> None:
    """Halves of what a kill interrupted go; files that somebody put beside our folders stay, and do no harm."""
    dataset = make_dataset(1, [3000])
    store = MemoryStore()
    await dataset.put_into(store)
    offload = ThreadOffload(disk_threads=2, hash_threads=1)
    try:
        for life in range(2):
            cache = ShardCache(str(tmp_path), 1 << 30, Tools(LocalDisk(), offload))
            await cache.start()
            added = await cache.add_dataset(SOURCE, dataset.manifest)
            [key] = added.keys
            if life == 0:
                cache.reserve(key, 3000)
                await cache.fetch(store, key, priority=Priority.DEMAND, options=OPTIONS)
                half = tmp_path / "datasets" / added.id / ".manifest.json.7-1.tmp"
                for path in (half, tmp_path / "datasets/notes.txt", tmp_path / "shards/notes.txt"):
                    path.write_text("x")
            else:
                assert list(cache.shards) == [key]
                assert not half.exists()
                assert (tmp_path / "datasets/notes.txt").exists() and (tmp_path / "shards/notes.txt").exists()
    finally:
        offload.close()
