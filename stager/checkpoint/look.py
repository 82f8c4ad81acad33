"""One look at what may be a checkpoint: a snapshot of its files, for the layout adapters to judge. Blocking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stager.disk import Disk, FileStat
from stager.errors import FormatError, StagerError
from stager.formats.layouts.api import (
    BESIDE_BYTES_MAX,
    Beside,
    Candidate,
    Corrupt,
    Entry,
    NotMine,
    Read,
    Verdict,
    Writing,
)
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
        if candidate is None:
            return Look(name, False, {}, NotMine())
        verdict: Verdict = judge(candidate, layout=layout)
    except FileNotFoundError as error:
        if not _exists(disk, f"{folder}/{name}"):
            return None
        # It shrank between the listing and a read: somebody writes or removes it right now.
        return Look(name, False, {}, Writing(f"`{error.filename}` has gone while it was looked at"))
    except StagerError as error:
        # What cannot be read or cannot be named in a bucket is told as what is damaged is; the others go on.
        return Look(name, False, {}, Corrupt(error.message))
    return Look(name, candidate.is_file, dict(candidate.listing), verdict)


def names_in(disk: Disk, folder: str) -> list[str]:
    """Names in the watched folder that may be checkpoints; hidden ones, ours included, are none."""
    try:
        return [name for name in disk.list_names(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def entry_of(status: FileStat) -> Entry:
    return Entry(status.size, status.mtime_ns, status.inode)


def _snapshot(disk: Disk, folder: str, name: str, ranks: int | None) -> Candidate | None:
    """What may be a checkpoint; None for what is neither a directory nor a file."""
    check_relative_path(name, of="name")
    root = f"{folder}/{name}"
    status = disk.stat(root)
    if status.is_link:
        # Such as `latest`: nothing of its own, if it leads to what is watched.
        target = disk.resolve(root)
        if not _is_below(target, disk.resolve(folder)):
            raise _refused(f"`{root}`", target)
        return None
    if status.is_directory:
        found = disk.walk(root)
        _check_links(disk, folder, root, found)
        if len(found) > FILES_MAX:
            raise FormatError(f"`{root}` has {len(found)} files; at most {FILES_MAX} are taken", subject=root)
        listing = {check_relative_path(path): entry_of(file) for path, file in found}
        return Candidate(name, False, listing, _reader(disk, root), ranks, _beside(disk, folder))
    if not status.is_regular:
        # Pipes, sockets and devices are nobody's checkpoint, and nothing to read from.
        return None
    listing = {name: entry_of(status)}
    return Candidate(name, True, listing, _reader(disk, folder), ranks, _beside(disk, folder))


def _check_links(disk: Disk, folder: str, root: str, found: Sequence[tuple[str, FileStat]]) -> None:
    """FormatError if a checkpoint holds a link that is not to a regular file in the watched folder.

    What a link leads to elsewhere may be anything that the daemon can read, and a directory or nothing would be missing
    from the bucket without a word.
    """
    links = [(path, status) for path, status in found if status.is_link]
    watched = disk.resolve(folder) if links else ""
    for path, status in links:
        target = disk.resolve(f"{root}/{path}")
        if status.is_directory or not status.is_regular or not _is_below(target, watched):
            raise _refused(f"`{root}/{path}`", target)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _refused(link: str, target: str) -> FormatError:
    return FormatError(
        f"{link} is a symbolic link to `{target}`; only links to files in the watched folder are taken",
        subject=link,
        hint="put the file itself there",
    )


def _reader(disk: Disk, root: str) -> Read:
    def read(path: str, offset: int, size: int) -> bytes:
        return disk.read_at(f"{root}/{path}", offset, size)

    return read


def _beside(disk: Disk, folder: str) -> Beside:
    """Reads trackers and markers in the watched folder. What is no regular file there is only there."""

    def read(name: str) -> bytes | None:
        path = f"{folder}/{name}"
        try:
            status = disk.stat(path)
            regular = status.is_regular and not status.is_link
            return disk.read_at(path, 0, BESIDE_BYTES_MAX) if regular else b""
        except FileNotFoundError:
            return None

    return read


def _exists(disk: Disk, path: str) -> bool:
    try:
        disk.stat(path)
    except FileNotFoundError:
        return False
    return True
