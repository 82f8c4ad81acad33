"""Stored indexes: they come back as they were, and damage or another shard's never passes."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.index import index_shard
from stager.formats.index_file import decode_index, encode_index
from stager.formats.tar import END_OF_ARCHIVE, member_header, padded


def write(names: list[str]) -> bytes:
    pieces = []
    for number, name in enumerate(names):
        pieces += [member_header(name, number * 100), bytes(padded(number * 100))]
    return b"".join([*pieces, END_OF_ARCHIVE])


SHARD = write(["a.jpg", "a.json", "b.jpg", "ü/c.txt", "d.jpg", "d.cls"])


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0/."), min_size=1), unique=True, max_size=20
    )
)
def test_an_index_comes_back(keys: list[str]) -> None:
    """Keys, fields and places, for any names, the empty shard included."""
    shard = write([f"{key}.{field}" for key in keys for field in ("a", "b.c")])
    index = index_shard(shard, of="x.tar")
    found = decode_index(encode_index(index, shard_bytes=len(shard)), shard_bytes=len(shard), of="x.tar")
    assert len(found) == len(index) == len(keys) and found.fields == index.fields
    assert [(found.key(n), found.places(n)) for n in range(len(keys))] == [
        (index.key(n), index.places(n)) for n in range(len(keys))
    ]


@given(st.data())
def test_damage_never_passes(data: st.DataObject) -> None:
    """Any flipped bit and any cut is a FormatError."""
    raw = bytearray(encode_index(index_shard(SHARD, of="x.tar"), shard_bytes=len(SHARD)))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError, match=r"x\.tar"):
        decode_index(bytes(raw), shard_bytes=len(SHARD), of="x.tar")


@given(st.integers(8, 400), st.binary(min_size=8, max_size=8))
def test_hostile_numbers_are_bounded(place: int, noise: bytes) -> None:
    """With a right checksum over wrong numbers, no place outside the shard comes out, and nothing but FormatError."""
    raw = bytearray(encode_index(index_shard(SHARD, of="x.tar"), shard_bytes=len(SHARD)))
    place %= len(raw) - 12
    raw[place : place + 8] = noise
    raw[-4:] = zlib.crc32(raw[:-4]).to_bytes(4, "little")
    try:
        index = decode_index(bytes(raw), shard_bytes=len(SHARD), of="x.tar")
    except FormatError:
        return
    for number in range(len(index)):
        assert all(found.offset + found.size <= len(SHARD) for found in index.places(number))


def test_an_index_belongs_to_one_size() -> None:
    """A shard that was replaced by a longer one is indexed again."""
    raw = encode_index(index_shard(SHARD, of="x.tar"), shard_bytes=len(SHARD))
    with pytest.raises(FormatError, match="not 7"):
        decode_index(raw, shard_bytes=7, of="x.tar")
