"""A shard's index as bytes, to lie beside the shard and be loaded instead of walking its headers again.

Bound to the shard by its size: whoever keeps it also keeps shards immutable under their names. Little-endian:

    magic (8) | shard bytes (8) | samples (8) | places (8) | bytes of keys (8) | bytes of field names (8)
    starts: 8 x (samples + 1) | field ids: 4 x places | offsets: 8 x places | sizes: 8 x places
    keys, then field names, each UTF-8 and followed by a zero byte | CRC-32 of all before (4)
"""

from __future__ import annotations

import operator
import sys
import zlib
from array import array
from itertools import pairwise
from struct import Struct

from stager.errors import FormatError
from stager.formats.index import ShardIndex

MAGIC = b"STGIDX1\n"
_HEAD = Struct("<8s5Q")
_TAIL = Struct("<I")


def encode_index(index: ShardIndex, *, shard_bytes: int) -> bytes:
    """The index of a shard of ``shard_bytes`` bytes."""
    keys = b"".join(key.encode() + b"\0" for key in index._keys)
    names = b"".join(name.encode() + b"\0" for name in index._field_names)
    head = _HEAD.pack(MAGIC, shard_bytes, len(index), len(index._offsets), len(keys), len(names))
    arrays = (index._starts, index._field_ids, index._offsets, index._sizes)
    body = b"".join((head, *map(_to_little, arrays), keys, names))
    return body + _TAIL.pack(zlib.crc32(body))


def decode_index(raw: bytes, *, shard_bytes: int, of: str) -> ShardIndex:
    """The index in ``raw``, if it is whole and of a shard of ``shard_bytes`` bytes.

    Args:
        raw: From `encode_index`, perhaps damaged since.
        shard_bytes: The size of the shard that it is to be used with.
        of: The shard's name, for messages.

    Raises:
        FormatError: It is anything else; the shard should be indexed again.
    """
    if len(raw) < _HEAD.size + _TAIL.size or raw[:8] != MAGIC:
        raise _unusable(of, "it is not an index")
    if _TAIL.unpack(raw[-_TAIL.size :])[0] != zlib.crc32(memoryview(raw)[: -_TAIL.size]):
        raise _unusable(of, "its checksum is wrong")
    _, bound, samples, places, key_bytes, name_bytes = _HEAD.unpack_from(raw)
    if bound != shard_bytes:
        raise _unusable(of, f"it is of a shard of {bound} bytes, not {shard_bytes}")
    lengths = (8 * (samples + 1), 4 * places, 8 * places, 8 * places, key_bytes, name_bytes)
    if _HEAD.size + sum(lengths) + _TAIL.size != len(raw):
        raise _unusable(of, "its lengths do not add up")
    pieces, place = [], _HEAD.size
    for length in lengths:
        pieces.append(raw[place : place + length])
        place += length
    index = ShardIndex(of)
    index._starts = _from_little("Q", pieces[0])
    index._field_ids = _from_little("I", pieces[1])
    index._offsets = _from_little("Q", pieces[2])
    index._sizes = _from_little("Q", pieces[3])
    index._keys = _texts(pieces[4], samples, of)
    index._field_names = _texts(pieces[5], None, of)
    _check(index, shard_bytes)
    return index


def _check(index: ShardIndex, shard_bytes: int) -> None:
    """Places lie within the shard and ids within their tables, so that no later look-up can go astray."""
    starts, places = index._starts, len(index._offsets)
    if starts[0] != 0 or starts[-1] != places or any(last < first for first, last in pairwise(starts)):
        raise _unusable(index.of, "its samples do not follow one another")
    if places and max(index._field_ids) >= len(index._field_names):
        raise _unusable(index.of, "it has a field without a name")
    if places and max(map(operator.add, index._offsets, index._sizes)) > shard_bytes:
        raise _unusable(index.of, "a field lies beyond the end of the shard")


def _texts(raw: bytes, count: int | None, of: str) -> list[str]:
    try:
        texts = raw.decode().split("\0")
    except UnicodeDecodeError:
        raise _unusable(of, "a name in it is not UTF-8") from None
    if texts.pop() or (count is not None and len(texts) != count):
        raise _unusable(of, "it has another number of names than it says")
    return texts


def _to_little(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _from_little(typecode: str, raw: bytes) -> array[int]:
    numbers = array(typecode)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _unusable(of: str, reason: str) -> FormatError:
    return FormatError(
        f"the stored index of `{of}` cannot be used: {reason}", subject=of, hint="index the shard again"
    )
