"""The quick way to read a manifest gives what the careful way gives, and stays small with a million shards."""

from __future__ import annotations

import hashlib
import pickle
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.digests import Digest
from stager.formats.manifest import (
    DatasetManifest,
    ShardEntry,
    decode_dataset_manifest,
    encode_dataset_manifest,
)
from stager.formats.shard_table import ShardNames, ShardTable, decode_shard_table, read_shard_table, table_of

PLAIN_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.=+-]{0,8}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,5}){0,2}", fullmatch=True)
NAMES = PLAIN_NAMES | st.text(st.characters(min_codepoint=32, exclude_characters="/\x7f", codec="utf-8"), min_size=1)
COUNTS = st.integers(0, 1 << 58) | st.integers(0, 3000)
ENTRIES = st.builds(
    ShardEntry,
    NAMES.filter(lambda name: name not in (".", "..")),
    COUNTS,
    st.integers(0, 10**6),
    st.builds(
        Digest,
        st.binary(max_size=3).map(lambda data: hashlib.sha256(data).hexdigest()),
        st.integers(0, (1 << 64) - 1),
    ),
)
MANIFESTS = st.builds(
    DatasetManifest,
    st.lists(ENTRIES, max_size=12, unique_by=lambda entry: entry.name).map(tuple),
    st.lists(PLAIN_NAMES, max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=5), st.text() | st.lists(st.integers(), max_size=3), max_size=3),
)


def pieces(raw: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(raw), size):
        yield raw[begin : begin + size]


def content(table: ShardTable) -> tuple[list[str], list[int], list[int], str, tuple[str, ...]]:
    return list(table.names), list(table.sizes), list(table.samples), table.fingerprint, table.fields


@settings(max_examples=100, deadline=None)
@given(manifest=MANIFESTS, size=st.integers(1, 3000))
def test_both_ways_agree(manifest: DatasetManifest, size: int) -> None:
    """In pieces of any size; None only says that the other way is to be taken."""
    raw = encode_dataset_manifest(manifest)
    expected = content(table_of(decode_dataset_manifest(raw)))
    found = read_shard_table(pieces(raw, size), of="m")
    assert found is None or content(found) == expected
    assert content(decode_shard_table(raw, of="m")) == expected


def a_manifest(shards: int) -> DatasetManifest:
    return DatasetManifest(
        tuple(
            ShardEntry(f"shard-{number:06d}.tar", 10**8 + number, 1000, Digest(hashlib.sha256(b"%d" % number).hexdigest(), number))
            for number in range(shards)
        ),
        ("cls", "jpg"),
        {"packer": "stager", "nested": {"shards": [1]}},
    )


def test_what_stager_writes_is_read_quickly() -> None:
    """The quick way is really taken, also over piece boundaries."""
    manifest = a_manifest(50)
    raw = encode_dataset_manifest(manifest)
    for size in (100, 1000, 1 << 20):
        found = read_shard_table(pieces(raw, size), of="m")
        assert found is not None and content(found) == content(table_of(manifest))
    assert content(pickle.loads(pickle.dumps(found))) == content(table_of(manifest))


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2500), byte=st.integers(0, 255), cut=st.booleans())
@example(at=700, byte=1, cut=False)
def test_a_changed_byte_has_the_same_outcome_both_ways(at: int, byte: int, cut: bool) -> None:
    """Whatever is damaged, the quick way finds it, or leaves it to the careful one."""
    raw = bytearray(encode_dataset_manifest(a_manifest(8)))
    at %= len(raw)
    if cut:
        del raw[at:]
    else:
        raw[at] = byte
    try:
        expected = content(table_of(decode_dataset_manifest(bytes(raw))))
    except FormatError:
        with pytest.raises(FormatError):
            decode_shard_table(bytes(raw), of="m")
    else:
        assert content(decode_shard_table(bytes(raw), of="m")) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shard-000003.tar"', b'"shard-000002.tar"'),
        (b'"shard-000003.tar"', b'"../shard-3.tar"'),
        (b'"shard-000003.tar"', b'"a//b.tar"'),
        (b'"bytes": 100000003', b'"bytes": 0100000003'),
        (b'"bytes": 100000003', b'"bytes": 1_0'),
        (b'"samples": 1000,', b'"samples": -1,'),
        (b'"samples": 1000,', b'"samples": 1000.0,'),
        (b'"crc64nvme": "AAAAAAAAAAM="', b'"crc64nvme": "AAAAAAAAAAMM"'),
        (b'"samples": 8000', b'"samples": 8001'),
        (b'"version": 1', b'"version": 9'),
        (b'"kind": "stager-dataset"', b'"kind": "other"'),
    ],
)
def test_a_wrong_manifest_is_refused(old: bytes, new: bytes) -> None:
    """As the careful way refuses it."""
    raw = encode_dataset_manifest(a_manifest(8))
    assert old in raw
    with pytest.raises(FormatError):
        decode_shard_table(raw.replace(old, new, 1), of="m")


def test_names_in_one_piece() -> None:
    """Negative places, slices and what lies outside are those of a list."""
    names = ShardNames(["a", "bb", "ü"])
    assert (names[0], names[-1], names[1:], len(names)) == ("a", "ü", ["bb", "ü"], 3)
    for outside in (3, -4):
        with pytest.raises(IndexError):
            names[outside]


def test_memory_and_calls_go_by_the_piece_not_by_the_shard() -> None:
    """100,000 shards: 20 MB at the most, and a few calls each, whatever the shards are."""
    raw = encode_dataset_manifest(a_manifest(1000))
    begin, end = raw.index(b"  {\n"), raw.rindex(b"\n ],")
    entries = raw[begin:end]
    shards = 100_000

    def made() -> Iterator[bytes]:
        yield raw[:begin]
        for number in range(shards // 1000):
            yield entries.replace(b"shard-", b"shard-%03d-" % number)
            yield b",\n" if number < shards // 1000 - 1 else b""
        yield raw[end:]

    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        # The sums stated are those of 1000 shards: the refusal comes at the very end, with everything read.
        with pytest.raises(FormatError, match="do not add up"):
            read_shard_table(made(), of="m")
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20_000_000
    assert sum(calls.values()) < 4.5 * shards
