"""The fast way of indexing says what the thorough one says, of every tar; what is remembered is of the same file."""

from __future__ import annotations

import io
import mmap
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.dataset import indexing
from stager.dataset.index_cache import IndexCache
from stager.dataset.indexing import index_mapped
from stager.dataset.shard_files import open_shard
from stager.errors import FormatError
from stager.formats.index import ShardIndex, index_shard
from stager.formats.tar import END_OF_ARCHIVE, member_header, padded

PART = st.text("abA._ é\n", min_size=1, max_size=5)
NAME = st.lists(PART, min_size=1, max_size=3).map("/".join)
LONG = st.builds(
    lambda stem, many: "/".join([stem * 9] * many) + "/k.txt",
    st.text("ab", min_size=3, max_size=5),
    st.integers(1, 9),
)
MEMBERS = st.lists(st.tuples(NAME | LONG, st.binary(max_size=1100)), min_size=1, max_size=8)


def mapped(raw: bytes) -> mmap.mmap:
    file = mmap.mmap(-1, len(raw))
    file.write(raw)
    return file


def told(raw: bytes, index: Callable[..., ShardIndex]) -> bytes | str:
    """The index by its layout, or the message of the error."""
    try:
        return index(mapped(raw), of="x.tar").layout_digest()
    except FormatError as error:
        return error.message


def by_tarfile(members: list[tuple[str, bytes]], form: int, mtime: float) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(body), mtime  # type: ignore[assignment]  # as webdataset sets it
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def by_us(members: list[tuple[str, bytes]]) -> bytes:
    parts = [
        member_header(name, len(body)) + body + bytes(padded(len(body)) - len(body)) for name, body in members
    ]
    return b"".join(parts) + END_OF_ARCHIVE


@settings(max_examples=300)
@given(MEMBERS, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, None]))
@example([("a.jpg", b"1"), ("a.JPG", b"2")], None)
@example([("__meta__/a.jpg", b"1"), ("b.c", b"")], None)
@example([("a/.b", b"1"), ("nodot", b""), ("c.d", b"3")], None)
def test_both_ways_say_the_same(members: list[tuple[str, bytes]], form: int | None) -> None:
    try:
        raw = by_us(members) if form is None else by_tarfile(members, form, 1700000000.25)
    except ValueError:
        return  # USTAR cannot hold the name
    assert told(raw, index_mapped) == told(raw, index_shard)


@settings(max_examples=300)
@given(MEMBERS, st.sampled_from([tarfile.PAX_FORMAT, None]), st.data())
def test_both_ways_say_the_same_of_damage(
    members: list[tuple[str, bytes]], form: int | None, data: st.DataObject
) -> None:
    raw = bytearray(by_us(members) if form is None else by_tarfile(members, form, 1700000000.25))
    for _ in range(data.draw(st.integers(1, 3))):
        # Headers are hit more often than their share of the bytes: the interesting places are there.
        block = data.draw(st.integers(0, len(raw) // 512 - 1)) * 512
        raw[block + data.draw(st.integers(0, 511))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 512, 1024, 1500]))
    raw = raw[: max(len(raw) - cut, 1)]
    assert told(bytes(raw), index_mapped) == told(bytes(raw), index_shard)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, None])
def test_ordinary_shards_take_the_fast_way(form: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [
        (f"folder/{number:06d}.{field}", b"x" * number) for number in range(50) for field in ("jpg", "json")
    ]
    members.append(("folder/" * 20 + "deep.jpg", b"y"))
    raw = by_us(members) if form is None else by_tarfile(members[:-1], form, 1700000000.25)
    expected = told(raw, index_shard)
    monkeypatch.delattr(indexing, "index_shard")
    assert told(raw, index_mapped) == expected


def test_what_is_remembered_is_of_the_same_file(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.tar", IndexCache()
    path.write_bytes(by_us([("a.txt", b"one")]))
    first = open_shard(str(path), indices=cache)
    assert open_shard(str(path), indices=cache).index is first.index
    (tmp_path / "new").write_bytes(by_us([("b.txt", b"two")]))
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(tmp_path / "new", path)
    again = open_shard(str(path), indices=cache)
    assert (again.index.keys, again.fields(0)) == (["b"], {"txt": b"two"})
    assert first.fields(0) == {"txt": b"one"}, "what is open stays readable"


def test_only_so_much_is_remembered(tmp_path: Path) -> None:
    paths = []
    for number in range(5):
        paths.append(tmp_path / f"{number}.tar")
        paths[-1].write_bytes(by_us([(f"{number}.txt", b"x")]))
    one = index_shard(paths[0].read_bytes(), of="").memory_bytes
    cache = IndexCache(memory_bytes_max=3 * one)
    for path in paths:
        open_shard(str(path), indices=cache).close()
    assert [cache.get(path.stat()) is not None for path in paths] == [False, False, True, True, True]


def test_views_outlive_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(by_us([("a.bin", b"0123456789"), ("a.txt", b"t")]))
    with open_shard(str(path), mapped=True) as opened:
        views = opened.fields(0, copy=False)
        assert opened.fields(0, ["txt"]) == {"txt": b"t"}
    path.unlink()
    view = views["bin"]
    assert isinstance(view, memoryview) and view.readonly
    assert bytes(view) == b"0123456789"
