"""The members of an archive that goes by as a stream, for whoever cannot or will not hold all of it."""

from __future__ import annotations

from dataclasses import replace

from stager.errors import FormatError
from stager.formats.tar import BLOCK_BYTES, Buffer, Listing, MemberReader


class StreamLister:
    """Lists members as chunks are fed in order; holds one header and its extension at most.

    Args:
        length: Bytes of the whole archive, which must be known.
        of: The archive's name, for messages.
    """

    def __init__(self, length: int, *, of: str) -> None:
        self._of = of
        self._reader = MemberReader(b"", of, length=length)
        # What is there of the archive from the reader's offset on.
        self._window = bytearray()
        self._position = 0
        self._listing: Listing | None = None
        self._trailing = False

    def feed(self, chunk: Buffer) -> None:
        """Take the next bytes.

        Raises:
            FormatError: As `list_members` does, as soon as it shows. The lister is then of no more use.
        """
        view = memoryview(chunk)
        while len(view):
            if self._listing is not None:
                self._trailing = self._trailing or bool(bytes(view).strip(b"\0"))
                self._position += len(view)
                return
            skipped = min(len(view), max(0, self._reader.offset - self._position))
            self._position += skipped
            view = view[skipped:]
            taken = min(len(view), self._wanted() - len(self._window))
            self._window += view[:taken]
            self._position += taken
            view = view[taken:]
            self._advance()

    def finish(self) -> Listing:
        """What the archive holds, after its last byte.

        Raises:
            FormatError: It was cut short.
        """
        if self._listing is None:
            where = f"`{self._of}` at byte {self._position}"
            raise FormatError(
                f"{where}: it ends without the blocks that end a tar: it was cut short",
                subject=self._of,
                hint="fetch or pack this shard again",
            )
        return replace(self._listing, trailing=self._trailing)

    def _wanted(self) -> int:
        """Bytes from the reader's offset on that have to be there before it can go on."""
        if len(self._window) < BLOCK_BYTES:
            return BLOCK_BYTES
        self._look()
        header = self._reader.header()
        return BLOCK_BYTES if header is None else BLOCK_BYTES + self._reader.follows(header)

    def _advance(self) -> None:
        if len(self._window) < BLOCK_BYTES:
            return
        self._look()
        header = self._reader.header()
        if header is None:
            self._listing = self._reader.ended()
        elif len(self._window) >= BLOCK_BYTES + self._reader.follows(header):
            self._reader.take(header)
        else:
            return
        self._reader.buffer.release()
        self._window.clear()

    def _look(self) -> None:
        self._reader.buffer.release()
        self._reader.base = self._reader.offset
        self._reader.buffer = memoryview(bytes(self._window))
