"""How objects are cut into parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stager.errors import UsageError
from stager.store.api import Span, StoreProperties

DOWNLOAD_PART_BYTES = 16 << 20
DOWNLOAD_PARTS_MAX = 4096
UPLOAD_PART_BYTES = 16 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` (from 0) of an object."""

    number: int
    span: Span

    @property
    def size(self) -> int:
        return self.span.size


def cut(size: int, part_bytes: int) -> list[Part]:
    """The parts of ``size`` bytes, the last one perhaps shorter; none for an empty object."""
    return [
        Part(number, Span(start, min(size, start + part_bytes)))
        for number, start in enumerate(range(0, size, part_bytes))
    ]


def download_part_bytes(size: int, *, wanted: int = DOWNLOAD_PART_BYTES) -> int:
    """Bytes of a part for a download of ``size``: about as wanted, so that the parts are even.

    It depends on nothing else, so that a resumed download finds the same cuts. Memory does not bound it, because a part
    passes through a buffer of fixed size; the number of parts does (`DOWNLOAD_PARTS_MAX`), because each is a line of the
    part map. What a kill makes be sent again is at most this many bytes for each range in flight.
    """
    count = min(DOWNLOAD_PARTS_MAX, -(-size // wanted)) or 1
    return _round_up(-(-size // count), min(_MIB, wanted)) or wanted


def upload_part_bytes(size: int, store: StoreProperties, *, wanted: int = UPLOAD_PART_BYTES) -> int:
    """Bytes of a part for an upload of ``size``: as wanted, more where the store allows too few parts.

    Raises:
        UsageError: No size of part makes the object fit the store.
    """
    least = -(-size // store.parts_max)
    # Whole mebibytes, so that a resumed upload with another preference finds the same cuts more often than not.
    least = _round_up(least, _MIB) if least > wanted else least
    part_bytes = max(store.part_bytes_min, wanted, least)
    part_bytes = min(part_bytes, store.part_bytes_max)
    if part_bytes * store.parts_max < size:
        raise UsageError(
            f"{size} bytes do not fit into {store.parts_max} parts of {store.part_bytes_max} bytes at {store.name}",
            subject=store.name,
            hint="save the checkpoint in more, smaller files",
        )
    return part_bytes


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
