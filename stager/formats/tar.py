"""Tar members, as bytes: reproducible headers out, and a plain parser in.

Written are USTAR headers where the name permits and PAX records where it does not, with owner, mode and time fixed, so
that the same members always give the same archive. Read are USTAR, PAX and GNU archives, by one pass over a buffer.
Sources: POSIX.1-2017 pax; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stager.errors import FormatError

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
NAME_BYTES_MAX = 100
PREFIX_BYTES_MAX = 155
OCTAL_SIZE_MAX = 8**11 - 1
EXTENSION_BYTES_MAX = 1 << 20

Buffer = bytes | bytearray | memoryview

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_CHECKSUM = slice(148, 156)
_KINDS = {
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "directory",
    b"6": "fifo",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file of an archive: where its header and its data begin, and how many bytes the data have."""

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
    reader = _Reader(buffer, of)
    return reader.read()


class _Reader:
    """The state of one pass: the offset, and what PAX or GNU extensions said of the next member."""

    def __init__(self, buffer: Buffer, of: str) -> None:
        self.buffer = memoryview(buffer)
        self.length = len(self.buffer)
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
            if self.offset + BLOCK_BYTES > self.length:
                raise self._damaged("it ends without the blocks that end a tar: it was cut short")
            block = bytes(self.buffer[self.offset : self.offset + BLOCK_BYTES])
            if block == _ZERO_BLOCK:
                return self._finish()
            self._member(block)

    def _finish(self) -> Listing:
        if self.records:
            raise self._damaged("an extension header is followed by no member")
        end = min(self.offset + len(END_OF_ARCHIVE), self.length)
        rest = self.buffer[self.offset :]
        trailing = any(
            bytes(rest[start : start + (1 << 20)]).strip(b"\0") for start in range(0, len(rest), 1 << 20)
        )
        rest.release()
        return Listing(self.members, dict(self.skipped), end, trailing)

    def _member(self, block: bytes) -> None:
        self._check(block)
        size = self._number(block[124:136], "size")
        kind = block[156:157]
        data = self.offset + BLOCK_BYTES
        if kind in b"xgLK" and kind:
            self._extension(kind, data, size)
            return
        if kind == b"S" or any(name.startswith("GNU.sparse") for name in self.records):
            raise self._damaged("it has a sparse member", hint="pack the file again without --sparse")
        stated = self.records.get("size", self.global_records.get("size"))
        if stated is not None:
            size = self._decimal(stated)
        header = self.offset if self.first_header is None else self.first_header
        if kind in (b"0", b"\0", b"7"):
            self._need(data, size)
            name = self._name(block)
            # Before POSIX a directory was a file whose name ends in a slash.
            if name.endswith("/"):
                self.skipped["directory"] += 1
            else:
                self.members.append(Member(name, header, data, size))
        else:
            size = 0 if kind in _KINDS else size
            self._need(data, size)
            self.skipped[_KINDS.get(kind, f"type {kind!r}")] += 1
        self.records = {}
        self.first_header = None
        self.offset = data + padded(size)

    def _extension(self, kind: bytes, data: int, size: int) -> None:
        if size > EXTENSION_BYTES_MAX:
            raise self._damaged(f"an extension header claims {size} bytes")
        self._need(data, size)
        body = bytes(self.buffer[data : data + size])
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

    def _name(self, block: bytes) -> str:
        path = self.records.get("path")
        if path is None:
            raw = block[:NAME_BYTES_MAX].split(b"\0", 1)[0]
            # Only POSIX archives keep a prefix there; in GNU's the field holds times.
            if block[257:263] == b"ustar\0":
                prefix = block[345 : 345 + PREFIX_BYTES_MAX].split(b"\0", 1)[0]
                if prefix:
                    raw = prefix + b"/" + raw
            path = self._text(raw)
        if not path:
            raise self._damaged("a member has no name")
        return path

    def _check(self, block: bytes) -> None:
        stated = self._number(block[_CHECKSUM], "checksum")
        if sum(block) - sum(block[_CHECKSUM]) + 8 * 32 != stated:
            what = "this is not a tar" if self.offset == 0 else "a header is damaged"
            raise self._damaged(f"{what}: the header's checksum is wrong")

    def _need(self, data: int, size: int) -> None:
        if data + size > self.length:
            raise self._damaged(f"a member's data would end at byte {data + size} of {self.length}: it was cut short")

    def _number(self, raw: bytes, what: str) -> int:
        if raw[:1] == b"\x80":
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
            if length <= len(digits) + 2 or place + length > len(body) or record[-1:] != b"\n" or b"=" not in record:
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
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_AFTER_SIZE = b"00000000000\0"
_MAGIC = b"ustar\x0000"
_OWNERS = bytes(64) + b"0000000\0" * 2
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_AFTER_SIZE) + sum(_MAGIC) + sum(_OWNERS) + 8 * 32


def _ustar(prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size
    # Summing only what varies is five times cheaper than summing the block, and headers are the packer's main cost.
    checksum = _FIXED_SUM + sum(name) + sum(prefix) + sum(digits) + kind[0]
    return b"".join(
        (
            name.ljust(NAME_BYTES_MAX, b"\0"),
            _BEFORE_SIZE,
            digits,
            _AFTER_SIZE,
            b"%06o\0 " % checksum,
            kind,
            bytes(100),
            _MAGIC,
            _OWNERS,
            prefix.ljust(PREFIX_BYTES_MAX, b"\0"),
            bytes(12),
        )
    )
