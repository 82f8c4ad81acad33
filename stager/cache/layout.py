"""Where things lie in a node's cache. Pure paths.

<root>/lock                                 held by the daemon that owns the cache
<root>/datasets/<dataset>/manifest.json     the dataset's manifest, as the bucket had it
<root>/datasets/<dataset>/source            its URL
<root>/datasets/<dataset>/verified          records of the shards that were verified (`stager.cache.records`)
<root>/shards/<dataset>/<shard name>        complete, verified, immutable
<root>/staging/...                          what is being fetched, with its part map
<root>/quarantine/...                       what was found damaged, until the next start
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stager.formats.names import MANIFEST_NAME


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """A shard of a dataset on this node."""

    dataset: str
    name: str

    def __str__(self) -> str:
        return f"{self.dataset}/{self.name}"


def dataset_id(source: str, fingerprint: str) -> str:
    """16 hexadecimal digits: another source or other content is another dataset, whatever its basename."""
    return hashlib.sha256(f"{source}\n{fingerprint}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Paths below a cache's root."""

    root: str

    @property
    def lock(self) -> str:
        return f"{self.root}/lock"

    @property
    def datasets(self) -> str:
        return f"{self.root}/datasets"

    @property
    def staging(self) -> str:
        return f"{self.root}/staging"

    @property
    def shards(self) -> str:
        return f"{self.root}/shards"

    @property
    def quarantine(self) -> str:
        return f"{self.root}/quarantine"

    def dataset_directory(self, dataset: str) -> str:
        return f"{self.root}/datasets/{dataset}"

    def manifest(self, dataset: str) -> str:
        return f"{self.dataset_directory(dataset)}/{MANIFEST_NAME}"

    def source(self, dataset: str) -> str:
        return f"{self.dataset_directory(dataset)}/source"

    def verified(self, dataset: str) -> str:
        return f"{self.dataset_directory(dataset)}/verified"

    def shards_directory(self, dataset: str) -> str:
        return f"{self.root}/shards/{dataset}"

    def shard(self, key: ShardKey) -> str:
        return f"{self.shards_directory(key.dataset)}/{key.name}"

    def staged(self, key: ShardKey) -> str:
        return f"{self.staging}/{_flat(key)}"

    def quarantined(self, key: ShardKey) -> str:
        return f"{self.quarantine}/{_flat(key)}"


def _flat(key: ShardKey) -> str:
    # Shard names may have folders; staging is one folder, and the hash keeps names apart.
    return f"{key.dataset}-{hashlib.sha256(key.name.encode()).hexdigest()[:24]}"
