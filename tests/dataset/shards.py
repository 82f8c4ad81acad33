"""Small datasets for the tests: written by webdataset, or with a manifest as stager writes it."""

from __future__ import annotations

from pathlib import Path

import webdataset

from stager.checksum import digest_of
from stager.formats.manifest import MANIFEST_NAME, DatasetManifest, ShardEntry, encode_dataset_manifest
from stager.formats.tar import END_OF_ARCHIVE, member_header, padded


def key_of(number: int) -> str:
    return f"sample/{number:05d}"


def write_with_webdataset(directory: Path, samples: int, per_shard: int) -> Path:
    """Shards of webdataset.ShardWriter, without any manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    pattern = str(directory / "shard-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
        for number in range(samples):
            writer.write(
                {
                    "__key__": key_of(number),
                    "txt": f"text {number}",
                    "cls": number,
                    "bin": bytes([number % 256] * 9),
                }
            )
    return directory


def write_with_manifest(directory: Path, counts: list[int]) -> Path:
    """Shards of ``counts`` samples each, numbered through, and their manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    number = 0
    for shard, count in enumerate(counts):
        members = []
        for _ in range(count):
            members += [
                (f"{key_of(number)}.cls", b"%d" % number),
                (f"{key_of(number)}.txt", b"text %d" % number),
            ]
            number += 1
        raw = b"".join(
            member_header(name, len(data)) + data + bytes(padded(len(data)) - len(data))
            for name, data in members
        )
        raw += END_OF_ARCHIVE
        name = f"shard-{shard:06d}.tar"
        (directory / name).write_bytes(raw)
        entries.append(ShardEntry(name, len(raw), count, digest_of(raw)))
    manifest = DatasetManifest(tuple(entries), ("cls", "txt"))
    (directory / MANIFEST_NAME).write_bytes(encode_dataset_manifest(manifest))
    return directory
