"""`stager verify` and `stager index`: damage is named, shards of others are taken in."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset
from typer.testing import CliRunner

from stager.cli.main import app
from stager.errors import Unavailable
from stager.formats.manifest import decode_dataset_manifest
from stager.offload import InlineOffload
from stager.pack.verify import read_manifest, verify_dataset
from stager.store.memory import MemoryStore


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Shards by webdataset's own writer, indexed by us."""
    out = tmp_path / "out"
    out.mkdir()
    with webdataset.ShardWriter(f"{out}/other-%03d.tar", maxcount=4, verbose=0) as writer:
        for number in range(10):
            writer.write({"__key__": f"s{number:03d}", "json": {"n": number}, "bin": bytes([number]) * 3000})
    return out


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_shards_of_webdataset_are_indexed_and_verified(dataset: Path) -> None:
    """The manifest is all that is added, and it is what verify compares with."""
    before = sorted(path.name for path in dataset.iterdir())
    done = invoke("index", dataset)
    assert (done["shards"], done["samples"], done["fields"]) == (3, 10, ["bin", "json"])
    assert sorted(path.name for path in dataset.iterdir()) == ["manifest.json", *before]
    manifest = decode_dataset_manifest((dataset / "manifest.json").read_bytes())
    assert [shard.samples for shard in manifest.shards] == [4, 4, 2]
    assert invoke("verify", dataset)["ok"]
    assert "already" in invoke("index", dataset, code=2)["error"]["message"]
    assert invoke("index", dataset, "--overwrite")["fingerprint"] == done["fingerprint"]


def test_every_kind_of_damage_is_named(dataset: Path) -> None:
    """A flipped byte, a cut shard and a missing one: exit code 13, all three told, the sound one not."""
    invoke("index", dataset)
    first, second, third = sorted(dataset.glob("*.tar"))
    flipped = bytearray(first.read_bytes())
    flipped[2000] ^= 1
    first.write_bytes(flipped)
    second.write_bytes(second.read_bytes()[: 512 * 9])
    third.unlink()
    report = invoke("verify", dataset, code=13)
    reasons = {entry["shard"]: " ".join(entry["reasons"]) for entry in report["damaged"]}
    assert "SHA-256" in reasons[first.name]
    assert "4608 bytes" in reasons[second.name] and "cut short" in reasons[second.name]
    assert "no object" in reasons[third.name]
    error = invoke("index", dataset, "--overwrite", code=13)["error"]
    assert second.name in error["message"]


def test_what_readers_would_trip_over_is_noted(tmp_path: Path) -> None:
    """Members apart, links, names without a field: no damage, but told; a doubled field is damage."""
    raw = tmp_path / "odd.tar"
    with tarfile.open(raw, "w") as tar:
        for name in ("a.jpg", "b.jpg", "a.json", "README"):
            tar.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("c.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(link)
    notes = " ".join(invoke("index", tmp_path)["notes"])
    assert "hard link" in notes and "no key" in notes and "come back" in notes
    with tarfile.open(raw, "w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
        tar.addfile(tarfile.TarInfo("a.JPG"))
    assert "second time" in invoke("index", tmp_path, "--overwrite", code=13)["error"]["message"]


def test_nothing_to_index_or_verify(tmp_path: Path) -> None:
    """An empty place, compressed shards, a dataset without a manifest: each says what to do."""
    assert "no .tar" in invoke("index", tmp_path, code=12)["error"]["message"]
    (tmp_path / "a.tar.gz").write_bytes(b"")
    assert "decompress" in invoke("index", tmp_path, code=12)["error"]["hint"]
    assert "stager index" in invoke("verify", tmp_path, code=12)["error"]["hint"]


async def test_a_store_that_fails_is_not_a_damaged_dataset() -> None:
    """An outage ends in the store's error, not in a list of damaged shards."""

    class Failing(MemoryStore):
        def get(self, key: str, **options: Any) -> Any:
            if key.endswith(".tar"):
                raise Unavailable(f"`{key}`: connection refused", subject=key)
            return super().get(key, **options)

    store = Failing()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    await store.put("a.tar", out.getvalue())
    from stager.checksum import digest_of
    from stager.formats.manifest import DatasetManifest, ShardEntry, encode_dataset_manifest

    entry = ShardEntry("a.tar", len(out.getvalue()), 1, digest_of(out.getvalue()))
    await store.put("manifest.json", encode_dataset_manifest(DatasetManifest((entry,), ("txt",))))
    manifest = await read_manifest(store)
    with pytest.raises(Unavailable):
        await verify_dataset(store, manifest, offload=InlineOffload())
