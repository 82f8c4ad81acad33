"""A tree of files as a source: walked in a fixed order, one directory in memory at a time.

In a directory come its files, sorted by the bytes of their names, then its subdirectories in the same order. All names
with one stem before the first dot are neighbours in that order, so a sample's files follow one another, and no key can
come back later.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from stager.pack.findings import Findings, Kind
from stager.pack.samples import SourceFile


@dataclass(frozen=True, slots=True)
class _Folder:
    """A directory to be walked: where it lies, what its members' names start with, and the directories it lies in."""

    path: bytes
    prefix: bytes
    ancestors: frozenset[tuple[int, int]]


@dataclass(slots=True)
class _Names:
    """What a directory holds, by kind; names only, since a flat directory may hold millions."""

    files: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    linked_folders: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A tree of files.

    Attributes:
        name: The absolute path of its root.
        prefix: Goes before the names, e.g. ``train/``.
    """

    name: str
    prefix: str = ""
    keys_are_together: ClassVar[bool] = True

    def files(self, findings: Findings) -> Iterator[SourceFile]:
        return walk_directory(self.name, findings, prefix=self.prefix)


def walk_directory(root: str, findings: Findings, *, prefix: str = "") -> Iterator[SourceFile]:
    """The regular files below ``root`` that can be packed, in order.

    Args:
        root: An absolute path of a directory.
        findings: What is not given is added here, under its policies.
        prefix: Goes before the names, e.g. ``train/``.
    """
    real_root = os.path.realpath(os.fsencode(root))
    pending = [_Folder(os.fsencode(root), os.fsencode(prefix), frozenset())]
    while pending:
        folder = pending.pop()
        try:
            status = os.stat(folder.path)
            names = _list(folder.path, real_root, findings)
        except OSError as error:
            findings.add(Kind.UNREADABLE, os.fsdecode(folder.path), error.strerror or str(error))
            continue
        yield from _files(folder, names.files, findings)
        identity = (status.st_dev, status.st_ino)
        below = folder.ancestors | {identity}
        # In reverse, so that the first is the next to be taken.
        for name in reversed(names.folders):
            path = os.path.join(folder.path, name)
            if name in names.linked_folders and _closes_a_loop(path, below):
                findings.add(Kind.LINK, os.fsdecode(path), "it points to a directory that it lies in")
                continue
            pending.append(_Folder(path, folder.prefix + name + b"/", below))


def _list(path: bytes, real_root: bytes, findings: Findings) -> _Names:
    names = _Names()
    wants = findings.policies.wants
    picky = bool(findings.policies.include or findings.policies.exclude)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                findings.add(Kind.HIDDEN, os.fsdecode(entry.path))
            elif picky and not wants(os.fsdecode(entry.name), directory=entry.is_dir()):
                findings.add(Kind.UNWANTED, os.fsdecode(entry.path))
            elif entry.is_symlink():
                _sort_link(entry, names, real_root, findings)
            elif entry.is_file(follow_symlinks=False):
                names.files.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                names.folders.append(entry.name)
            else:
                findings.add(Kind.SPECIAL, os.fsdecode(entry.path))
    names.files.sort()
    names.folders.sort()
    return names


def _sort_link(entry: os.DirEntry[bytes], names: _Names, real_root: bytes, findings: Findings) -> None:
    path, policy = os.fsdecode(entry.path), findings.policies.symlinks
    if policy == "skip":
        findings.add(Kind.LINK_SKIPPED, path)
        return
    try:
        mode = os.stat(entry.path).st_mode
    except OSError as error:
        findings.add(Kind.LINK, path, error.strerror or str(error))
        return
    if stat.S_ISDIR(mode):
        if policy == "follow":
            names.folders.append(entry.name)
            names.linked_folders.add(entry.name)
        else:
            findings.add(Kind.LINK, path, "it points to a directory")
    elif not stat.S_ISREG(mode):
        findings.add(Kind.SPECIAL, path)
    elif policy == "follow" or os.path.realpath(entry.path).startswith(real_root.rstrip(b"/") + b"/"):
        names.files.append(entry.name)
    else:
        findings.add(Kind.LINK, path, "it points out of the source")


def _files(folder: _Folder, names: list[bytes], findings: Findings) -> Iterator[SourceFile]:
    if not names:
        return
    root = os.fsdecode(folder.path).rstrip("/") + "/"
    try:
        prefix = folder.prefix.decode("utf-8")
    except UnicodeDecodeError:
        for name in names:
            findings.add(Kind.UNKEYABLE, root + os.fsdecode(name), "it is not UTF-8")
        return
    # By name below an open directory: a long path is not looked up again for each of its files.
    try:
        descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        findings.add(Kind.UNREADABLE, root, error.strerror or str(error))
        return
    try:
        for name in names:
            try:
                plain = name.decode("utf-8")
                status = os.stat(name, dir_fd=descriptor)
            except UnicodeDecodeError:
                findings.add(Kind.UNKEYABLE, root + os.fsdecode(name), "it is not UTF-8")
                continue
            except OSError as error:
                findings.add(Kind.UNREADABLE, root + plain, error.strerror or str(error))
                continue
            # What everybody may read need not be asked for.
            if status.st_mode & 0o444 != 0o444 and not os.access(name, os.R_OK, dir_fd=descriptor):
                findings.add(Kind.UNREADABLE, root + plain, "permission denied")
                continue
            yield SourceFile(prefix + plain, root + plain, status.st_size, status.st_mtime_ns)
    finally:
        os.close(descriptor)


def _closes_a_loop(path: bytes, ancestors: frozenset[tuple[int, int]]) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) in ancestors
