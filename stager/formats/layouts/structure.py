"""Cheap checks of file formats: a few reads a file, however large it is."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from stager.errors import FormatError
from stager.formats.layouts.api import Candidate, Unfinished

_TAIL_BYTES = (64 << 10) + 22 + 20 + 56
_DIRECTORY_BYTES_MAX = 64 << 20
_SAFETENSORS_HEADER_MAX = 100 << 20
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A file inside a zip: its name, whether it is stored as it is, where its header begins, and its bytes."""

    name: str
    is_stored: bool
    offset: int
    size: int


def check_torch_zip(candidate: Candidate, path: str) -> bool:
    """Whether a file of `torch.save` is whole: its central directory stands at the end and accounts for every byte.

    Returns:
        True if it is whole; False if it has the older format, which cannot be checked.

    Raises:
        Unfinished: Nothing is wrong, but it ends too early.
        FormatError: It is no file of `torch.save`.
    """
    return zip_members(candidate, path) is not None


def zip_members(candidate: Candidate, path: str) -> list[ZipMember] | None:
    """The files inside a file of `torch.save`; None if it has the older format. Raises as `check_torch_zip` does."""
    size = candidate.listing[path].size
    head = candidate.read(path, 0, len(_LEGACY_MAGIC))
    if size == 0 or len(head) < min(size, len(_LEGACY_MAGIC)):
        raise Unfinished(f"`{path}` is empty")
    if head == _LEGACY_MAGIC:
        return None
    if not head.startswith(b"PK\x03\x04"):
        if b"PK\x03\x04".startswith(head[:4]) or not any(head):
            raise Unfinished(f"`{path}` has not begun")
        raise FormatError(f"`{path}` is not a file of torch.save", subject=path)
    start = max(0, size - _TAIL_BYTES)
    tail = candidate.read(path, start, size - start)
    if len(tail) != size - start:
        raise Unfinished(f"`{path}` became shorter")
    entries, directory_start, directory_bytes, end = _end_of_directory(tail, start, path)
    if directory_start + directory_bytes != end:
        raise Unfinished(f"`{path}` does not add up to its end")
    if directory_bytes > _DIRECTORY_BYTES_MAX:
        raise FormatError(f"`{path}` has a central directory of {directory_bytes} bytes", subject=path)
    directory = candidate.read(path, directory_start, directory_bytes)
    return _members(directory, entries, directory_start, path)


def check_safetensors(candidate: Candidate, path: str) -> None:
    """A safetensors file has exactly the bytes that its header accounts for.

    Raises:
        Unfinished: It ends too early.
        FormatError: Its header is no such header, or there is more behind its end.
    """
    size = candidate.listing[path].size
    head = candidate.read(path, 0, 8)
    if len(head) < 8:
        raise Unfinished(f"`{path}` has {size} bytes")
    (length,) = struct.unpack("<Q", head)
    if length > _SAFETENSORS_HEADER_MAX:
        raise FormatError(f"`{path}` states a header of {length} bytes", subject=path)
    if 8 + length > size:
        raise Unfinished(f"`{path}` ends inside its header")
    try:
        header = json.loads(candidate.read(path, 8, length))
        ends = [_data_end(value, path) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError):
        raise FormatError(f"`{path}` has no header of safetensors", subject=path) from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise Unfinished(f"`{path}` has {size} of {expected} bytes")
    if size > expected:
        raise FormatError(f"`{path}` has {size} bytes where its header accounts for {expected}", subject=path)


def _data_end(value: Any, path: str) -> int:
    end = value["data_offsets"][1]
    if not isinstance(end, int) or not 0 <= end < 1 << 62:
        raise FormatError(f"`{path}` has a tensor without an end", subject=path)
    return end


def _end_of_directory(tail: bytes, start: int, path: str) -> tuple[int, int, int, int]:
    """(entries, start and bytes of the central directory, where its end record begins)."""
    place = tail.rfind(b"PK\x05\x06")
    while place >= 0:
        record = tail[place : place + 22]
        if len(record) == 22 and place + 22 + struct.unpack("<H", record[20:])[0] == len(tail):
            break
        place = tail.rfind(b"PK\x05\x06", 0, place)
    if place < 0:
        raise Unfinished(f"`{path}` has no central directory yet")
    entries, directory_bytes, directory_start = struct.unpack("<HII", record[10:20])
    end = start + place
    locator = tail[place - 20 : place] if place >= 20 else b""
    if locator[:4] == b"PK\x06\x07":
        (wide,) = struct.unpack("<Q", locator[8:16])
        record = tail[max(0, wide - start) : max(0, wide - start) + 56]
        if wide < start or record[:4] != b"PK\x06\x06":
            raise Unfinished(f"`{path}` has no end of its central directory")
        entries, directory_bytes, directory_start = struct.unpack("<QQQ", record[32:56])
        end = wide
    return entries, directory_start, directory_bytes, end


def _members(directory: bytes, entries: int, limit: int, path: str) -> list[ZipMember]:
    """Every entry lies before the directory, and there are as many as stated."""
    place = 0
    found: list[ZipMember] = []
    while place + 46 <= len(directory) and directory[place : place + 4] == b"PK\x01\x02":
        (method,) = struct.unpack("<H", directory[place + 10 : place + 12])
        packed, plain, name_bytes, extra_bytes, comment_bytes = struct.unpack(
            "<IIHHH", directory[place + 20 : place + 34]
        )
        (offset,) = struct.unpack("<I", directory[place + 42 : place + 46])
        extra_start = place + 46 + name_bytes
        name = directory[place + 46 : extra_start].decode("utf-8", "replace")
        extra = directory[extra_start : extra_start + extra_bytes]
        packed, offset = _wide(extra, packed, plain, offset)
        if offset + packed > limit:
            raise FormatError(f"`{path}` has an entry that reaches behind its end", subject=path)
        found.append(ZipMember(name, method == 0, offset, packed))
        place = extra_start + extra_bytes + comment_bytes
    if place != len(directory) or len(found) != entries:
        raise FormatError(f"`{path}` has {len(found)} entries where it states {entries}", subject=path)
    return found


def _wide(extra: bytes, packed: int, plain: int, offset: int) -> tuple[int, int]:
    """Packed size and offset, from the zip64 extra field where the 32-bit fields are full."""
    full = 0xFFFFFFFF
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack("<HH", extra[place : place + 4])
        if kind == 1:
            numbers = [
                value for (value,) in struct.iter_unpack("<Q", extra[place + 4 : place + 4 + size // 8 * 8])
            ]
            wanted = [field == full for field in (plain, packed, offset)]
            taken = iter(numbers)
            values = [
                next(taken, 0) if wide else field
                for wide, field in zip(wanted, (plain, packed, offset), strict=True)
            ]
            return values[1], values[2]
        place += 4 + size
    return packed, offset
