"""What `stager status` shows of the cache, its datasets and their readers. JSON values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stager.cache.datasets import CachedDataset
from stager.cache.shards import ShardCache
from stager.prefetch.readers import Reader
from stager.prefetch.sources import Sources


def describe(
    cache: ShardCache,
    sources: Sources,
    readers: Sequence[Reader],
    bytes_needed: Callable[[CachedDataset], int],
) -> Mapping[str, Any]:
    """The sections ``cache``, ``datasets`` and ``readers``; ``bytes_needed`` is the cache that a dataset's readers need."""
    shards_here: Counter[str] = Counter()
    bytes_here: Counter[str] = Counter()
    for key, shard in cache.shards.items():
        shards_here[key.dataset] += 1
        bytes_here[key.dataset] += shard.size
    return {
        "cache": {
            "root": cache.layout.root,
            "bytes": cache.used_bytes,
            "capacity_bytes": cache.capacity_bytes,
            "bound_bytes": cache.bound_bytes(),
            "shards": len(cache.shards),
            "partial": len(cache.partial),
            "quarantined": cache.quarantined_count,
        },
        "datasets": [
            {
                "id": dataset.id,
                "source": source,
                "fingerprint": dataset.fingerprint,
                "samples": dataset.manifest.samples,
                "shards": len(dataset.manifest.shards),
                "bytes": dataset.manifest.size,
                "shards_here": shards_here[dataset.id],
                "bytes_here": bytes_here[dataset.id],
                "cache_bytes_needed": bytes_needed(dataset),
                "changes": sources.changes.get(source, 0),
            }
            for source, dataset in sources.current.items()
        ],
        "readers": [
            {
                "name": reader.name,
                "dataset": reader.dataset.id,
                "epoch": reader.plan.epoch,
                "position": reader.position,
            }
            for reader in readers
        ],
    }
