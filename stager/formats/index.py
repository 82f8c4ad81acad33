"""Where each sample of a shard lies: built in one pass over its headers, asked in constant time."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass

from stager.errors import FormatError
from stager.formats.samples import sample_runs
from stager.formats.tar import Buffer, list_members


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """A field's bytes within its shard."""

    name: str
    offset: int
    size: int


class ShardIndex:
    """Samples of one shard, in flat arrays: a hundred bytes a sample or so, keys included."""

    __slots__ = ("_field_ids", "_field_names", "_keys", "_offsets", "_sizes", "_starts", "of")

    def __init__(self, of: str) -> None:
        self.of = of
        self._keys: list[str] = []
        self._starts = array("Q", [0])
        self._field_ids = array("I")
        self._field_names: list[str] = []
        self._offsets = array("Q")
        self._sizes = array("Q")

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of fields over all samples, sorted."""
        return tuple(sorted(self._field_names))

    def key(self, sample: int) -> str:
        """The key of sample number ``sample``."""
        return self._keys[self._checked(sample)]

    def places(self, sample: int) -> list[FieldPlace]:
        """The fields of sample number ``sample``, in the order of the shard."""
        first, last = self._starts[self._checked(sample)], self._starts[sample + 1]
        names = self._field_names
        return [
            FieldPlace(names[self._field_ids[place]], self._offsets[place], self._sizes[place])
            for place in range(first, last)
        ]

    def layout_digest(self) -> bytes:
        """32 bytes that change with any key, field, place or size, and not with the members' bytes."""
        whole = hashlib.sha256()
        for names in (self._keys, self._field_names):
            whole.update("\0".join(names).encode() + b"\0\0")
        for numbers in (self._starts, self._field_ids, self._offsets, self._sizes):
            whole.update(",".join(map(str, numbers)).encode() + b";")
        return whole.digest()

    def _checked(self, sample: int) -> int:
        if not 0 <= sample < len(self._keys):
            raise FormatError(
                f"`{self.of}` has {len(self._keys)} samples; number {sample} was asked for",
                subject=self.of,
                hint="the manifest does not belong to this shard: make it anew with `stager index`",
            )
        return sample


def index_shard(buffer: Buffer, *, of: str) -> ShardIndex:
    """The index of the shard in ``buffer``.

    Raises:
        FormatError: As `list_members` and `group_samples` do, or something other than zeros follows the end.
    """
    listing = list_members(buffer, of=of)
    if listing.trailing:
        raise FormatError(
            f"`{of}`: something follows the archive's end at byte {listing.end}",
            subject=of,
            hint="two tars were concatenated: samples after the first end would be lost; split them",
        )
    index = ShardIndex(of)
    ids: dict[str, int] = {}
    keys, starts, field_ids = index._keys, index._starts, index._field_ids
    offsets, sizes = index._offsets, index._sizes
    for key, fields in sample_runs(listing.members, Counter(), of=of):
        keys.append(key)
        for name, (_, _, offset, size) in fields.items():
            field = ids.get(name)
            if field is None:
                field = ids[name] = len(ids)
            field_ids.append(field)
            offsets.append(offset)
            sizes.append(size)
        starts.append(len(offsets))
    index._field_names.extend(ids)
    return index
