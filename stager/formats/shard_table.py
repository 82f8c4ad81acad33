"""A manifest as a trainer needs it: names, sizes and counts of the shards in flat arrays, read piece by piece.

A million shards take about 45 bytes each and are read in two seconds or so, where objects for each would take twenty
times that. Only the spelling that stager writes is read this way (`canonical_json`, plain names); what deviates by a
byte goes the careful way of `decode_dataset_manifest`, with the same outcome.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

from stager.errors import FormatError
from stager.formats.fields import load_object, take_count, take_text
from stager.formats.manifest import DatasetManifest, decode_dataset_manifest
from stager.formats.names import KEY_BYTES_MAX

_HEAD_BYTES_MAX = 64 << 20
_LIST_BEGINS = b'\n "shards": [\n'
_LIST_ENDS = b"\n ],\n"
_BETWEEN = b"\n  },\n"
# What stands around the values of an entry as `encode_dataset_manifest` writes it, each by one byte that no JSON holds.
_ENTRY_BEGINS, _ENTRY_ENDS = b'  {\n   "bytes": ', b'"\n  }'
_SEPARATORS = {
    b',\n   "crc64nvme": "': b"\1",
    b'",\n   "name": "': b"\2",
    b'",\n   "samples": ': b"\3",
    b',\n   "sha256": "': b"\4",
    _ENTRY_ENDS + b",\n" + _ENTRY_BEGINS: b"\5",
}
_MARKS = b"\1\2\3\4\5"
_TO_ONE = bytes.maketrans(_MARKS, b"\1" * 5)
_NOT_MARKS = bytes(set(range(256)) - set(_MARKS))
_NAME_BYTES = b"/" + string.ascii_letters.encode() + string.digits.encode() + b"_.=+-"
_BASE64_BYTES = string.ascii_letters.encode() + string.digits.encode() + b"+/"
_LEADING_ZERO = re.compile(rb" 0[0-9]")
_DIGITS_MAX = 18


class ShardNames(Sequence[str]):
    """Names of shards, in one piece of memory."""

    __slots__ = ("_ends", "_text")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("Q", [0])
        self.extend([name.encode() for name in names])

    def extend(self, names: Sequence[bytes]) -> None:
        """Append names, in UTF-8."""
        ends = accumulate(map(len, names), initial=len(self._text))
        next(ends)
        self._ends.extend(ends)
        self._text += b"".join(names)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._text[self._ends[place] : self._ends[place + 1]].decode()


class ShardTable:
    """The shards of a dataset, in the manifest's order.

    Attributes:
        names: Relative to the dataset.
        sizes: Bytes of each.
        samples: Of each.
        fingerprint: The manifest's.
        fields: Names of fields over all samples; empty where that is not known.
    """

    __slots__ = ("fields", "fingerprint", "names", "samples", "sizes")

    def __init__(
        self,
        names: ShardNames,
        sizes: array[int],
        samples: array[int],
        fingerprint: str,
        fields: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.sizes = sizes
        self.samples = samples
        self.fingerprint = fingerprint
        self.fields = fields

    def __len__(self) -> int:
        return len(self.sizes)


def table_of(manifest: DatasetManifest) -> ShardTable:
    """The table of a manifest that was decoded already."""
    return ShardTable(
        ShardNames(shard.name for shard in manifest.shards),
        array("Q", (shard.size for shard in manifest.shards)),
        array("Q", (shard.samples for shard in manifest.shards)),
        manifest.fingerprint,
        manifest.fields,
    )


def read_shard_table(pieces: Iterable[bytes], *, of: str) -> ShardTable | None:
    """The table of a manifest that goes by in pieces of any size, or None if it is not spelled as stager spells it.

    Raises:
        FormatError: It is, and does not hold: as `decode_dataset_manifest`.
    """
    reading = _Reading()
    for piece in pieces:
        if not reading.take(piece):
            return None
    return reading.finish(of)


def decode_shard_table(raw: bytes, *, of: str) -> ShardTable:
    """The table of a manifest in any spelling; FormatError as `decode_dataset_manifest`."""
    found = read_shard_table([raw], of=of)
    return table_of(decode_dataset_manifest(raw, of=of)) if found is None else found


class _Reading:
    def __init__(self) -> None:
        self._head: bytes | None = None
        self._tail: bytes | None = None
        self._rest = b""
        self._names = ShardNames()
        self._sizes, self._samples = array("Q"), array("Q")
        self._digest = hashlib.sha256(b"stager-dataset-1\n")
        self._ascending = True
        self._last_name = b""

    def take(self, piece: bytes) -> bool:
        """Whether what came so far is spelled as expected."""
        self._rest += piece
        if self._tail is not None:
            self._tail += piece
            return True
        if self._head is None:
            # Only a key of the outermost object stands one blank from the margin: strings hold no raw newline.
            begin = self._rest.find(_LIST_BEGINS)
            if begin < 0:
                return len(self._rest) <= _HEAD_BYTES_MAX
            self._head = self._rest[: begin + len(_LIST_BEGINS) - 1]
            self._rest = self._rest[begin + len(_LIST_BEGINS) :]
        end = self._rest.find(_LIST_ENDS)
        if end >= 0:
            self._tail = self._rest[end:]
            return self._entries(self._rest[:end])
        last = self._rest.rfind(_BETWEEN)
        if last < 0:
            return len(self._rest) <= 2 * KEY_BYTES_MAX + 1024
        block, self._rest = self._rest[: last + len(_BETWEEN) - 2], self._rest[last + len(_BETWEEN) :]
        return self._entries(block)

    def finish(self, of: str) -> ShardTable | None:
        if self._head is None or self._tail is None or len(self._tail) > _HEAD_BYTES_MAX:
            return None
        value = load_object(self._head + self._tail, of=of)
        if not self._ascending and len(set(self._names)) != len(self._names):
            raise FormatError(f"`{of}` names a shard twice", subject=of)
        # Everything but the shards is judged where it always is, on a manifest without any.
        bare = decode_dataset_manifest(_without_shards(value), of=of)
        fingerprint = self._digest.hexdigest()[:32]
        stated = (
            take_text(value, "fingerprint", at=of),
            take_count(value, "samples", at=of),
            take_count(value, "bytes", at=of),
        )
        if stated != (fingerprint, sum(self._samples), sum(self._sizes)):
            raise FormatError(
                f"`{of}`: fingerprint, samples or bytes do not add up over its shards",
                subject=of,
                hint="the file was altered by hand or damaged; pack again, or restore it",
            )
        return ShardTable(self._names, self._sizes, self._samples, fingerprint, bare.fields)

    def _entries(self, block: bytes) -> bool:
        """Take whole entries with a comma and a newline between them; False if anything else is among them.

        All work is done on whole columns: a step for each entry would take most of the time.
        """
        if not block.startswith(_ENTRY_BEGINS) or not block.endswith(_ENTRY_ENDS) or _marks(block):
            return False
        block = block[len(_ENTRY_BEGINS) : -len(_ENTRY_ENDS)]
        for text, mark in _SEPARATORS.items():
            block = block.replace(text, mark)
        count = block.count(b"\5") + 1
        if _marks(block) != (_MARKS * count)[:-1]:
            return False
        values = block.translate(_TO_ONE).split(b"\1")
        sizes, crcs, names, samples, digests = (values[place::5] for place in range(5))
        if not (_are_numbers(sizes) and _are_numbers(samples) and _are_names(names)):
            return False
        if not (_are_digests(digests) and _are_crcs(crcs)):
            return False
        self._sizes.extend(map(int, sizes))
        self._samples.extend(map(int, samples))
        self._names.extend(names)
        self._digest.update(b"".join(map(b"%b %b %b\n".__mod__, zip(digests, sizes, samples, strict=True))))
        self._ascending = self._ascending and all(
            first < second for first, second in pairwise((self._last_name, *names))
        )
        self._last_name = names[-1]
        return True


def _marks(block: bytes) -> bytes:
    return block.translate(None, _NOT_MARKS)


def _are_numbers(texts: list[bytes]) -> bool:
    if not all(texts) or max(map(len, texts)) > _DIGITS_MAX or not b"".join(texts).isdigit():
        return False
    return _LEADING_ZERO.search(b" " + b" ".join(texts)) is None


def _are_names(texts: list[bytes]) -> bool:
    """Whether they are plain: letters, digits and a few signs, with no part that is empty or begins with a dot."""
    whole = b"/" + b"/".join(texts) + b"/"
    plain = not whole.translate(None, _NAME_BYTES) and b"//" not in whole and b"/." not in whole
    return plain and max(map(len, texts)) <= KEY_BYTES_MAX


def _are_digests(texts: list[bytes]) -> bool:
    return set(map(len, texts)) == {64} and not b"".join(texts).translate(None, b"0123456789abcdef")


def _are_crcs(texts: list[bytes]) -> bool:
    whole, ends = b"".join(texts), b"=" * len(texts)
    return set(map(len, texts)) == {12} and whole[11::12] == ends == whole.translate(None, _BASE64_BYTES)


def _without_shards(value: Any) -> bytes:
    whole = {**value, "fingerprint": DatasetManifest(()).fingerprint, "samples": 0, "bytes": 0, "shards": []}
    return json.dumps(whole).encode()

