"""Irregular shards: where webdataset is right we agree with it, where it is silent we are not."""

from __future__ import annotations

import gc
import io
import tarfile
import warnings
from pathlib import Path

import pytest
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.index import index_shard
from stager.formats.samples import group_samples
from stager.formats.tar import list_members

PARTS = st.text("abA._- é", min_size=1, max_size=5)
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=12)


def write(names: list[str], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name.encode())
            tar.addfile(info, io.BytesIO(name.encode()))
    return out.getvalue()


def read_ours(raw: bytes) -> list[tuple[str, dict[str, bytes]]]:
    index = index_shard(raw, of="x.tar")
    return [
        (
            index.key(number),
            {place.name: raw[place.offset : place.offset + place.size] for place in index.places(number)},
        )
        for number in range(len(index))
    ]


def read_theirs(path: Path) -> list[tuple[str, dict[str, bytes]]] | None:
    """What webdataset reads, or None where it raises ValueError: it does for a field that comes twice."""
    with warnings.catch_warnings():
        # It leaves its files to the garbage collector, which is waited for.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            found = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
        except ValueError:
            found = None
        gc.collect()
    if found is None:
        return None
    return [
        (sample["__key__"], {name: body for name, body in sample.items() if not name.startswith("__")})
        for sample in found
    ]


@given(NAMES, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_and_fields_are_those_of_webdataset(tmp_path: Path, names: list[str], form: int) -> None:
    """Any mixture of dots, folders, hidden names and repeated keys, but for stems that are empty (see below)."""
    names = [name for name in names if not name.rsplit("/", 1)[-1].startswith(".")]
    path = tmp_path / "x.tar"
    path.write_bytes(write(names, form))
    try:
        ours = read_ours(path.read_bytes())
    except FormatError as error:
        assert "second time" in str(error) and read_theirs(path) is None
        return
    assert ours == read_theirs(path)


def test_hidden_files_in_folders_are_no_samples(tmp_path: Path) -> None:
    """webdataset makes one sample `d/` of all of them; we count them as names without a key."""
    raw = write(["d/._a.jpg", "d/.jpg", "d/a.jpg"])
    (tmp_path / "x.tar").write_bytes(raw)
    assert [key for key, _ in read_theirs(tmp_path / "x.tar") or ()] == ["d/", "d/a"]
    grouping = group_samples(list_members(raw, of="x.tar"), of="x.tar")
    assert [sample.key for sample in grouping.samples] == ["d/a"] and grouping.skipped == {"no key": 2}


def test_what_webdataset_loses_in_silence_is_an_error(tmp_path: Path) -> None:
    """Cut at a member's boundary it gives fewer samples, and of two tars the first: we refuse both."""
    raw = write(["a.txt", "b.txt", "c.txt"])
    (tmp_path / "x.tar").write_bytes(raw[: 4 * 512])
    assert len(read_theirs(tmp_path / "x.tar") or ()) == 2
    with pytest.raises(FormatError, match="cut short"):
        index_shard(raw[: 4 * 512], of="x.tar")
    (tmp_path / "x.tar").write_bytes(raw + write(["d.txt"]))
    assert len(read_theirs(tmp_path / "x.tar") or ()) == 3
    with pytest.raises(FormatError, match="follows the archive's end"):
        index_shard(raw + write(["d.txt"]), of="x.tar")


def test_an_empty_archive_is_legal_and_an_empty_file_is_not() -> None:
    """No members make no samples; no bytes are damage."""
    assert len(index_shard(write([]), of="x.tar")) == 0
    with pytest.raises(FormatError, match="empty"):
        index_shard(b"", of="x.tar")


def test_global_headers_name_nothing_but_may_size() -> None:
    """git's global PAX comment is passed over; a global path names no member."""
    out = io.BytesIO()
    headers = {"comment": "a commit", "path": "everything"}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    assert read_ours(out.getvalue()) == [("a", {"txt": b"hi"})]


def test_sizes_in_base_256() -> None:
    """GNU's large sizes are read; a negative one is refused."""
    info = tarfile.TarInfo("a.bin")
    info.size = 9 << 30
    with pytest.raises(FormatError, match="would end at byte"):
        list_members(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024), of="x.tar")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(FormatError, match="no number"):
        list_members(bytes(header) + bytes(1024), of="x.tar")


@pytest.mark.parametrize(
    "record",
    [
        b"9999999999 path=x\n",
        b"5 a\n",
        b"0 path=x\n",
        b"-4 path=x\n",
        b"path",
        b"12 path=abc",
        b"11 path=\xff\xfe\n",
    ],
)
def test_broken_pax_records_are_refused(record: bytes) -> None:
    """Lengths that lie, and names that are not UTF-8."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    body = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    with pytest.raises(FormatError, match=r"x\.tar"):
        list_members(body + tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT) + bytes(1024), of="x.tar")
