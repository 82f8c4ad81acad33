"""Reading files of a directory store through a descriptor, so that a reader keeps the version that it opened."""

from __future__ import annotations

import os
import stat

from stager.errors import NotFound, PermissionDenied, StagerError, Unavailable
from stager.offload import Offload
from stager.store.api import ObjectInfo, Span

PIECE_BYTES_MAX = 4 << 20


class FileReader:
    """An open body: a span of a file."""

    def __init__(self, descriptor: int, info: ObjectInfo, span: Span | None, offload: Offload) -> None:
        self._descriptor = descriptor
        self._info = info
        self._offload = offload
        self._position = span.start if span else 0
        self._stop = span.stop if span else info.size

    @property
    def info(self) -> ObjectInfo:
        return self._info

    async def read(self, size: int) -> bytes:
        """See `ObjectReader`; at most 4 MiB a call."""
        wanted = min(size, self._stop - self._position, PIECE_BYTES_MAX)
        if wanted <= 0:
            return b""
        try:
            piece = await self._offload.run("disk", os.pread, self._descriptor, wanted, self._position)
        except OSError as error:
            raise Unavailable(
                f"cannot read `{self._info.key}`: {error.strerror}", subject=self._info.key
            ) from error
        if not piece:
            raise Unavailable(
                f"`{self._info.key}` became shorter while it was read",
                subject=self._info.key,
                hint="another program writes to this file in place",
            )
        self._position += len(piece)
        return piece


def open_file(path: str, key: str, store: str) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, which the caller closes, and its status.

    Raises:
        NotFound: Nothing is there, or what is there is not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO that somebody put there would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise read_failure(error, key, store) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise not_found(key, store)
        return descriptor, status
    except BaseException:
        os.close(descriptor)
        raise


def read_failure(error: OSError, key: str, store: str) -> StagerError:
    """Why a file cannot be opened or described."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return not_found(key, store)
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"cannot read `{key}` in {store}: {error.strerror}",
            subject=key,
            hint="check the owner and mode of the file for the user that stager runs as",
        )
    return Unavailable(f"cannot read `{key}` in {store}: {error.strerror}", subject=key)


def not_found(key: str, store: str) -> NotFound:
    """No regular file of that name."""
    return NotFound(f"no object `{key}` in {store}", subject=key)
