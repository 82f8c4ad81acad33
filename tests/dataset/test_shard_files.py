"""Shards opened by mapping and by pread."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from stager.dataset.mounts import may_map
from stager.dataset.shard_files import open_shard
from stager.errors import FormatError
from tests.dataset.shards import write_with_manifest


@pytest.mark.parametrize("mapped", [True, False, None])
def test_bytes_are_the_same_either_way(tmp_path: Path, mapped: bool | None) -> None:
    """Every member reads the same, and goes on reading when the name is gone."""
    path = write_with_manifest(tmp_path, [5]) / "shard-000000.tar"
    raw = path.read_bytes()
    before = len(os.listdir("/proc/self/fd"))
    with open_shard(str(path), mapped=mapped) as opened:
        path.unlink()
        places = [place for sample in range(5) for place in opened.index.places(sample)]
        assert len(places) == 10
        for place in places:
            assert opened.read(place.offset, place.size) == raw[place.offset : place.offset + place.size]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mapped", [True, False])
def test_what_cannot_be_read_leaves_nothing_open(tmp_path: Path, mapped: bool) -> None:
    """An empty, a foreign and a missing file are errors that name it, without a leaked descriptor."""
    path = tmp_path / "x.tar"
    gc.collect()  # what earlier tests left to the collector must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    for content in (b"", b"<html>not a tar</html>" * 100):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"x\.tar"):
            open_shard(str(path), mapped=mapped)
    with pytest.raises(FileNotFoundError):
        open_shard(str(tmp_path / "y.tar"), mapped=mapped)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """By pread, a shorter file is an error that names shard and byte, not fewer bytes."""
    path = write_with_manifest(tmp_path, [5]) / "shard-000000.tar"
    with open_shard(str(path), mapped=False) as opened:
        os.truncate(path, 600)
        place = opened.index.places(4)[0]
        with pytest.raises(FormatError, match=rf"ends at byte {place.offset}"):
            opened.read(place.offset, place.size)


def test_only_local_file_systems_are_mapped(tmp_path: Path) -> None:
    """What is not on the list, here the kernel's own, is read."""
    assert not may_map("/proc/self/status")
    assert not may_map("/sys/kernel/notes")
