"""Seals: a checkpoint's files under names of our own, so that the trainer's rotation cannot take them away.

Hard links into a tree on the same file system, taken at the moment of detection; copies where no links can be made. The
tree appears with one rename, synced, with a description of what it holds:

    <seals>/<seal id>/seal.json
    <seals>/<seal id>/files/<relative path>

A file that is written in place after that has another size or time than the seal says; then the seal is broken and thrown
away. All functions block; each is one offloaded call.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stager.checkpoint.detect import fingerprint_of
from stager.checkpoint.look import Look
from stager.disk import Disk
from stager.errors import FormatError, IntegrityError
from stager.formats.commits import CommitMarker, decode_marker, encode_marker
from stager.formats.digests import Digest, check_sha256, decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import as_object, load_object, take_count, take_list, take_text, take_version
from stager.formats.layouts.api import Complete
from stager.formats.names import check_relative_path

SEALS_FOLDER = ".stager-seals"
SEAL_VERSION = 1
SEAL_BYTES_MAX = 512 << 20
_DESCRIPTION = "seal.json"
_FILES = "files"
_STAGING = "staging-"
_SEAL_ID = re.compile(r"[0-9a-f]{32}")


class DamagedSeal(IntegrityError):
    """A file of a seal is not what a tier had committed: the seal vouches for nothing any more."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of a seal, as it was when it was sealed; with its digest, where a tier before has told it."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """A checkpoint that is safe on this node.

    Attributes:
        seal_id: 32 hexadecimal digits, the folder's name.
        name: The trainer's name for it.
        fingerprint: Of the trainer's files, by `fingerprint_of`.
        layout: The adapter that recognised it.
        files: Sorted by path.
        markers: Paths among them that are made visible last, in order.
        commit: Step, metrics and cursor; the step from the layout where the trainer gave none.
        sealed_ns: Wall time, nanoseconds since the epoch.
    """

    seal_id: str
    name: str
    fingerprint: str
    layout: str
    files: tuple[SealedFile, ...]
    markers: tuple[str, ...]
    commit: CommitMarker
    sealed_ns: int

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def seal_path(root: str, seal_id: str) -> str:
    return f"{root}/{seal_id}"


def files_path(root: str, seal_id: str) -> str:
    """The folder of a seal's files."""
    return f"{root}/{seal_id}/{_FILES}"


def file_path(root: str, seal_id: str, path: str) -> str:
    """Where a sealed file lies."""
    return f"{files_path(root, seal_id)}/{path}"


def make_seal(
    disk: Disk, folder: str, found: Look, complete: Complete, root: str, seal_id: str, sealed_ns: int
) -> Seal:
    """Seal ``folder/<name>`` as it was looked at.

    Raises:
        FileNotFoundError: A file has gone meanwhile; no seal is left.
        IntegrityError: A file has changed meanwhile; no seal is left.
        OutOfSpace: No room for links or copies; no seal is left.
    """
    source = folder if found.is_file else f"{folder}/{found.name}"
    commit = complete.commit or CommitMarker()
    seal = Seal(
        seal_id=seal_id,
        name=found.name,
        fingerprint=fingerprint_of(found.files, complete.files),
        layout=complete.layout,
        files=(),
        markers=complete.markers,
        commit=CommitMarker(complete.step, commit.metrics, commit.cursor),
        sealed_ns=sealed_ns,
    )

    def pin(path: str, target: str) -> SealedFile:
        return _pin(disk, f"{source}/{path}", target, path, found)

    return _lay_down(disk, root, seal, sorted(complete.files), pin)


def hand_on(disk: Disk, seal: Seal, source: str, root: str, digests: Mapping[str, Digest]) -> Seal:
    """The same seal in another root, for the tier behind: of the files below ``source``, which have these digests.

    Raises:
        FileNotFoundError, IntegrityError: A file is not there as it should be; no seal is left.
        OutOfSpace: No room; no seal is left.
    """
    sizes = {file.path: file.size for file in seal.files}

    def pin(path: str, target: str) -> SealedFile:
        disk.pin(f"{source}/{path}", target)
        status = disk.stat(target)
        if status.size != sizes[path]:
            raise IntegrityError(
                f"`{source}/{path}` has {status.size} bytes where {sizes[path]} were published",
                subject=f"{source}/{path}",
            )
        return SealedFile(path, status.size, status.mtime_ns, status.inode, digests[path])

    try:
        # Of a life that died after it had handed this on.
        disk.stat(f"{seal_path(root, seal.seal_id)}/{_DESCRIPTION}")
    except FileNotFoundError:
        disk.remove_tree(seal_path(root, seal.seal_id))
        return _lay_down(disk, root, seal, [file.path for file in seal.files], pin)
    return _load(disk, root, seal.seal_id)


def _lay_down(
    disk: Disk, root: str, seal: Seal, paths: Sequence[str], pin: Callable[[str, str], SealedFile]
) -> Seal:
    """``seal`` with its files, each as ``pin`` puts it at a target; the tree appears at once, synced."""
    staging = f"{root}/{_STAGING}{seal.seal_id}"
    try:
        disk.make_directory(staging)
        for parent in sorted({os.path.dirname(f"{staging}/{_FILES}/{path}") for path in paths}):
            disk.make_directory(parent)
        sealed = replace(seal, files=tuple(pin(path, f"{staging}/{_FILES}/{path}") for path in paths))
        disk.write_file(f"{staging}/{_DESCRIPTION}", _encode(sealed), durable=False)
        disk.publish_tree(staging, seal_path(root, seal.seal_id))
    except BaseException:
        disk.remove_tree(staging)
        raise
    return sealed


def load_seals(disk: Disk, root: str) -> tuple[list[Seal], list[tuple[str, str]]]:
    """What an earlier life sealed, oldest first, and what could not be used with the reason; that is removed."""
    try:
        names = disk.list_names(root)
    except FileNotFoundError:
        return [], []
    seals, broken = [], []
    for name in names:
        path = f"{root}/{name}"
        if name.startswith(_STAGING):
            disk.remove_tree(path)
        elif _SEAL_ID.fullmatch(name):
            try:
                seal = _load(disk, root, name)
                check_seal(disk, root, seal)
                seals.append(seal)
            except (FileNotFoundError, IntegrityError) as error:
                broken.append((name, str(error)))
                disk.remove_tree(path)
    return sorted(seals, key=lambda seal: (seal.sealed_ns, seal.seal_id)), broken


def check_seal(disk: Disk, root: str, seal: Seal) -> None:
    """IntegrityError if any file is not what was sealed: somebody wrote into it in place."""
    for file in seal.files:
        check_file(disk, root, seal, file)


def check_file(disk: Disk, root: str, seal: Seal, file: SealedFile) -> None:
    """IntegrityError if this file is not what was sealed."""
    try:
        status = disk.stat(file_path(root, seal.seal_id, file.path))
    except FileNotFoundError:
        raise _broken(seal, file.path, "is gone from its seal") from None
    if (status.size, status.mtime_ns, status.inode) != (file.size, file.mtime_ns, file.inode):
        raise _broken(seal, file.path, "was written in place after it was sealed")


def remove_seal(disk: Disk, root: str, seal_id: str) -> None:
    """Give the space back. The description goes first, so that half of it is never taken for a seal."""
    disk.remove(f"{seal_path(root, seal_id)}/{_DESCRIPTION}")
    disk.remove_tree(seal_path(root, seal_id))


def _load(disk: Disk, root: str, seal_id: str) -> Seal:
    path = seal_path(root, seal_id)
    return _decode(disk.read_at(f"{path}/{_DESCRIPTION}", 0, SEAL_BYTES_MAX), of=path, seal_id=seal_id)


def _pin(disk: Disk, source: str, target: str, path: str, found: Look) -> SealedFile:
    method = disk.pin(source, target)
    status = disk.stat(target)
    judged = found.files[path]
    changed = status.size != judged.size
    if method == "link":
        changed = changed or (status.mtime_ns, status.inode) != (judged.mtime_ns, judged.inode)
    else:
        original = disk.stat(source)
        changed = changed or (original.mtime_ns, original.inode) != (judged.mtime_ns, judged.inode)
    if changed:
        raise IntegrityError(f"`{source}` changed while it was sealed", subject=source)
    return SealedFile(path, status.size, status.mtime_ns, status.inode)


def _broken(seal: Seal, path: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"`{seal.name}/{path}` {what}",
        subject=f"{seal.name}/{path}",
        hint="the trainer saves into the same directory again; it is taken up again when it is quiet",
    )


def _encode(seal: Seal) -> bytes:
    return json.dumps(
        {
            "version": SEAL_VERSION,
            "name": seal.name,
            "fingerprint": seal.fingerprint,
            "layout": seal.layout,
            "files": [_file_json(file) for file in seal.files],
            "markers": list(seal.markers),
            "commit": encode_marker(seal.commit).decode(),
            "sealed_ns": seal.sealed_ns,
        }
    ).encode()


def _decode(raw: bytes, *, of: str, seal_id: str) -> Seal:
    value = load_object(raw, of=of)
    take_version(value, at=of, known=SEAL_VERSION)
    files = tuple(_decode_file(entry, at=of) for entry in take_list(value, "files", at=of))
    paths = {file.path for file in files}
    markers = tuple(str(marker) for marker in take_list(value, "markers", at=of))
    if not paths.issuperset(markers):
        raise FormatError(f"`{of}` has a marker that is none of its files", subject=of)
    return Seal(
        seal_id=seal_id,
        name=check_relative_path(value.get("name"), of=f"{of}: name"),
        fingerprint=take_text(value, "fingerprint", at=of, length_max=64),
        layout=take_text(value, "layout", at=of, length_max=100),
        files=files,
        markers=markers,
        commit=decode_marker(take_text(value, "commit", at=of, length_max=64 << 20).encode(), of=of),
        sealed_ns=take_count(value, "sealed_ns", at=of),
    )


def _file_json(file: SealedFile) -> list[object]:
    listed: list[object] = [file.path, file.size, file.mtime_ns, file.inode]
    if file.digest is not None:
        listed += [file.digest.sha256, encode_crc64nvme(file.digest.crc64nvme)]
    return listed


def _decode_file(entry: object, *, at: str) -> SealedFile:
    if not isinstance(entry, list) or len(entry) not in (4, 6):
        raise FormatError(f"`{at}` has a file that is none", subject=at)
    numbers: Mapping[str, Any] = as_object(
        dict(zip(("size", "mtime_ns", "inode"), entry[1:4], strict=True)), at=at
    )
    digest = None
    if len(entry) == 6:
        digest = Digest(check_sha256(entry[4]), decode_crc64nvme(str(entry[5])))
    return SealedFile(
        check_relative_path(entry[0], of=f"{at}: path"),
        take_count(numbers, "size", at=at),
        take_count(numbers, "mtime_ns", at=at),
        take_count(numbers, "inode", at=at, most=1 << 64),
        digest,
    )
