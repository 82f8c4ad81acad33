"""How members of a shard make samples: webdataset's rules, with what it passes over in silence made plain.

A member's key is its folder and its file name up to the *first* dot; the field is the rest, in lower case. A sample is a run
of neighbouring members with one key. Source: webdataset 1.0.2, `tariterators.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stager.errors import FormatError
from stager.formats.tar import Listing, Member

_METADATA = re.compile(r"__[^/]*__(/|$)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its key, and each field's member."""

    key: str
    fields: Mapping[str, Member]


@dataclass(frozen=True, slots=True)
class Grouping:
    """The samples of a shard, and what was left out.

    Attributes:
        samples: In the order of the shard.
        skipped: How many members were left out, by reason.
        repeated: Keys that come back after another sample: they make two samples, as in webdataset.
    """

    samples: list[Sample]
    skipped: Mapping[str, int] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()


def split_name(name: str) -> tuple[str, str] | None:
    """Key and field of a member's name, or None if webdataset makes no sample of it.

    ``a/b.seg.png`` is the field ``seg.png`` of the key ``a/b``. A name without a dot, and a hidden file, has no field.
    """
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start:
        return None
    return name[:dot], name[dot + 1 :].lower()


def is_metadata(name: str) -> bool:
    """Whether webdataset takes the member as metadata and skips it: its first component is ``__x__``."""
    return bool(_METADATA.match(name))


def group_samples(listing: Listing, *, of: str) -> Grouping:
    """Samples of a shard's members.

    Raises:
        FormatError: A sample has a field twice; names shard, member and offset.
    """
    skipped: Counter[str] = Counter(listing.skipped)
    samples: list[Sample] = []
    seen: set[str] = set()
    repeated: list[str] = []
    for key, fields in sample_runs(listing.members, skipped, of=of):
        samples.append(Sample(key, fields))
        if key in seen:
            repeated.append(key)
        seen.add(key)
    return Grouping(samples, dict(skipped), tuple(repeated))


def sample_runs(
    members: Iterable[Member], skipped: Counter[str], *, of: str
) -> Iterator[tuple[str, dict[str, Member]]]:
    """Key and fields of each run of members with one key; what is left out is counted in ``skipped`` by reason.

    Raises:
        FormatError: A sample has a field twice; names shard, member and offset.
    """
    key: str | None = None
    fields: dict[str, Member] = {}
    for member in members:
        name = member[0]
        split = split_name(name)
        if split is None or (name.startswith("__") and is_metadata(name)):
            skipped["metadata" if is_metadata(name) else "no key"] += 1
            continue
        if split[0] != key:
            if key is not None:
                yield key, fields
            key, fields = split[0], {}
        if split[1] in fields:
            raise FormatError(
                f"`{of}` at byte {member.header_offset}: `{member.name}` gives the sample `{key}` its field"
                f" `{split[1]}` a second time",
                subject=of,
                hint="fields differ in more than the case of their letters; pack again",
            )
        fields[split[1]] = member
    if key is not None:
        yield key, fields
