"""Tar members, as bytes: reproducible headers out, and a plain parser in.

Written are USTAR headers where the name permits and PAX records where it does not, with owner, mode and time fixed, so
that the same members always give the same archive. Read are USTAR, PAX and GNU archives, by one pass over a buffer.
Sources: POSIX.1-2017 pax; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import NamedTuple

from stager.errors import FormatError

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
NAME_BYTES_MAX = 100
PREFIX_BYTES_MAX = 155
OCTAL_SIZE_MAX = 8**11 - 1
EXTENSION_BYTES_MAX = 1 << 20

Buffer = bytes | bytearray | memoryview

_ZERO_BLOCK = bytes(BLOCK_BYTES)
# Name, size, checksum, type, magic with version, prefix.
_HEADER = Struct("100s24x12s12x8ss100x6s82x155s12x")
_EXTENSIONS = frozenset((b"x", b"g", b"L", b"K"))
_REGULAR = frozenset((b"0", b"\0", b"7"))
# The same, with size and checksum parted from the byte or two that end them.
_PLAIN = Struct("100s24x11ss12x6s2ss100x6s82x155s12x")
_BLANKS = frozenset((b" ", b"\0"))
_CHECKSUM_ENDS = frozenset((b"\0 ", b" \0"))
_KINDS = {
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "directory",
    b"6": "fifo",
}


class Member(NamedTuple):
    """A regular file of an archive: where its header and its data begin, and how many bytes the data have.

    A named tuple, since there are hundreds of thousands a second of them.
    """

    name: str
    header_offset: int
    data_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What an archive holds.

    Attributes:
        members: Its regular files, in order.
        skipped: How many of each other kind there are, e.g. ``{"hard link": 2}``.
        end: Offset just past the end-of-archive blocks.
        trailing: Whether anything but zeros follows, such as a second archive.
    """

    members: list[Member]
    skipped: Mapping[str, int] = field(default_factory=dict)
    end: int = 0
    trailing: bool = False


def padded(size: int) -> int:
    """``size`` rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def member_bytes(name: str, size: int) -> int:
    """What a member takes up in an archive, header and padding included."""
    if len(name) <= NAME_BYTES_MAX and size <= OCTAL_SIZE_MAX and name.isascii():
        return BLOCK_BYTES + padded(size)
    return len(member_header(name, size)) + padded(size)


def member_header(name: str, size: int) -> bytes:
    """The header blocks of a regular file; USTAR if name and size fit, else with a PAX extension before.

    Raises:
        FormatError: The name is empty, not valid Unicode, or holds NUL.
    """
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"member name {name!r} is not valid Unicode", subject=repr(name)) from None
    if not raw or b"\0" in raw:
        raise FormatError(f"member name {name!r} cannot stand in a tar", subject=repr(name))
    split = _split_ustar(raw)
    if split is not None and size <= OCTAL_SIZE_MAX:
        return _ustar(*split, size, b"0")
    records = _pax_record(b"path", raw)
    if size > OCTAL_SIZE_MAX:
        records += _pax_record(b"size", b"%d" % size)
    plain = raw.decode().encode("ascii", "replace")[:NAME_BYTES_MAX]
    extension = _ustar(b"", b"././@PaxHeader", len(records), b"x") + records
    extension += bytes(padded(len(records)) - len(records))
    return extension + _ustar(b"", plain, size if size <= OCTAL_SIZE_MAX else 0, b"0")


def list_members(buffer: Buffer, *, of: str) -> Listing:
    """All members of the archive in ``buffer``, by one pass over its headers.

    Args:
        buffer: The whole archive: bytes, a memoryview or an mmap.
        of: The archive's name, for messages.

    Raises:
        FormatError: Not a tar, damaged, cut short, sparse, or hostile; names archive and offset.
    """
    return MemberReader(buffer, of).read()


class Header(NamedTuple):
    """The parts of a header block that matter, as they stand in it."""

    name: bytes
    size: bytes
    checksum: bytes
    kind: bytes
    magic: bytes
    prefix: bytes


class MemberReader:
    """The state of one pass: the offset, and what PAX or GNU extensions said of the next member.

    ``buffer`` holds the archive from its byte ``base`` on. All offsets are the archive's.
    """

    def __init__(self, buffer: Buffer, of: str, *, length: int | None = None) -> None:
        self.buffer = memoryview(buffer)
        self.base = 0
        self.length = len(self.buffer) if length is None else length
        self.of = of
        self.offset = 0
        self.members: list[Member] = []
        self.skipped: Counter[str] = Counter()
        self.global_records: dict[str, str] = {}
        self.records: dict[str, str] = {}
        self.first_header: int | None = None

    def read(self) -> Listing:
        try:
            return self._read()
        finally:
            self.buffer.release()

    def _read(self) -> Listing:
        if not self.length:
            raise self._damaged("it is empty")
        while True:
            self._read_plain()
            offset = self.offset
            if offset + BLOCK_BYTES > self.length:
                raise self._damaged("it ends without the blocks that end a tar: it was cut short")
            header = self.header()
            if header is None:
                return self._finish()
            self.take(header)

    def header(self) -> Header | None:
        """The header where the pass stands, or None if the archive ends here."""
        place = self.offset - self.base
        header = Header._make(_HEADER.unpack_from(self.buffer, place))
        if header.checksum == bytes(8) and self.buffer[place : place + BLOCK_BYTES] == _ZERO_BLOCK:
            return None
        self._check(header)
        return header

    def follows(self, header: Header) -> int:
        """How many bytes after the header are needed to take it: those of an extension, else none."""
        return padded(self._extension_size(header)) if header.kind in _EXTENSIONS else 0

    def ended(self) -> Listing:
        """What was listed; the pass stands at the end of the archive."""
        if self.records:
            raise self._damaged("an extension header is followed by no member")
        end = min(self.offset + len(END_OF_ARCHIVE), self.length)
        return Listing(self.members, dict(self.skipped), end)

    def _read_plain(self) -> None:
        """Take members for as long as they are whole, regular and without extensions: nearly all of a shard.

        At anything else it stops where that begins, and the careful path takes it or says what is wrong.
        """
        if self.records or self.global_records or self.first_header is not None:
            return
        buffer, offset, last = self.buffer, self.offset, self.length - BLOCK_BYTES
        unpack, adler32, append, new = _PLAIN.unpack_from, zlib.adler32, self.members.append, tuple.__new__
        while offset <= last:
            raw, digits, end_of_digits, stated, end_of_stated, kind, magic, prefix = unpack(buffer, offset)
            if kind != b"0" or not (digits.isdigit() and stated.isdigit()) or end_of_digits not in _BLANKS:
                break
            middle, data = offset + 256, offset + BLOCK_BYTES
            # See `_check`. The checksum counts as eight blanks; its last two bytes are a zero and a blank, or reversed.
            total = (adler32(buffer[offset:middle]) & 0xFFFF) + (adler32(buffer[middle:data]) & 0xFFFF)
            total -= (adler32(stated) & 0xFFFF) + 1 - 7 * 32
            name_end = raw.find(b"\0")
            if name_end >= 0:
                raw = raw[:name_end]
            if prefix[0]:
                if magic != b"ustar\0":
                    break
                raw = prefix.split(b"\0", 1)[0] + b"/" + raw
            try:
                size = int(digits, 8)
                wrong = total != int(stated, 8) or end_of_stated not in _CHECKSUM_ENDS
                name = raw.decode()
            except ValueError:
                break
            end = data + size
            if wrong or end > self.length or not name or name[-1] == "/":
                break
            # Its __new__ is a function in Python, and this is the innermost of loops.
            append(new(Member, (name, offset, data, size)))
            offset = end + -end % BLOCK_BYTES
        self.offset = offset

    def _finish(self) -> Listing:
        listing = self.ended()
        rest = self.buffer[self.offset :]
        step = 1 << 20
        trailing = any(bytes(rest[start : start + step]).strip(b"\0") for start in range(0, len(rest), step))
        rest.release()
        return replace(listing, trailing=trailing)

    def take(self, header: Header) -> None:
        """Take a member or an extension, and go on behind it."""
        kind = header.kind
        data = self.offset + BLOCK_BYTES
        if kind in _EXTENSIONS:
            self._extension(kind, data, self._extension_size(header))
            return
        size = self._number(header.size, "size")
        if kind == b"S" or (self.records and any(name.startswith("GNU.sparse") for name in self.records)):
            raise self._damaged("it has a sparse member", hint="pack the file again without --sparse")
        stated = self.records.get("size") or self.global_records.get("size")
        if stated is not None:
            size = self._decimal(stated)
        start = self.offset if self.first_header is None else self.first_header
        if kind in _REGULAR:
            self._need(data, size)
            name = self._name(header)
            # Before POSIX a directory was a file whose name ends in a slash.
            if name.endswith("/"):
                self.skipped["directory"] += 1
            else:
                self.members.append(Member(name, start, data, size))
        else:
            size = 0 if kind in _KINDS else size
            self._need(data, size)
            self.skipped[_KINDS.get(kind, f"type {kind!r}")] += 1
        self.records = {}
        self.first_header = None
        self.offset = data + padded(size)

    def _extension_size(self, header: Header) -> int:
        size = self._number(header.size, "size")
        if size > EXTENSION_BYTES_MAX:
            raise self._damaged(f"an extension header claims {size} bytes")
        return size

    def _extension(self, kind: bytes, data: int, size: int) -> None:
        self._need(data, size)
        body = bytes(self.buffer[data - self.base : data - self.base + size])
        if kind == b"g":
            self.global_records.update(self._pax(body))
        else:
            if self.first_header is None:
                self.first_header = self.offset
            if kind == b"x":
                self.records.update(self._pax(body))
            elif kind == b"L":
                self.records["path"] = self._text(body.rstrip(b"\0"))
        self.offset = data + padded(size)

    def _name(self, header: Header) -> str:
        path = self.records.get("path")
        if path is None:
            raw = header.name.split(b"\0", 1)[0]
            # Only POSIX archives keep a prefix there; in GNU's the field holds times.
            if header.prefix[0] and header.magic == b"ustar\0":
                raw = header.prefix.split(b"\0", 1)[0] + b"/" + raw
            path = self._text(raw)
        if not path:
            raise self._damaged("a member has no name")
        return path

    def _check(self, header: Header) -> None:
        stated = self._number(header.checksum, "checksum")
        start = self.offset - self.base
        view = self.buffer[start : start + BLOCK_BYTES]
        # Adler's low half is one more than the sum of up to 256 bytes: 40 times as fast as `sum`.
        total = (zlib.adler32(view[:256]) & 0xFFFF) + (zlib.adler32(view[256:]) & 0xFFFF) - 2
        if total - sum(header.checksum) + 8 * 32 != stated:
            what = "this is not a tar" if self.offset == 0 else "a header is damaged"
            raise self._damaged(f"{what}: the header's checksum is wrong")

    def _need(self, data: int, size: int) -> None:
        if data + size > self.length:
            raise self._damaged(
                f"a member's data would end at byte {data + size} of {self.length}: it was cut short"
            )

    def _number(self, raw: bytes, what: str) -> int:
        if raw[0] == 0x80:
            return int.from_bytes(raw[1:], "big")
        digits = raw.strip(b" \0")
        try:
            if not digits.isdigit():
                raise ValueError
            return int(digits, 8)
        except ValueError:
            where = "this is not a tar" if self.offset == 0 else "a header is damaged"
            raise self._damaged(f"{where}: its {what} is no number") from None

    def _decimal(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self._damaged(f"a PAX size is `{text[:40]}`")
        return int(text)

    def _pax(self, body: bytes) -> dict[str, str]:
        found: dict[str, str] = {}
        place = 0
        while place < len(body) and body[place] != 0:
            space = body.find(b" ", place, place + 12)
            digits = body[place:space] if space > place else b""
            length = int(digits) if digits.isdigit() else 0
            record = body[space + 1 : place + length]
            if (
                length <= len(digits) + 2
                or place + length > len(body)
                or record[-1:] != b"\n"
                or b"=" not in record
            ):
                raise self._damaged("a PAX record is damaged")
            name, value = record[:-1].split(b"=", 1)
            found[self._text(name)] = self._text(value)
            place += length
        return found

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"the name {raw[:80]!r} is not UTF-8") from None

    def _damaged(self, reason: str, *, hint: str = "") -> FormatError:
        return FormatError(
            f"`{self.of}` at byte {self.offset}: {reason}",
            subject=self.of,
            hint=hint or "fetch or pack this shard again; `stager verify` checks all of a dataset",
        )


def _split_ustar(raw: bytes) -> tuple[bytes, bytes] | None:
    """Prefix and name of a plain USTAR header, or None if the name needs PAX."""
    if not raw.isascii():
        return None
    if len(raw) <= NAME_BYTES_MAX:
        return b"", raw
    cut = raw.rfind(b"/", 0, PREFIX_BYTES_MAX + 1)
    prefix, name = raw[:cut], raw[cut + 1 :]
    if cut <= 0 or not name or len(name) > NAME_BYTES_MAX:
        return None
    return prefix, name


def _pax_record(name: bytes, value: bytes) -> bytes:
    body = len(name) + len(value) + 3
    length = body + len(str(body))
    length = body + len(str(length))
    return b"%d %s=%s\n" % (length, name, value)


# All that never changes between two headers: mode 0644, owner 0, time 0, ustar version, no owner names.
_TEMPLATE = Struct(f"{NAME_BYTES_MAX}s24s12s12s8ss100s8s64s16s{PREFIX_BYTES_MAX}s12x")
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_AFTER_SIZE = b"00000000000\0"
_MAGIC = b"ustar\x0000"
_DEVICES = b"0000000\0" * 2
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_AFTER_SIZE) + sum(_MAGIC) + sum(_DEVICES) + 8 * 32


def _ustar(prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size
    # Summing only what varies, and by Adler (see `_check`): headers are the packer's main cost.
    checksum = _FIXED_SUM + (zlib.adler32(prefix + name) & 0xFFFF) - 1 + sum(digits) + kind[0]
    return _TEMPLATE.pack(
        name,
        _BEFORE_SIZE,
        digits,
        _AFTER_SIZE,
        b"%06o\0 " % checksum,
        kind,
        b"",
        _MAGIC,
        b"",
        _DEVICES,
        prefix,
    )
