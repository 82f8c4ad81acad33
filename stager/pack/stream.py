"""The bytes of a shard, made from its files as they are read: headers, contents, padding, and both digests on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from stager.checksum import Hasher
from stager.errors import StagerError
from stager.formats.tar import END_OF_ARCHIVE, member_header, padded
from stager.pack.findings import shown_path
from stager.pack.plan import ShardPlan
from stager.pack.samples import PackSample, SourceFile


class SampleFailed(StagerError):
    """A file of a sample could not be packed as it was planned.

    Attributes:
        key: The sample's.
        path: The file's.
    """

    exit_code = 3

    def __init__(self, key: str, path: str, reason: str) -> None:
        super().__init__(
            f"{shown_path(path)}, of the sample `{key}`: {reason}",
            subject=shown_path(path),
            hint="keep the input still and run the same command again: finished shards are kept;"
            " `--on-error skip` leaves out what cannot be read",
        )
        self.key = key
        self.path = path
        self.reason = reason


class ShardStream:
    """A shard as a stream that fills buffers of the caller's.

    Every file must still have the size and the time of change that were planned, before it is read and after.

    Attributes:
        hasher: The digests of what was given so far.
        samples_done: Samples given whole so far.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.hasher = Hasher()
        self.samples_done = 0
        self._samples: Iterator[PackSample] = iter(plan.samples)
        self._sample: PackSample | None = None
        self._files: Iterator[SourceFile] = iter(())
        self._pending = memoryview(b"")
        self._open: _OpenFile | None = None
        self._ended = False
        # A cancelled caller closes while a thread may still fill.
        self._lock = threading.Lock()

    def fill(self, buffer: memoryview) -> int:
        """Put the next bytes into ``buffer``; fewer than it holds only at the end of the shard.

        Raises:
            SampleFailed: A file is not what was planned, or cannot be read.
        """
        with self._lock:
            return self._fill(buffer)

    def close(self) -> None:
        """Let go of a file that is still open."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def _fill(self, buffer: memoryview) -> int:
        filled = 0
        while filled < len(buffer):
            if self._pending:
                step = min(len(self._pending), len(buffer) - filled)
                buffer[filled : filled + step] = self._pending[:step]
                self._pending = self._pending[step:]
                filled += step
            elif self._open is not None:
                filled += self._open.read_into(buffer[filled:])
                if self._open.left == 0:
                    self._close_file()
            elif not self._next_file():
                break
        self.hasher.update(buffer[:filled])
        return filled

    def _next_file(self) -> bool:
        file = next(self._files, None)
        while file is None:
            if self._sample is not None:
                self.samples_done += 1
            self._sample = next(self._samples, None)
            if self._sample is None:
                ended, self._ended = self._ended, True
                self._pending = memoryview(b"" if ended else END_OF_ARCHIVE)
                return not ended
            self._files = iter(self._sample.files)
            file = next(self._files, None)
        assert self._sample is not None
        self._open = _OpenFile(file, self._sample.key)
        self._pending = memoryview(member_header(file.name, file.size))
        return True

    def _close_file(self) -> None:
        assert self._open is not None
        file, self._open = self._open, None
        file.finish()
        self._pending = memoryview(bytes(padded(file.size) - file.size))


class _OpenFile:
    """A source file being read; ``left`` bytes are still to come."""

    __slots__ = ("_descriptor", "_file", "_key", "left", "size")

    def __init__(self, file: SourceFile, key: str) -> None:
        self._file = file
        self._key = key
        self.size = self.left = file.size
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._failed(f"it cannot be opened: {error.strerror or error}") from error
        try:
            self._check_unchanged()
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview) -> int:
        if not self.left:
            return 0
        try:
            count = os.readv(self._descriptor, [buffer[: self.left]])
        except OSError as error:
            raise self._failed(f"it cannot be read: {error.strerror or error}") from error
        if not count:
            raise self._failed(f"it ended {self.left} bytes early: it was cut while it was read")
        self.left -= count
        return count

    def finish(self) -> None:
        """Close it, once it is sure that no byte is left and that nothing changed under our hands."""
        try:
            # Files of /proc and the like have no size, but have bytes.
            if os.read(self._descriptor, 1):
                raise self._failed("it has more bytes than its size says")
            self._check_unchanged()
        except OSError as error:
            raise self._failed(f"it cannot be read: {error.strerror or error}") from error
        finally:
            self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def _check_unchanged(self) -> None:
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._file.mtime_ns):
            raise self._failed("it changed since the packing began")

    def _failed(self, reason: str) -> SampleFailed:
        return SampleFailed(self._key, self._file.path, reason)
