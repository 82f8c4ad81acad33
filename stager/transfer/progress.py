"""How far a part has come, and whether its body still moves. Pure."""

from __future__ import annotations

from stager.store.api import Span
from stager.transfer.ranges import Part

PROGRESS_BYTES = 64 << 10


class PartProgress:
    """How far a part has come over all its tries: bytes written, and their CRC."""

    __slots__ = ("crc", "part", "written")

    def __init__(self, part: Part) -> None:
        self.part = part
        self.written = 0
        self.crc = 0

    def left(self) -> Span:
        """The bytes of the object that are still to come; there must be some."""
        return Span(self.part.span.start + self.written, self.part.span.stop)


class BodyWatch:
    """How long a body may still take for its next `PROGRESS_BYTES`. Only waiting for the store counts."""

    __slots__ = ("_bytes", "left_s", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.left_s = limit_s
        self._bytes = 0

    def note(self, size: int, waited_s: float) -> None:
        """``size`` bytes came after ``waited_s``."""
        self._bytes += size
        self.left_s = max(0.0, self.left_s - waited_s)
        if self._bytes >= PROGRESS_BYTES:
            self._bytes = 0
            self.left_s = self.limit_s
