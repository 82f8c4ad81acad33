"""A whole pack, in this process: same bytes, kept shards, refused destinations, read by webdataset."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.disk import LocalDisk
from stager.errors import LockHeld, NotFound, OutOfSpace, UsageError
from stager.formats.index import index_shard
from stager.formats.manifest import decode_dataset_manifest
from stager.formats.samples import split_name
from stager.offload import InlineOffload, ThreadOffload
from stager.pack import run
from stager.pack.destination import BucketDestination, Destination, LocalDestination
from stager.pack.findings import Policies
from stager.pack.plan import Limits
from stager.pack.run import PackProgress, PackSummary
from stager.pack.samples import unkeyable
from stager.pack.stream import SampleFailed
from stager.pack.survey import PackInput, survey, take_input
from stager.pack.workers import LocalWriter
from stager.store.api import StoreProperties
from stager.store.memory import MemoryBucket, MemoryStore
from tests.pack.reading import read_with_webdataset

LIMITS = Limits(shard_samples_max=4)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for number in range(18):
        folder = root / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03d}.bin").write_bytes(bytes([number]) * (number * 700))
        (folder / f"{number:03d}.json").write_text(json.dumps({"label": number}))
    return root


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def local(root: Path, disk: LocalDisk | None = None) -> LocalDestination:
    return LocalDestination(str(root), disk=disk or LocalDisk(), offload=InlineOffload())


async def pack(given: PackInput, destination: Destination, **options: bool) -> PackSummary:
    offload = InlineOffload()
    writer = LocalWriter(destination, given.policies, offload=offload)
    return await run.pack(given, destination, lambda _: writer, offload=offload, holder="a test", **options)


async def test_the_same_input_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    """Manifest included, and again after the tree was copied elsewhere with its times."""
    given = take_input([str(tree)], str(tmp_path / "one"), limits=LIMITS)
    summary = await pack(given, local(tmp_path / "one"))
    os.rename(tree, tmp_path / "moved")
    await pack(take_input([str(tmp_path / "moved")], None, limits=LIMITS), local(tmp_path / "two"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert summary.manifest.samples == 18 and len(summary.manifest.shards) == 5
    assert sorted(contents(tmp_path / "one")) == ["manifest.json", *(f"shard-00000{n}.tar" for n in range(5))]


async def test_webdataset_reads_what_was_packed(tree: Path, tmp_path: Path) -> None:
    """Keys, fields and bytes are those of the tree; the manifest's digests are the files'."""
    out = tmp_path / "out"
    summary = await pack(take_input([str(tree)], None, limits=LIMITS), local(out))
    manifest = decode_dataset_manifest((out / "manifest.json").read_bytes())
    assert manifest == summary.manifest and manifest.fields == ("bin", "json")
    shards = [str(out / shard.name) for shard in manifest.shards]
    found = read_with_webdataset(shards)
    assert len(found) == 18
    for sample in found:
        for field in ("bin", "json"):
            assert sample[field] == (tree / f"{sample['__key__']}.{field}").read_bytes()
    for shard in manifest.shards:
        body = (out / shard.name).read_bytes()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (shard.size, shard.digest.sha256)
        assert len(index_shard(body, of=shard.name)) == shard.samples


async def test_a_finished_dataset_is_left_alone(tree: Path, tmp_path: Path) -> None:
    """The second pack of the same writes nothing, and says so."""
    out = tmp_path / "out"
    given = take_input([str(tree)], str(out), limits=LIMITS)
    await pack(given, local(out))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    summary = await pack(given, local(out))
    assert summary.complete_before and summary.shards_written == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


async def test_other_input_is_refused_unless_told(tree: Path, tmp_path: Path) -> None:
    """A dataset is replaced only with overwrite, and then nothing of it is left."""
    out = tmp_path / "out"
    await pack(take_input([str(tree)], str(out), limits=LIMITS), local(out))
    other = take_input([str(tree)], str(out), limits=Limits(shard_samples_max=9))
    with pytest.raises(UsageError, match="already holds a dataset of 18 samples"):
        await pack(other, local(out))
    summary = await pack(other, local(out), overwrite=True)
    assert len(summary.manifest.shards) == 2
    assert sorted(contents(out)) == ["manifest.json", "shard-000000.tar", "shard-000001.tar"]


async def test_a_foreign_directory_is_refused_without_a_trace(tree: Path, tmp_path: Path) -> None:
    """Whatever lies there is neither touched nor joined by our own state."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    given = take_input([str(tree)], str(out), limits=LIMITS)
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        await pack(given, local(out))
    assert os.listdir(out) == ["thesis.tex"]
    await pack(given, local(out), overwrite=True)
    assert (out / "thesis.tex").read_text() == "x" and (out / "manifest.json").exists()


class DyingDisk(LocalDisk):
    """A disk whose n-th publication fails."""

    def __init__(self, survives: int) -> None:
        self.left = survives

    def publish(self, staged: str, final: str, *, durable: bool = True) -> None:
        self.left -= 1
        if self.left < 0:
            raise OutOfSpace(f"cannot publish `{final}`: No space left on device", subject=final)
        super().publish(staged, final, durable=durable)


@pytest.mark.parametrize("survives", range(12))
async def test_a_pack_goes_on_from_every_failure(tree: Path, tmp_path: Path, survives: int) -> None:
    """Wherever publishing fails, the next pack keeps what is finished and ends with the same bytes."""
    given = take_input([str(tree)], None, limits=LIMITS)
    whole = await pack(given, local(tmp_path / "whole"))
    out = tmp_path / "out"
    with pytest.raises(OutOfSpace):
        await pack(given, local(out, DyingDisk(survives)))
    assert not (out / "manifest.json").exists()
    kept = {path: path.stat().st_ino for path in out.glob("*.tar")}
    recorded = len(list(out.glob(".stager/pack/shards/*.json")))
    summary = await pack(given, local(out))
    assert summary.shards_kept == recorded and not summary.complete_before
    assert [path.stat().st_ino == inode for path, inode in kept.items()].count(True) >= recorded
    assert contents(out) == contents(tmp_path / "whole") and summary.manifest == whole.manifest


async def test_changed_input_is_noticed(tree: Path, tmp_path: Path) -> None:
    """Between a killed pack and the next a file changed: its shard is written anew, and it is said."""
    out = tmp_path / "out"
    given = take_input([str(tree)], str(out), limits=LIMITS)
    with pytest.raises(OutOfSpace):
        await pack(given, local(out, DyingDisk(7)))
    (tree / "class0" / "000.bin").write_bytes(b"new")
    (tree / "class2" / "017.bin").unlink()
    (tree / "class2" / "017.json").unlink()
    summary = await pack(given, local(out))
    assert summary.input_changed and summary.manifest.samples == 17
    await pack(given, local(tmp_path / "fresh"))
    assert contents(out) == contents(tmp_path / "fresh")


async def test_fewer_shards_than_before_leave_none_behind(tree: Path, tmp_path: Path) -> None:
    """Shards of an unfinished pack with smaller shards are gone at the end."""
    out = tmp_path / "out"
    with pytest.raises(OutOfSpace):
        await pack(
            take_input([str(tree)], None, limits=Limits(shard_samples_max=1)), local(out, DyingDisk(20))
        )
    await pack(take_input([str(tree)], None, limits=Limits(shard_samples_max=10)), local(out))
    assert sorted(contents(out)) == ["manifest.json", "shard-000000.tar", "shard-000001.tar"]


async def test_without_resume_everything_is_written_anew(tree: Path, tmp_path: Path) -> None:
    """Damage in a finished shard is healed by packing again."""
    out = tmp_path / "out"
    given = take_input([str(tree)], None, limits=LIMITS)
    await pack(given, local(out))
    before = contents(out)
    (out / "shard-000002.tar").write_bytes(b"damage")
    summary = await pack(given, local(out), resume=False, overwrite=True)
    assert contents(out) == before and summary.shards_written == 5


async def test_two_packers_do_not_meet(tree: Path, tmp_path: Path) -> None:
    """The second is told who holds the destination."""
    out = tmp_path / "out"
    async with local(out).held("process 4711"):
        with pytest.raises(LockHeld, match="process 4711"):
            await pack(take_input([str(tree)], None), local(out))


class ChangingDisk(LocalDisk):
    """A disk whose first reservation lets a source file change."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def create(self, path: str, size: int = 0) -> None:
        super().create(path, size)
        if path.endswith(f".{os.getpid()}") and self.victim.exists() and ".tar" in path:
            self.victim.unlink()


@pytest.mark.parametrize("policy", ["fail", "skip"])
async def test_a_vanishing_file(tree: Path, tmp_path: Path, policy: str) -> None:
    """A file that goes away while its shard is written is named; with skip the rest is packed and it is counted."""
    out = tmp_path / "out"
    policies = Policies(on_error="skip" if policy == "skip" else "fail")
    given = take_input([str(tree)], None, limits=LIMITS, policies=policies)
    disk = ChangingDisk(tree / "class0" / "003.bin")
    if policy == "fail":
        with pytest.raises(SampleFailed, match=r"003\.bin.*No such file"):
            await pack(given, local(out, disk))
        assert not (out / "manifest.json").exists() and not (out / "shard-000000.tar").exists()
        return
    summary = await pack(given, local(out, disk))
    assert summary.manifest.samples == 17 and len(summary.skipped) == 1 and "003.bin" in summary.skipped[0]
    first = (out / "shard-000000.tar").read_bytes()
    assert len(first) == summary.manifest.shards[0].size
    assert len(index_shard(first, of="x")) == 3


def test_files_without_a_true_size_are_refused(tmp_path: Path) -> None:
    """What /proc shows as empty is not packed as empty."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.txt").symlink_to("/proc/version")
    given = take_input([str(root)], None, policies=Policies(symlinks="follow"))

    async def main() -> None:
        await pack(given, local(tmp_path / "out"))

    import asyncio

    with pytest.raises(SampleFailed, match="more bytes than its size says"):
        asyncio.run(main())


async def test_a_full_disk_leaves_nothing_half_written(tree: Path, tmp_path: Path) -> None:
    """The reservation fails before a byte is written, and staging is gone."""

    class FullDisk(LocalDisk):
        def create(self, path: str, size: int = 0) -> None:
            if size:
                raise OutOfSpace(f"cannot create `{path}`: No space left on device", subject=path)
            super().create(path, size)

    out = tmp_path / "out"
    with pytest.raises(OutOfSpace):
        await pack(take_input([str(tree)], None, limits=LIMITS), local(out, FullDisk()))
    assert not list(out.glob("*.tar")) and not list(out.glob(".stager/pack/staging/*"))


@pytest.mark.parametrize("part_bytes_min", [1 << 20, 1 << 30])
async def test_into_a_bucket(tree: Path, tmp_path: Path, part_bytes_min: int) -> None:
    """In parts or whole, a bucket gets the same shards as a directory, and no upload is left open."""
    (tree / "class0" / "big.bin").write_bytes(os.urandom(20 << 20))
    bucket = MemoryBucket()
    store = MemoryStore(bucket, properties=StoreProperties("memory", part_bytes_min=part_bytes_min))
    given = take_input([str(tree)], None, limits=Limits(shard_samples_max=4))
    await store.begin_upload("shard-000000.tar")
    summary = await pack(given, BucketDestination(store, offload=InlineOffload()))
    await pack(given, local(tmp_path / "out"))
    found = {key: hashlib.sha256(item.body).hexdigest() for key, item in bucket.objects.items()}
    assert found == contents(tmp_path / "out")
    assert not bucket.uploads
    again = await pack(given, BucketDestination(store, offload=InlineOffload()))
    assert again.complete_before and again.manifest == summary.manifest
    with pytest.raises(UsageError, match="already holds a dataset"):
        await pack(take_input([str(tree)], None), BucketDestination(store, offload=InlineOffload()))


async def test_threads_and_progress(tree: Path, tmp_path: Path) -> None:
    """With real threads the sums of progress arrive at the totals."""
    offload = ThreadOffload()
    seen: list[PackProgress] = []
    destination = LocalDestination(str(tmp_path / "out"), disk=LocalDisk(), offload=offload)
    given = take_input([str(tree)], None, limits=LIMITS)
    writer = LocalWriter(destination, given.policies, offload=offload)
    await run.pack(
        given, destination, lambda _: writer, offload=offload, holder="a test", progress=seen.append
    )
    offload.close()
    last = seen[-1]
    assert (last.samples, last.bytes, last.shards) == (18, last.bytes_total, 5) and last.samples_total == 18


def test_several_sources_keep_their_names(tree: Path, tmp_path: Path) -> None:
    """With more than one source each one's name goes before its keys; equal names are refused."""
    found = survey(take_input([str(tree / "class0"), str(tree / "class1")], None))
    assert found.samples == 12
    with pytest.raises(UsageError, match="two sources are called `class0`"):
        take_input([str(tree / "class0"), str(tree / "class0")], None)


@pytest.mark.parametrize(
    ("sources", "destination", "kind", "message"),
    [
        (["data/nowhere"], None, NotFound, "nowhere"),
        (["data/class0/000.bin"], None, UsageError, "not a directory"),
        (["data"], "data/shards", UsageError, "lies in the source"),
        (["data"], "data/class0/000.bin", UsageError, "not a directory"),
    ],
)
def test_input_that_cannot_be_meant(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    sources: list[str],
    destination: str | None,
    kind: type,
    message: str,
) -> None:
    """Said before anything is looked at."""
    monkeypatch.chdir(tree.parent)
    with pytest.raises(kind, match=message):
        take_input(sources, destination)


def test_no_samples_is_an_error_that_says_what_was_there(tmp_path: Path) -> None:
    """An empty dataset is never what was meant."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".hidden").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no sample.*1 hidden"):
        survey(take_input([str(tmp_path / "data")], None))


STEMS = st.text(st.characters(codec="utf-8", exclude_characters="\0/."), min_size=1, max_size=12)
FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=8)


@given(
    files=st.dictionaries(st.tuples(STEMS, FIELDS), st.binary(max_size=2000), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_names_and_bytes_come_back_through_webdataset(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, str], bytes], data: st.DataObject
) -> None:
    """Whatever can be packed is read by plain webdataset with the same keys, fields and bytes."""
    root = tmp_path_factory.mktemp("any")
    (root / "data").mkdir()
    expected: dict[str, dict[str, bytes]] = {}
    for (stem, field), body in files.items():
        name = f"{stem}.{field}"
        try:
            (root / "data" / name).write_bytes(body)
        except OSError:
            continue  # too long for this file system
        if not unkeyable(name, split_name(name)) and field.lower() not in expected.get(stem, {}):
            expected.setdefault(stem, {})[field.lower()] = body
    given_input = take_input([str(root / "data")], None, policies=Policies(on_unkeyable="skip"))
    if not expected:
        return
    summary = await pack(given_input, local(root / "out"))
    shards = [str(root / "out" / shard.name) for shard in summary.manifest.shards]
    found = {
        sample["__key__"]: {name: body for name, body in sample.items() if not name.startswith("__")}
        for sample in read_with_webdataset(shards)
    }
    assert {key: sorted(fields) for key, fields in found.items()} == {
        key: sorted(fields) for key, fields in expected.items()
    }
    for key, fields in expected.items():
        clashes = sum(1 for stem, field in files if stem == key) != len(fields)
        assert clashes or found[key] == fields
