"""Manifests, parts, markers and control messages: they come back as written, and damage never passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.checksum import digest_of
from stager.errors import FormatError, NotFound, StagerError
from stager.formats import commits, manifest, wire
from stager.formats.digests import Digest
from stager.formats.names import check_relative_path, join_key, manifest_key, node_of_part, node_part_key

DIGEST = digest_of(b"bytes")
SHARDS = manifest.DatasetManifest(
    shards=(
        manifest.ShardEntry("shard-000000.tar", 10240, 7, DIGEST),
        manifest.ShardEntry("shard-000001.tar", 2048, 0, digest_of(b"other")),
    ),
    fields=("json", "txt"),
    provenance={"tool": "test"},
)
COMMIT = commits.CheckpointManifest(
    checkpoint="step-100",
    step=100,
    layout="torch_dcp",
    files=(commits.FileEntry(".metadata", 5, DIGEST, "etag"), commits.FileEntry("a/b.distcp", 5, DIGEST)),
    nodes=1,
    write_id="w-1",
    created_ns=1_800_000_000_000_000_000,
    metrics={"loss": 2.5},
    cursor={"position": 640},
)
PART = commits.CheckpointPart("step-100", 1, 2, COMMIT.files, commits.CommitMarker(100, {"loss": 2.5}, None))

DOCUMENTS: list[tuple[bytes, Any, Any]] = [
    (manifest.encode_dataset_manifest(SHARDS), manifest.decode_dataset_manifest, SHARDS),
    (commits.encode_checkpoint_manifest(COMMIT), commits.decode_checkpoint_manifest, COMMIT),
    (commits.encode_part(PART), commits.decode_part, PART),
    (commits.encode_marker(PART.marker), commits.decode_marker, PART.marker),
]


@pytest.mark.parametrize(("raw", "decode", "value"), DOCUMENTS)
def test_a_document_comes_back(raw: bytes, decode: Any, value: Any) -> None:
    """Decoding gives the encoded value."""
    assert decode(raw, of="x") == value


@pytest.mark.parametrize(("raw", "decode", "value"), DOCUMENTS)
def test_a_document_cut_anywhere_is_refused(raw: bytes, decode: Any, value: Any) -> None:
    """Truncation at every byte but the final newline is a FormatError that names the document."""
    for length in range(len(raw) - 1):
        with pytest.raises(FormatError, match="x"):
            decode(raw[:length], of="x")


@pytest.mark.parametrize(("raw", "decode", "value"), DOCUMENTS)
def test_a_document_with_any_field_spoilt_is_refused_or_equal(raw: bytes, decode: Any, value: Any) -> None:
    """Each field is replaced by values of every other type: either a FormatError, or a document of sane values."""

    def spoilt(node: Any) -> Any:
        if isinstance(node, dict):
            for name in node:
                for bad in (None, -1, 2**70, "", "../up", [], {}, True, 1.5, [None]):
                    yield {**node, name: bad}
                for inner in spoilt(node[name]):
                    yield {**node, name: inner}
        elif isinstance(node, list):
            for place, item in enumerate(node):
                for inner in spoilt(item):
                    yield [*node[:place], inner, *node[place + 1 :]]

    count = 0
    for document in spoilt(json.loads(raw)):
        count += 1
        try:
            found = decode(json.dumps(document).encode(), of="x")
        except FormatError:
            continue
        for entry in getattr(found, "files", ()):
            assert check_relative_path(entry.path) and entry.size >= 0
    assert count > 20


def test_doubled_keys_and_doubled_names_are_refused() -> None:
    """JSON that says a thing twice says neither."""
    with pytest.raises(FormatError, match="twice"):
        commits.decode_marker(b'{"kind": "stager-commit", "kind": "stager-commit", "version": 1}')
    twice = manifest.DatasetManifest((SHARDS.shards[0], SHARDS.shards[0]))
    with pytest.raises(FormatError, match="twice"):
        manifest.decode_dataset_manifest(manifest.encode_dataset_manifest(twice))


def test_a_newer_version_names_the_way_out() -> None:
    """A document of a later format is refused with a hint at upgrading."""
    raw = manifest.encode_dataset_manifest(SHARDS).replace(b'"version": 1', b'"version": 2')
    with pytest.raises(FormatError, match="upgrade"):
        manifest.decode_dataset_manifest(raw)


def test_the_fingerprint_follows_content_only() -> None:
    """Names and provenance leave it alone; digest, order and counts do not."""
    renamed = manifest.DatasetManifest(
        tuple(manifest.ShardEntry(f"n{i}", s.size, s.samples, s.digest) for i, s in enumerate(SHARDS.shards))
    )
    assert renamed.fingerprint == SHARDS.fingerprint
    assert manifest.DatasetManifest(SHARDS.shards[::-1]).fingerprint != SHARDS.fingerprint
    other = manifest.ShardEntry("s", 10240, 7, Digest("0" * 64, 0))
    assert manifest.DatasetManifest((other, SHARDS.shards[1])).fingerprint != SHARDS.fingerprint


@pytest.mark.parametrize("path", ["a", "a/b.c", "ü/é", "a b", "..a", "a..", ".hidden", "~x", "a\\b"])
def test_names_that_may_pass(path: str) -> None:
    """Ordinary and odd names alike are kept as they are."""
    assert check_relative_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        ".",
        "a/.",
        "a\0b",
        "a\nb",
        "\ud800",
        "x" * 1025,
        7,
        None,
        b"a",
    ],
)
def test_names_that_may_not(path: object) -> None:
    """What could leave its root, or cannot be a key, is refused."""
    with pytest.raises(FormatError):
        check_relative_path(path)


def test_places_in_a_run() -> None:
    """The bucket layout of a run, spelled out."""
    assert manifest_key("step-1") == ".stager/step-1/manifest.json"
    assert node_part_key("step-1", 3) == ".stager/step-1/node-3.json"
    assert [
        node_of_part(name) for name in ("node-0.json", "node-12.json", "node-01.json", "node-x.json")
    ] == [
        0,
        12,
        None,
        None,
    ]
    assert join_key("", "/a/", "b", "") == "a/b"


def test_control_messages_come_back() -> None:
    """Each request and reply survives the wire."""
    pairs: list[tuple[Any, Any]] = [
        (wire.OpenRequest("s3://b/d", 5.0), wire.decode_open_request),
        (wire.OpenReply("d", "f", "/m", "/s"), wire.decode_open_reply),
        (wire.AnnounceRequest("d", "r", {"seed": 1}, 64, 1, 2), wire.decode_announce_request),
        (wire.AnnounceReply(5, 6), wire.decode_announce_reply),
        (wire.WantRequest("d", "s.tar", 1.5, True), wire.decode_want_request),
        (wire.WantReply("/p"), wire.decode_want_reply),
        (wire.SealRequest("/d", True, 3.0), wire.decode_seal_request),
        (wire.SealReply("c", "committed"), wire.decode_seal_reply),
    ]
    for message, decode in pairs:
        assert decode(wire.encode(message)) == message


@given(st.binary(max_size=60))
def test_noise_on_the_wire_is_an_error_of_ours(raw: bytes) -> None:
    """No bytes whatever raise anything but a StagerError."""
    for decode in (wire.decode_open_request, wire.decode_want_request, wire.decode_seal_request):
        with pytest.raises(StagerError):
            decode(raw)
    assert isinstance(wire.decode_error(raw, status=500), StagerError)


def test_an_error_crosses_the_wire_as_itself() -> None:
    """The caller raises what the daemon raised."""
    error = wire.decode_error(wire.encode_error(NotFound("no `x`", subject="x", hint="look")), status=404)
    assert type(error) is NotFound and str(error) == "no `x`\nhint: look"
