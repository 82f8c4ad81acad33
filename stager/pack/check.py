"""One shard read from a store from end to end: its digests and what readers will find in it, in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stager.checksum import Hasher
from stager.errors import FormatError
from stager.formats.digests import Digest
from stager.formats.samples import group_samples
from stager.formats.tar import Listing
from stager.formats.tar_stream import StreamLister
from stager.offload import Offload
from stager.store.api import ObjectStore

READ_BYTES = 4 << 20
EXAMPLES_MAX = 3


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a shard is.

    Attributes:
        size: Bytes.
        digest: Of all of them.
        samples: How many readers will find; 0 if it is damaged.
        fields: How many samples have each field.
        damage: Why it cannot be read, or empty.
        notes: What readers will pass over or may stumble over.
    """

    size: int
    digest: Digest
    samples: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    damage: str = ""
    notes: tuple[str, ...] = ()


async def read_shard(
    store: ObjectStore, key: str, *, offload: Offload, seen: Callable[[int], None] = lambda size: None
) -> ShardFacts:
    """Read and judge one shard.

    Args:
        store: Where it lies.
        key: Its name there.
        offload: Where hashing runs.
        seen: Called with the bytes of every piece.

    Raises:
        StoreError: It is not there, or cannot be read. Damage is no exception, but part of the answer.
    """
    async with store.get(key) as reader:
        check = _Check(key, reader.info.size)
        while piece := await reader.read(READ_BYTES):
            await offload.run("hash", check.feed, piece)
            seen(len(piece))
    return await offload.run("hash", check.finish)


class _Check:
    def __init__(self, key: str, size: int) -> None:
        self._key = key
        self._size = size
        self._hasher = Hasher()
        self._lister = StreamLister(size, of=key)
        self._damage = ""

    def feed(self, piece: bytes) -> None:
        self._hasher.update(piece)
        if not self._damage:
            try:
                self._lister.feed(piece)
            except FormatError as error:
                self._damage = error.message

    def finish(self) -> ShardFacts:
        size, digest = self._hasher.size, self._hasher.digest()
        if self._damage:
            return ShardFacts(size, digest, damage=self._damage)
        try:
            listing = self._lister.finish()
            if listing.trailing:
                raise FormatError(f"`{self._key}`: something follows the archive's end at byte {listing.end}")
            return self._judged(size, digest, listing)
        except FormatError as error:
            return ShardFacts(size, digest, damage=error.message)

    def _judged(self, size: int, digest: Digest, listing: Listing) -> ShardFacts:
        grouping = group_samples(listing, of=self._key)
        fields: Counter[str] = Counter()
        for sample in grouping.samples:
            fields.update(sample.fields.keys())
        notes = [f"{count} × {reason}: readers skip it" for reason, count in sorted(grouping.skipped.items())]
        if grouping.repeated:
            shown = ", ".join(f"`{key}`" for key in grouping.repeated[:EXAMPLES_MAX])
            notes.append(
                f"{len(grouping.repeated)} keys come back after another sample and make two, e.g. {shown}"
            )
        return ShardFacts(
            size, digest, len(grouping.samples), dict(sorted(fields.items())), notes=tuple(notes)
        )
