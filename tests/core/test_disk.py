"""The disk contract, over the real file system and over the simulated one that stands in for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stager.disk import Disk, LocalDisk
from stager.errors import IntegrityError, LockHeld, OutOfSpace, StagerError
from tests.sim.disk import SimulatedDisk
from tests.sim.world import World

Place = tuple[Disk, str]


@pytest.fixture(params=["local", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    disk: Disk = LocalDisk() if request.param == "local" else SimulatedDisk(World(1))
    disk.make_directory(str(tmp_path))
    return disk, str(tmp_path)


def read(disk: Disk, path: str) -> bytes:
    return disk.read_at(path, 0, 1 << 20)


def test_a_reserved_file_is_written_in_any_order(place: Place) -> None:
    """Ranges land where they belong, and the file has the size it was created with."""
    disk, root = place
    disk.create(f"{root}/f", 10)
    disk.write_at(f"{root}/f", 5, b"world")
    disk.write_at(f"{root}/f", 0, memoryview(b"hello"))
    assert read(disk, f"{root}/f") == b"helloworld"
    assert disk.stat(f"{root}/f").size == 10
    assert disk.read_at(f"{root}/f", 8, 100) == b"ld"


def test_publish_replaces_and_publish_new_refuses(place: Place) -> None:
    """The two ways to a final name differ in what they do to an existing file."""
    disk, root = place
    disk.write_file(f"{root}/final", b"old")
    disk.create(f"{root}/staged")
    disk.write_at(f"{root}/staged", 0, b"new")
    with pytest.raises(FileExistsError):
        disk.publish_new(f"{root}/staged", f"{root}/final")
    assert read(disk, f"{root}/final") == b"old" and read(disk, f"{root}/staged") == b"new"
    disk.publish(f"{root}/staged", f"{root}/final")
    assert read(disk, f"{root}/final") == b"new"
    assert disk.list_names(root) == ["final"]


def test_a_pinned_file_survives_rotation(place: Place) -> None:
    """Unlinking the first name leaves the bytes under the second."""
    disk, root = place
    disk.write_file(f"{root}/weights", b"bytes")
    assert disk.pin(f"{root}/weights", f"{root}/sealed") == "link"
    disk.remove(f"{root}/weights")
    assert read(disk, f"{root}/sealed") == b"bytes"
    with pytest.raises(FileNotFoundError):
        disk.pin(f"{root}/weights", f"{root}/again")


def test_a_tree_is_published_whole_and_never_over_another(place: Place) -> None:
    """A directory appears with all its files, or not at all."""
    disk, root = place
    disk.make_directory(f"{root}/staging/a/b")
    disk.write_file(f"{root}/staging/a/b/one", b"1")
    disk.write_file(f"{root}/staging/two", b"2")
    disk.publish_tree(f"{root}/staging", f"{root}/final")
    assert [name for name, _ in disk.walk(f"{root}/final")] == ["a/b/one", "two"]
    disk.make_directory(f"{root}/more")
    with pytest.raises(FileExistsError):
        disk.publish_tree(f"{root}/more", f"{root}/final")
    assert [name for name, _ in disk.walk(f"{root}/final")] == ["a/b/one", "two"]


def test_removing_twice_is_fine_and_looking_at_nothing_is_not(place: Place) -> None:
    """Removal is idempotent; stat, list, walk and read of a missing path say so."""
    disk, root = place
    disk.make_directory(f"{root}/d")
    disk.write_file(f"{root}/d/f", b"")
    for _ in range(2):
        disk.remove(f"{root}/d/f")
        disk.remove_tree(f"{root}/d")
    looks: list[Callable[[str], object]] = [disk.stat, disk.list_names, disk.walk]
    for look in looks:
        with pytest.raises(FileNotFoundError):
            look(f"{root}/d")
    with pytest.raises(FileNotFoundError):
        disk.read_at(f"{root}/d/f", 0, 1)


def test_a_lock_is_held_once(place: Place) -> None:
    """The second holder is refused, and let in when the first has gone."""
    disk, root = place
    with (
        disk.lock(f"{root}/lock", "process 1"),
        pytest.raises(LockHeld),
        disk.lock(f"{root}/lock", "process 2"),
    ):
        pass
    with disk.lock(f"{root}/lock", "process 3"):
        pass


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    """Whoever is refused learns by whom."""
    disk = LocalDisk()
    path = str(tmp_path / "lock")
    with (
        disk.lock(path, "pid 123 on node-7"),
        pytest.raises(LockHeld, match="pid 123 on node-7"),
        disk.lock(path, "x"),
    ):
        pass


def test_links_are_not_followed_when_a_tree_is_removed(tmp_path: Path) -> None:
    """A link inside a removed tree does not take its target along, and a link is not a tree."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "other").symlink_to(tmp_path / "kept")
    LocalDisk().remove_tree(str(tmp_path / "tree"))
    with pytest.raises(StagerError, match="symbolic link"):
        LocalDisk().remove_tree(str(tmp_path / "other"))
    assert (tmp_path / "kept" / "file").read_text() == "x"


def test_a_full_disk_says_so_with_a_hint(tmp_path: Path) -> None:
    """Asking for more than the file system has is OutOfSpace, at reservation, before any byte is written."""
    with pytest.raises(OutOfSpace, match="hint:"):
        LocalDisk().create(str(tmp_path / "huge"), LocalDisk().usage(str(tmp_path)).total_bytes * 2)


def test_pin_copies_across_file_systems(tmp_path: Path) -> None:
    """Where no link can be made the bytes are copied, and stay the same."""
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.fail("this test needs /dev/shm to be another file system than the temporary directory")
    source = other / f"stager-test-{os.getpid()}"
    source.write_bytes(b"z" * 10_000)
    try:
        assert LocalDisk().pin(str(source), str(tmp_path / "copy")) == "copy"
    finally:
        source.unlink()
    assert (tmp_path / "copy").read_bytes() == b"z" * 10_000


def test_a_writing_source_is_not_copied_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that grows while it is copied is refused, and leaves no target behind."""
    source = tmp_path / "growing"
    source.write_bytes(b"a" * 100)
    real_stat, calls = os.stat, []

    def growing_stat(path: str, **options: object) -> os.stat_result:
        calls.append(path)
        if calls.count(str(source)) == 2:
            source.write_bytes(b"b" * 50)
        return real_stat(path)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(os, "stat", growing_stat)
    with pytest.raises(IntegrityError, match="changed while it was copied"):
        LocalDisk().pin(str(source), str(tmp_path / "copy"))
    monkeypatch.undo()
    assert not (tmp_path / "copy").exists()


def test_where_no_directory_can_be_made(tmp_path: Path) -> None:
    """A file system that takes no directories is an error of ours that names the path, not a missing file."""
    with pytest.raises(StagerError, match="/proc/x"):
        LocalDisk().make_directory("/proc/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        LocalDisk().make_directory(str(tmp_path / "file"))
