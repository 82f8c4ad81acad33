"""A manifest for shards that something else packed, so that they can be staged, verified and resumed like our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import stager
from stager.errors import FormatError, NotFound
from stager.formats.manifest import DatasetManifest, ShardEntry
from stager.formats.names import STAGER_FOLDER
from stager.offload import Offload
from stager.pack.check import ShardFacts, read_shard
from stager.pack.verify import SHARDS_AT_ONCE
from stager.store.api import ObjectInfo, ObjectStore

COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
DAMAGED_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Adopted:
    """The manifest of what was found, not yet written.

    Attributes:
        manifest: Shards in the order of their keys.
        notes: ``shard: note`` for what readers will pass over.
        other: How many other objects lie there.
    """

    manifest: DatasetManifest
    notes: tuple[str, ...]
    other: int


async def find_shards(store: ObjectStore) -> tuple[list[ObjectInfo], int]:
    """The tars of a store in the order of their keys, and how many other objects there are.

    Raises:
        NotFound: There is none; tells compressed ones from none at all.
    """
    shards, other, compressed = [], 0, 0
    async for info in store.list_objects():
        if info.key.endswith(".tar") and not info.key.startswith(STAGER_FOLDER + "/"):
            shards.append(info)
        else:
            other += 1
            compressed += info.key.endswith(COMPRESSED)
    if not shards:
        raise NotFound(
            f"there is no .tar in {store.properties.name}"
            + (f", but {compressed} compressed ones" if compressed else ""),
            subject=store.properties.name,
            hint="samples of a compressed tar cannot be read one by one: decompress them"
            if compressed
            else "name the directory or prefix that holds the shards",
        )
    return shards, other


async def adopt_shards(
    store: ObjectStore,
    shards: Sequence[ObjectInfo],
    *,
    offload: Offload,
    other: int = 0,
    seen: Callable[[int], None] = lambda size: None,
) -> Adopted:
    """Read every shard once and describe them all.

    Raises:
        FormatError: One or more are damaged; names them all.
        StoreError: One cannot be read.
    """
    found: dict[str, ShardFacts] = {}
    failures: list[Exception] = []
    slots = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def read(info: ObjectInfo) -> None:
        async with slots:
            try:
                found[info.key] = await read_shard(store, info.key, offload=offload, seen=seen)
            except Exception as error:  # raised below, once the others have ended
                failures.append(error)

    async with asyncio.TaskGroup() as group:
        for info in shards:
            group.create_task(read(info))
    if failures:
        raise failures[0]
    _refuse_damaged(found, store.properties.name)
    entries = [
        ShardEntry(info.key, found[info.key].size, found[info.key].samples, found[info.key].digest)
        for info in shards
    ]
    fields = sorted({name for facts in found.values() for name in facts.fields})
    manifest = DatasetManifest(
        tuple(entries), tuple(fields), {"packer": "another", "indexer": f"stager {stager.__version__}"}
    )
    notes = tuple(f"`{info.key}`: {note}" for info in shards for note in found[info.key].notes)
    return Adopted(manifest, notes, other)


def _refuse_damaged(found: dict[str, ShardFacts], name: str) -> None:
    damaged = sorted(facts.damage for facts in found.values() if facts.damage)
    if damaged:
        more = f"\n  and {len(damaged) - DAMAGED_SHOWN} more" if len(damaged) > DAMAGED_SHOWN else ""
        raise FormatError(
            f"{len(damaged)} of {len(found)} shards in {name} are damaged\n  "
            + "\n  ".join(damaged[:DAMAGED_SHOWN])
            + more,
            subject=name,
            hint="replace them or move them away, and index again",
        )
