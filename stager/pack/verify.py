"""Whether a dataset is what its manifest says: every byte read, every digest compared, every shard parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from stager.errors import BucketNotFound, IntegrityError, NotFound
from stager.formats.manifest import (
    DATASET_MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    DatasetManifest,
    ShardEntry,
    decode_dataset_manifest,
)
from stager.offload import Offload
from stager.pack.check import ShardFacts, read_shard
from stager.store.api import ObjectStore, read_all

SHARDS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What is wrong with a shard.

    Attributes:
        name: Its name.
        damage: Where it differs from the manifest or cannot be read; empty if it is sound.
        notes: What readers will pass over, although the shard is as it should be.
    """

    name: str
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in a dataset.

    Attributes:
        manifest: What it should be.
        shards: One verdict for each of its shards, in order.
    """

    manifest: DatasetManifest
    shards: tuple[ShardVerdict, ...]

    @property
    def damaged(self) -> tuple[ShardVerdict, ...]:
        return tuple(shard for shard in self.shards if shard.damage)


async def read_manifest(store: ObjectStore) -> DatasetManifest:
    """The manifest of the dataset in ``store``.

    Raises:
        NotFound: There is none.
        FormatError: It is damaged.
    """
    try:
        raw, _ = await read_all(store, MANIFEST_NAME, bytes_max=DATASET_MANIFEST_BYTES_MAX)
    except BucketNotFound:
        raise
    except NotFound as error:
        raise NotFound(
            f"there is no {MANIFEST_NAME} in {store.properties.name}",
            subject=store.properties.name,
            hint="`stager pack` writes one last, so an unfinished pack has none; `stager index` makes one for shards"
            " that something else packed",
        ) from error
    return decode_dataset_manifest(raw, of=f"{store.properties.name}/{MANIFEST_NAME}")


async def verify_dataset(
    store: ObjectStore,
    manifest: DatasetManifest,
    *,
    offload: Offload,
    seen: Callable[[int], None] = lambda size: None,
) -> Verdict:
    """Read every shard and compare it; ``seen`` is called with the bytes of every piece.

    Raises:
        StoreError: The store could not be asked. A shard that is missing or damaged is a verdict instead.
    """
    verdicts: dict[str, ShardVerdict] = {}
    failures: list[Exception] = []
    slots = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def verify(entry: ShardEntry) -> None:
        async with slots:
            try:
                facts = await read_shard(store, entry.name, offload=offload, seen=seen)
                verdicts[entry.name] = _compare(entry, facts)
            except (NotFound, IntegrityError) as error:
                verdicts[entry.name] = ShardVerdict(entry.name, (error.message,))
            except Exception as error:  # says nothing of the shard; raised below, once the others have ended
                failures.append(error)

    async with asyncio.TaskGroup() as group:
        for entry in manifest.shards:
            group.create_task(verify(entry))
    if failures:
        raise failures[0]
    return Verdict(manifest, tuple(verdicts[entry.name] for entry in manifest.shards))


def _compare(entry: ShardEntry, facts: ShardFacts) -> ShardVerdict:
    damage = []
    if facts.size != entry.size:
        damage.append(f"it has {facts.size} bytes; the manifest says {entry.size}")
    elif facts.digest.sha256 != entry.digest.sha256:
        damage.append(f"its SHA-256 is {facts.digest.sha256}; the manifest says {entry.digest.sha256}")
    elif facts.digest.crc64nvme != entry.digest.crc64nvme:
        damage.append("its SHA-256 is the manifest's, but its CRC-64/NVME is not: the manifest was altered")
    if facts.damage:
        damage.append(facts.damage)
    elif facts.samples != entry.samples:
        damage.append(f"it has {facts.samples} samples; the manifest says {entry.samples}")
    return ShardVerdict(entry.name, tuple(damage), facts.notes)
