"""One look at what may be a checkpoint: a snapshot of its files, for the layout adapters to judge. Blocking."""

from __future__ import annotations

from dataclasses import dataclass

from stager.disk import Disk, FileStat
from stager.errors import FormatError
from stager.formats.layouts.api import Candidate, Entry, Read, Verdict, Writing
from stager.formats.layouts.detection import AUTO, judge
from stager.formats.names import check_relative_path

FILES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Look:
    """What one look saw.

    Attributes:
        name: Of the directory or file, without a folder.
        is_file: Whether it is a single file.
        files: Its files by relative path.
        verdict: What the layouts say of it.
    """

    name: str
    is_file: bool
    files: dict[str, Entry]
    verdict: Verdict

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(entry.size for entry in self.files.values())


def look(disk: Disk, folder: str, name: str, *, layout: str = AUTO, ranks: int | None = None) -> Look | None:
    """Look at ``folder/name``; None if nothing of that name is there."""
    try:
        candidate = _snapshot(disk, folder, name, ranks)
        verdict: Verdict = judge(candidate, layout=layout)
    except FileNotFoundError as error:
        if not _exists(disk, f"{folder}/{name}"):
            return None
        # It shrank between the listing and a read: somebody writes or removes it right now.
        return Look(name, False, {}, Writing(f"`{error.filename}` has gone while it was looked at"))
    except FormatError as error:
        return Look(name, False, {}, Writing(error.message))
    return Look(name, candidate.is_file, dict(candidate.listing), verdict)


def names_in(disk: Disk, folder: str) -> list[str]:
    """Names in the watched folder that may be checkpoints; hidden ones, ours included, are none."""
    try:
        return [name for name in disk.list_names(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def entry_of(status: FileStat) -> Entry:
    return Entry(status.size, status.mtime_ns, status.inode)


def _snapshot(disk: Disk, folder: str, name: str, ranks: int | None) -> Candidate:
    check_relative_path(name, of="name")
    root = f"{folder}/{name}"
    status = disk.stat(root)
    if status.is_directory:
        found = disk.walk(root)
        if len(found) > FILES_MAX:
            raise FormatError(f"`{root}` has {len(found)} files; at most {FILES_MAX} are taken", subject=root)
        listing = {check_relative_path(path): entry_of(file) for path, file in found}
        return Candidate(name, False, listing, _reader(disk, root), ranks)
    return Candidate(name, True, {name: entry_of(status)}, _reader(disk, folder), ranks)


def _reader(disk: Disk, root: str) -> Read:
    def read(path: str, offset: int, size: int) -> bytes:
        return disk.read_at(f"{root}/{path}", offset, size)

    return read


def _exists(disk: Disk, path: str) -> bool:
    try:
        disk.stat(path)
    except FileNotFoundError:
        return False
    return True
