"""Files and side files of a directory store. Everything here blocks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stager.disk import Disk
from stager.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    LockHeld,
    NotSupported,
    OutOfSpace,
    StagerError,
)
from stager.formats.names import check_key
from stager.store.api import Buffer, Create, ObjectInfo, ObjectVersion, PutMode, Replace
from stager.store.checks import other_version
from stager.store.directory_read import not_found, read_failure

HIDDEN_FOLDER = ".stager-store"
_SIDE_BYTES_MAX = 16 << 10
_COPY_BYTES = 64 << 20
_STALE_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Side:
    """What a side file says of its file.

    Attributes:
        upload_id: The upload that the file was put together from, so that completing it again is seen for what it is.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    crc64nvme: int | None = None
    upload_id: str = ""

    def encode(self) -> bytes:
        crc = None if self.crc64nvme is None else f"{self.crc64nvme:016x}"
        fields = {"metadata": dict(self.metadata), "crc64nvme": crc, "upload_id": self.upload_id}
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes) -> Side:
        """A side file that is damaged says nothing, rather than something wrong."""
        try:
            fields = json.loads(text)
            metadata = {str(name): str(value) for name, value in fields["metadata"].items()}
            crc = None if fields["crc64nvme"] is None else int(fields["crc64nvme"], 16)
            return cls(metadata, crc, str(fields["upload_id"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls()


def version_of(status: os.stat_result) -> ObjectVersion:
    """The version of a file: another inode, time or size is another version."""
    return ObjectVersion(f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}")


class ObjectFolder:
    """The objects below ``root``, and the hidden folder beside them."""

    def __init__(self, root: str, disk: Disk, *, durable: bool) -> None:
        self.root = root
        self.durable = durable
        self._disk = disk
        self._swept = False
        self._locks_work = True

    def path(self, key: str) -> str:
        """The file of a key.

        Raises:
            FormatError: The key could leave the root, or reach into the hidden folder.
        """
        if HIDDEN_FOLDER in check_key(key).split("/"):
            raise FormatError(f"key `{key}` is refused: `{HIDDEN_FOLDER}` is the store's own", subject=key)
        return os.path.join(self.root, key)

    def hidden_path(self, *parts: str) -> str:
        return os.path.join(self.root, HIDDEN_FOLDER, *parts)

    def staging_path(self, nonce: str) -> str:
        return self.hidden_path("staging", nonce)

    def describe(self, key: str) -> ObjectInfo:
        """What is known of an object; NotFound if there is none."""
        status = self._status(key)
        if status is None or not os.path.isfile(self.path(key)):
            raise not_found(key, self.root)
        return self.describe_status(key, status)

    def describe_status(self, key: str, status: os.stat_result) -> ObjectInfo:
        side = self._read_side(key, version_of(status))
        return ObjectInfo(key, status.st_size, version_of(status), side.metadata, side.crc64nvme)

    def stage(self, staged: str, body: Buffer, jitter_ns: int) -> None:
        """Write a body under a name of its own.

        Args:
            jitter_ns: Below a million; added to the file's time, because clocks of file systems tick in milliseconds
                and an inode may come back within one tick.
        """
        self._make_staging()
        self._disk.create(staged)
        self._sweep_once()
        self._disk.write_at(staged, 0, body)
        _shift_time(staged, jitter_ns)

    def stage_copy(self, staged: str, sources: Sequence[tuple[int, int]], jitter_ns: int) -> None:
        """Put (descriptor, size) pieces one behind the other, inside the kernel where it can."""
        self._make_staging()
        self._disk.create(staged, sum(size for _, size in sources))
        self._sweep_once()
        target = os.open(staged, os.O_WRONLY | os.O_CLOEXEC)
        try:
            position = 0
            for source, size in sources:
                _copy_range(source, size, target, position, staged)
                position += size
        finally:
            os.close(target)
        _shift_time(staged, jitter_ns)

    def stage_link(self, staged: str, source: str) -> None:
        """Another name for a file that is an object whole."""
        self._make_staging()
        self._disk.pin(source, staged)

    def discard(self, staged: str) -> None:
        self._disk.remove(staged)

    def publish(self, key: str, staged: str, side: Side, mode: PutMode) -> ObjectVersion:
        """Make a staged file the object, if ``mode`` allows.

        Raises:
            LockHeld: Another writer of this key is at it; try again.
            AlreadyExists, PreconditionFailed: As `ObjectStore.put` says.
            NotSupported: The key is a folder here, or lies below a file.
        """
        path = self.path(key)
        version = version_of(os.stat(staged))
        with self._locked(key, needed=isinstance(mode, Replace)):
            self._make_folder_of(key)
            present = self._status(key)
            if present is not None and os.path.isdir(path) and not self._disk.remove_empty_directory(path):
                raise _both_file_and_folder(key, self.root)
            old = self._check_mode(key, present, side, mode)
            if old is not None and isinstance(mode, Create):
                return old
            if side != Side():
                self._write_side(key, version, side)
            self._rename(key, staged, path, mode)
            if old is not None and old != version:
                self._disk.remove(self._side_path(key, old))
        return version

    def remove(self, key: str) -> None:
        """Remove an object, its side file, and the folders that it leaves empty; a missing one is fine.

        Raises:
            LockHeld: As `publish`.
        """
        if self._status(key) is None:
            return
        with self._locked(key, needed=False):
            present = self._status(key)
            path = self.path(key)
            if present is None or os.path.isdir(path):
                return
            self._disk.remove(path)
            self._disk.remove(self._side_path(key, version_of(present)))
            folder = os.path.dirname(path)
            while len(folder) > len(self.root) and self._disk.remove_empty_directory(folder):
                folder = os.path.dirname(folder)

    def _check_mode(
        self, key: str, present: os.stat_result | None, side: Side, mode: PutMode
    ) -> ObjectVersion | None:
        """The version that is there, if the mode goes with it; with `Create`, only one that is this very write's."""
        old = None if present is None or not os.path.isfile(self.path(key)) else version_of(present)
        if isinstance(mode, Create) and old is not None:
            if side.upload_id and self._read_side(key, old).upload_id == side.upload_id:
                return old
            raise AlreadyExists(f"`{key}` exists already in {self.root}", subject=key)
        if isinstance(mode, Replace) and (old is None or old.etag != mode.version.etag):
            raise other_version(key)
        return old

    def _rename(self, key: str, staged: str, path: str, mode: PutMode) -> None:
        for attempt in range(10):
            try:
                if isinstance(mode, Create) and self._try_link(staged, path):
                    return
                self._disk.publish(staged, path, durable=self.durable)
                return
            except FileExistsError as error:
                raise AlreadyExists(f"`{key}` exists already in {self.root}", subject=key) from error
            except FileNotFoundError:
                # A neighbour's removal took the empty folder away.
                if attempt == 9 or not os.path.lexists(staged):
                    raise
                self._make_folder_of(key)

    def _try_link(self, staged: str, path: str) -> bool:
        """Whether the file could be published by a link. Where links cannot be made, the lock alone has to do."""
        try:
            self._disk.publish_new(staged, path, durable=self.durable)
            return True
        except (FileExistsError, FileNotFoundError):
            raise
        except StagerError:
            if not self._locks_work:
                raise
            return False

    def _make_folder_of(self, key: str) -> None:
        try:
            self._disk.make_directory(os.path.dirname(self.path(key)))
        except (FileExistsError, StagerError) as error:
            if isinstance(error, FileExistsError) or isinstance(error.__cause__, NotADirectoryError):
                raise _both_file_and_folder(key, self.root) from error
            raise

    def _make_staging(self) -> None:
        self._disk.make_directory(self.hidden_path("staging"))

    def _sweep_once(self) -> None:
        """Remove what killed writers left more than a day ago; the file system's clock is that of our own newest file."""
        if self._swept:
            return
        self._swept = True
        folder = self.hidden_path("staging")
        marks = {}
        for name in self._disk.list_names(folder):
            with contextlib.suppress(FileNotFoundError):  # a neighbour has published it meanwhile
                marks[name] = self._disk.stat(os.path.join(folder, name)).mtime_ns
        newest = max(marks.values(), default=0)
        for name, mtime_ns in marks.items():
            if mtime_ns < newest - _STALE_NS:
                self._disk.remove(os.path.join(folder, name))

    def _status(self, key: str) -> os.stat_result | None:
        try:
            return os.stat(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise read_failure(error, key, self.root) from error

    def _side_path(self, key: str, version: ObjectVersion) -> str:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.hidden_path("side", name[:2], f"{name}-{version.etag}.json")

    def _read_side(self, key: str, version: ObjectVersion) -> Side:
        try:
            return Side.decode(self._disk.read_at(self._side_path(key, version), 0, _SIDE_BYTES_MAX))
        except FileNotFoundError:
            return Side()

    def _write_side(self, key: str, version: ObjectVersion, side: Side) -> None:
        path = self._side_path(key, version)
        self._disk.make_directory(os.path.dirname(path))
        self._disk.write_file(path, side.encode(), durable=self.durable)

    @contextlib.contextmanager
    def _locked(self, key: str, *, needed: bool) -> Iterator[None]:
        """Hold the lock of a key's stripe. Where the file system has no locks, only `Replace` cannot do without."""
        stripe = hashlib.sha256(key.encode()).hexdigest()[:2]
        with contextlib.ExitStack() as stack:
            try:
                self._disk.make_directory(self.hidden_path("locks"))
                if self._locks_work:
                    holder = f"a stager process with pid {os.getpid()}"
                    stack.enter_context(self._disk.lock(self.hidden_path("locks", stripe), holder))
            except LockHeld:
                raise
            except StagerError as error:
                if not isinstance(error.__cause__, OSError) or not _means_no_locks(error.__cause__):
                    raise
                self._locks_work = False
            if needed and not self._locks_work:
                raise NotSupported(
                    f"{self.root} is on a file system without locks, so `{key}` cannot be replaced conditionally",
                    subject=key,
                    hint="mount it with locks (Lustre: -o flock)",
                )
            yield


def _means_no_locks(error: OSError) -> bool:
    return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def _shift_time(path: str, jitter_ns: int) -> None:
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + jitter_ns))


def _copy_range(source: int, size: int, target: int, position: int, path: str) -> None:
    copied = 0
    in_kernel = True
    while copied < size:
        step = min(size - copied, _COPY_BYTES)
        if in_kernel:
            try:
                moved = os.copy_file_range(source, target, step, copied, position + copied)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise full_or_failed(error, path) from error
                in_kernel = False
                continue
        else:
            piece = os.pread(source, min(step, 4 << 20), copied)
            moved = os.pwrite(target, piece, position + copied) if piece else 0
        if moved == 0:
            raise IntegrityError(f"a source of `{path}` became shorter while it was copied", subject=path)
        copied += moved


def full_or_failed(error: OSError, path: str) -> StagerError:
    """Why a copy failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace(f"cannot write `{path}`: {error.strerror}", subject=path, hint="free space there")
    return StagerError(f"cannot write `{path}`: {error.strerror}", subject=path)


def _both_file_and_folder(key: str, root: str) -> NotSupported:
    return NotSupported(
        f"`{key}` cannot be written in {root}: one of its parts is a file where a folder is needed, or the reverse",
        subject=key,
        hint="in a directory no key may be the beginning of another key's path; rename one of them",
    )
