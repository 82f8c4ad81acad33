"""The first pass over the input: everything is looked at and nothing is written.

It finds all problems at once, counts what there is, cuts it into shards, and fixes the fingerprint of the plan. The
listing it leaves is what gets packed; a long one lies in a temporary file.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stager.errors import NotFound, UsageError
from stager.formats.names import check_relative_path
from stager.formats.tar import END_OF_ARCHIVE
from stager.pack.findings import Findings, Policies
from stager.pack.plan import (
    Limits,
    PlanHasher,
    SeededPlace,
    ShardPlan,
    cut_shards,
    fill_shards,
    sample_bytes,
)
from stager.pack.samples import PackSample, SourceFile, group_files
from stager.pack.sources.api import Source
from stager.pack.sources.directory import DirectorySource
from stager.pack.spill import Spill

SEEN_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class PackInput:
    """What is packed, and by which rules.

    Attributes:
        sources: Where files come from, one after another.
        name: What shards are called: ``<name>-000000.tar``.
        limits: When a shard is full.
        policies: What is done with files that cannot be packed.
        seed: Fixes a shuffle of all samples; None keeps the order of the source.
    """

    sources: tuple[Source, ...]
    name: str = "shard"
    limits: Limits = Limits()
    policies: Policies = Policies()
    seed: int | None = None

    @property
    def options(self) -> str:
        """What decides the bytes besides the samples and their order."""
        return f"{self.name} {self.limits.shard_bytes_max} {self.limits.shard_samples_max}"


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is to be packed.

    Attributes:
        samples: How many.
        files: How many.
        shards: How many.
        size: Bytes of all shards.
        content_bytes: Bytes of all files.
        largest: The key of the sample that has most bytes, and their number.
        fields: How many samples have each field.
        fingerprint: Of the whole plan.
        findings: What was left out, and why.
        listing: The samples, in the order they are packed in.
        counts: How many of them go into each shard.
    """

    samples: int
    files: int
    shards: int
    size: int
    content_bytes: int
    largest: tuple[str, int]
    fields: dict[str, int]
    fingerprint: str
    findings: Findings
    listing: Spill[PackSample]
    counts: array[int]

    def plans(self, name: str) -> Iterator[ShardPlan]:
        """The shards to be written, in order."""
        return fill_shards(self.listing, self.counts, prefix=name)


def take_input(
    sources: Sequence[str],
    destination: str | None,
    *,
    name: str = "shard",
    limits: Limits = Limits(),
    policies: Policies = Policies(),
    seed: int | None = None,
) -> PackInput:
    """The input, checked as far as it can be without a walk.

    Args:
        sources: Paths of directories.
        destination: The local directory that is packed to, or None.
        name, limits, policies, seed: As in `PackInput`.

    Raises:
        NotFound: A source is not there.
        UsageError: A source is no directory, two have one name, the destination lies in a source, or a limit is too low.
    """
    roots = tuple(os.path.abspath(source) for source in sources)
    if not roots:
        raise UsageError("no source was named")
    for root in roots:
        if not os.path.exists(root):
            raise NotFound(f"there is no directory `{root}` to pack", subject=root)
        if not os.path.isdir(root):
            raise UsageError(
                f"`{root}` is not a directory", subject=root, hint="name the directory that holds it"
            )
    names = [os.path.basename(root) for root in roots]
    if len(roots) > 1 and not all(names):
        raise UsageError("`/` cannot be packed together with other sources", subject="/")
    for doubled in (each for each in names if names.count(each) > 1):
        raise UsageError(
            f"two sources are called `{doubled}`",
            subject=doubled,
            hint="with several sources each one's name goes before its keys, so they must differ",
        )
    if destination is not None:
        target = os.path.realpath(destination)
        if os.path.exists(target) and not os.path.isdir(target):
            raise UsageError(f"`{destination}` is not a directory", subject=destination)
        for root in roots:
            if os.path.commonpath((os.path.realpath(root), target)) == os.path.realpath(root):
                raise UsageError(
                    f"`{destination}` lies in the source `{root}`: shards would be packed into shards",
                    subject=destination,
                    hint="name a destination outside",
                )
    if check_relative_path(name, of="--name") and "/" in name:
        raise UsageError(f"`{name}` cannot name shards", subject=name, hint="leave out the `/`")
    if limits.shard_bytes_max < 1 << 10 or (
        limits.shard_samples_max is not None and limits.shard_samples_max < 1
    ):
        raise UsageError(
            "a shard takes at least one sample and 1024 bytes", hint="raise --max-bytes or --max-samples"
        )
    prefixes = [f"{each}/" if len(roots) > 1 else "" for each in names]
    found = tuple(DirectorySource(root, prefix) for root, prefix in zip(roots, prefixes, strict=True))
    return PackInput(found, name, limits, policies, seed)


def survey(given: PackInput, *, seen: Callable[[int, int], None] = lambda samples, size: None) -> Survey:
    """Go through the whole input once.

    Args:
        given: What is packed.
        seen: Called now and then with what was found so far: samples, bytes of shards.

    Raises:
        UsageError: Something may not be left out by the policies, or there is no sample at all; names files.
    """
    findings = Findings(given.policies)
    listing: Spill[PackSample] = Spill(None if given.seed is None else SeededPlace(given.seed))
    tally = _Tally()
    for sample in group_files(_files(given, findings), findings):
        listing.append(sample)
        tally.add(sample)
        if not tally.samples % SEEN_SAMPLES:
            seen(tally.samples, tally.size)
    findings.raise_refused()
    if not tally.samples:
        left_out = ", ".join(f"{count} {reason}" for reason, count in findings.left_out.items())
        raise UsageError(
            f"there is no sample in {', '.join(f'`{source.name}`' for source in given.sources)}"
            + (f" (left out: {left_out})" if left_out else ""),
            subject=given.sources[0].name,
            hint="a sample is made of files called `key.field`, e.g. `001.jpg` and `001.json`",
        )
    whole = PlanHasher(given.options)
    sizes = _sizes(listing, whole)
    counts = array("q", cut_shards(sizes, given.limits))
    return Survey(
        samples=tally.samples,
        files=tally.files,
        shards=len(counts),
        size=tally.size + len(counts) * len(END_OF_ARCHIVE),
        content_bytes=tally.content_bytes,
        largest=(tally.largest_key, tally.largest),
        fields=tally.fields(),
        fingerprint=whole.fingerprint(),
        findings=findings,
        listing=listing,
        counts=counts,
    )


class _Tally:
    """Sums over samples."""

    def __init__(self) -> None:
        self.samples = self.files = self.size = self.content_bytes = self.largest = 0
        self.largest_key = ""
        self._field_sets: Counter[tuple[str, ...]] = Counter()

    def add(self, sample: PackSample) -> None:
        files = sample[2]
        content = 0
        for file in files:
            content += file[2]
        self.samples += 1
        self.files += len(files)
        self.content_bytes += content
        self.size += sample_bytes(sample)
        self._field_sets[sample[1]] += 1
        if content > self.largest or not self.largest_key:
            self.largest, self.largest_key = content, sample[0]

    def fields(self) -> dict[str, int]:
        """How many samples have each field."""
        found: Counter[str] = Counter()
        for names, count in self._field_sets.items():
            for name in names:
                found[name] += count
        return dict(sorted(found.items()))


def _sizes(samples: Iterable[PackSample], whole: PlanHasher) -> Iterator[int]:
    for sample in samples:
        whole.add(sample)
        yield sample_bytes(sample)


def _files(given: PackInput, findings: Findings) -> Iterator[SourceFile]:
    for source in given.sources:
        yield from source.files(findings)
