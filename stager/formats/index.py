"""Where each sample of a shard lies: built in one pass over its headers, asked in constant time."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from stager.errors import FormatError
from stager.formats.samples import sample_runs
from stager.formats.tar import Buffer, Listing, list_members


class FieldPlace(NamedTuple):
    """A field's bytes within its shard."""

    name: str
    offset: int
    size: int


class ShardIndex:
    """Samples of one shard, in flat arrays: a hundred bytes a sample or so, keys included.

    Attributes:
        of: The shard's name, for messages.
        keys: The samples' keys.
        starts: Sample i has the places ``starts[i]`` to ``starts[i + 1]`` of the three arrays that follow.
        field_ids: Each place's field, a number in ``field_names``.
        offsets: Where each place's bytes begin in the shard.
        sizes: How many there are.
        field_names: Names of fields, in the order in which they were met.
    """

    __slots__ = ("field_ids", "field_names", "keys", "of", "offsets", "sizes", "starts")

    def __init__(
        self,
        of: str,
        keys: Iterable[str] = (),
        starts: Iterable[int] = (0,),
        field_ids: Iterable[int] = (),
        offsets: Iterable[int] = (),
        sizes: Iterable[int] = (),
        field_names: Iterable[str] = (),
    ) -> None:
        self.of = of
        self.keys = list(keys)
        self.starts = array("Q", starts)
        self.field_ids = array("I", field_ids)
        self.offsets = array("Q", offsets)
        self.sizes = array("Q", sizes)
        self.field_names = list(field_names)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of fields over all samples, sorted."""
        return tuple(sorted(self.field_names))

    @property
    def memory_bytes(self) -> int:
        """About what it takes up in memory."""
        return 20 * len(self.offsets) + 110 * len(self.keys)

    def key(self, sample: int) -> str:
        """The key of sample number ``sample``."""
        return self.keys[self.check(sample)]

    def places(self, sample: int) -> list[FieldPlace]:
        """The fields of sample number ``sample``, in the order of the shard."""
        first, last = self.starts[self.check(sample)], self.starts[sample + 1]
        names = self.field_names
        return [
            FieldPlace(names[self.field_ids[place]], self.offsets[place], self.sizes[place])
            for place in range(first, last)
        ]

    def check(self, sample: int) -> int:
        """``sample``, if there is one of that number; FormatError otherwise."""
        if not 0 <= sample < len(self.keys):
            raise FormatError(
                f"`{self.of}` has {len(self.keys)} samples; number {sample} was asked for",
                subject=self.of,
                hint="the manifest does not belong to this shard: make it anew with `stager index`",
            )
        return sample

    def layout_digest(self) -> bytes:
        """32 bytes that change with any key, field, place or size, and not with the members' bytes."""
        whole = hashlib.sha256()
        for names in (self.keys, self.field_names):
            whole.update("\0".join(names).encode() + b"\0\0")
        for numbers in (self.starts, self.field_ids, self.offsets, self.sizes):
            whole.update(",".join(map(str, numbers)).encode() + b";")
        return whole.digest()


def index_shard(buffer: Buffer, *, of: str) -> ShardIndex:
    """The index of the shard in ``buffer``.

    Raises:
        FormatError: As `list_members` and `group_samples` do, or something other than zeros follows the end.
    """
    return index_listing(list_members(buffer, of=of), of=of)


def index_listing(listing: Listing, *, of: str) -> ShardIndex:
    """The index of a shard whose members were listed; raises as `index_shard`."""
    if listing.trailing:
        raise FormatError(
            f"`{of}`: something follows the archive's end at byte {listing.end}",
            subject=of,
            hint="two tars were concatenated: samples after the first end would be lost; split them",
        )
    index = ShardIndex(of)
    ids: dict[str, int] = {}
    keys, starts, field_ids = index.keys, index.starts, index.field_ids
    offsets, sizes = index.offsets, index.sizes
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
    index.field_names.extend(ids)
    return index
