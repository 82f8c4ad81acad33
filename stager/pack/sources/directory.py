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
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                findings.add(Kind.HIDDEN, os.fsdecode(entry.path))
            elif not wants(os.fsdecode(entry.name), directory=entry.is_dir()):
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
    for name in names:
        path = os.path.join(folder.path, name)
        shown = os.fsdecode(path)
        try:
            member = (folder.prefix + name).decode("utf-8")
        except UnicodeDecodeError:
            findings.add(Kind.UNKEYABLE, shown, "it is not UTF-8")
            continue
        try:
            status = os.stat(path)
        except OSError as error:
            findings.add(Kind.UNREADABLE, shown, error.strerror or str(error))
            continue
        if not os.access(path, os.R_OK):
            findings.add(Kind.UNREADABLE, shown, "permission denied")
            continue
        yield SourceFile(member, shown, status.st_size, status.st_mtime_ns)


def _closes_a_loop(path: bytes, ancestors: frozenset[tuple[int, int]]) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) in ancestors
