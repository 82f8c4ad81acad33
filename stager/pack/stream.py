"""The bytes of a shard, made from its files as they are read: headers, contents, padding, and both digests on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator

from stager.errors import StagerError
from stager.formats.names import KEY_BYTES_MAX
from stager.formats.tar import BLOCK_BYTES, END_OF_ARCHIVE, member_header, padded
from stager.pack.findings import shown_path
from stager.pack.plan import ShardPlan
from stager.pack.samples import PackSample, SourceFile

# A header, with a PAX extension of the longest name that is packed, and the padding.
_HEADER_ROOM_BYTES = 3 * BLOCK_BYTES + padded(KEY_BYTES_MAX + 64) + BLOCK_BYTES
_ZEROS = bytes(BLOCK_BYTES)
# Not blocking: a named pipe in a file's place must not stop the pack for ever.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_Member = tuple[SourceFile, str]


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

    Every file must still have the size and the time of change that were planned, after its last byte was read.

    Attributes:
        samples_done: Samples given whole so far.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.samples_done = 0
        self._members = self._walk(plan.samples)
        # One that did not fit into the last buffer, and is next.
        self._held: _Member | None = None
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
            else:
                filled += self._fill_whole_files(buffer[filled:])
                if filled < len(buffer) and not self._next_file():
                    break
        return filled

    def _fill_whole_files(self, buffer: memoryview) -> int:
        """Put in members for as long as they fit whole and are as planned: nearly all of a shard of small files.

        What is unusual is left to the careful path, which takes it or says what is wrong.
        """
        filled, room = 0, len(buffer)
        readv, fstat, spare = os.readv, os.fstat, bytearray(1)
        for member in self._members:
            file = member[0]
            name, path, size, mtime_ns, place = file
            if place or filled + size + _HEADER_ROOM_BYTES > room:
                self._held = member
                return filled
            header = member_header(name, size)
            start = filled + len(header)
            end = start + size
            try:
                descriptor = os.open(path, _FLAGS)
            except OSError:
                self._held = member
                return filled
            try:
                # The spare byte tells a file that has more than its size says, without a call of its own.
                count = readv(descriptor, (buffer[start:end], spare))
                status = fstat(descriptor)
            except OSError:
                count = -1
            finally:
                os.close(descriptor)
            if count != size or status.st_mtime_ns != mtime_ns or status.st_size != size:
                self._held = member
                return filled
            buffer[filled:start] = header
            filled = end + -size % BLOCK_BYTES
            buffer[end:filled] = _ZEROS[: filled - end]
        return filled

    def _walk(self, samples: Iterable[PackSample]) -> Iterator[_Member]:
        for sample in samples:
            for file in sample[2]:
                yield file, sample[0]
            self.samples_done += 1

    def _next_file(self) -> bool:
        member, self._held = self._held or next(self._members, None), None
        if member is None:
            ended, self._ended = self._ended, True
            self._pending = memoryview(b"" if ended else END_OF_ARCHIVE)
            return not ended
        file, key = member
        self._open = _OpenFile(file, key)
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
            self._descriptor = os.open(file.path, _FLAGS)
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
