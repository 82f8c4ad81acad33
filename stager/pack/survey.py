"""The first pass over the input: everything is looked at and nothing is written.

It finds all problems at once, counts what there is, and fixes the fingerprint of the plan. The second pass walks again, so
that no listing of millions of files lies in memory, and must arrive at the same fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stager.errors import NotFound, UsageError
from stager.formats.names import check_relative_path
from stager.pack.findings import Findings, Policies
from stager.pack.plan import Limits, PlanHasher, ShardPlan, plan_shards, shuffle_samples
from stager.pack.samples import PackSample, SourceFile, group_files
from stager.pack.sources.directory import walk_directory


@dataclass(frozen=True, slots=True)
class PackInput:
    """What is packed, and by which rules.

    Attributes:
        sources: Absolute paths of directories. With more than one, each one's last part goes before its names.
        name: What shards are called: ``<name>-000000.tar``.
        limits: When a shard is full.
        policies: What is done with files that cannot be packed.
        seed: Fixes a shuffle of all samples; None keeps the order of the source.
    """

    sources: tuple[str, ...]
    name: str = "shard"
    limits: Limits = Limits()
    policies: Policies = Policies()
    seed: int | None = None


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
    return PackInput(roots, name, limits, policies, seed)


def walk_shards(given: PackInput, findings: Findings) -> Iterator[ShardPlan]:
    """The shards to be written, in order; what is left out is added to ``findings``."""
    samples: Iterator[PackSample] = group_files(_walk(given, findings), findings)
    if given.seed is not None:
        samples = iter(shuffle_samples(samples, given.seed))
    return plan_shards(samples, given.limits, prefix=given.name)


def survey(given: PackInput, *, seen: Callable[[int, int], None] = lambda samples, size: None) -> Survey:
    """Walk the whole input once.

    Args:
        given: What is packed.
        seen: Called now and then with what was found so far: samples, bytes of shards.

    Raises:
        UsageError: Something may not be left out by the policies, or there is no sample at all; names files.
    """
    findings = Findings(given.policies)
    whole = PlanHasher()
    samples = files = shards = size = content = 0
    largest, largest_key = 0, ""
    fields: dict[str, int] = {}
    for shard in walk_shards(given, findings):
        whole.add(shard)
        shards, size, samples = shards + 1, size + shard.size, samples + len(shard.samples)
        for sample in shard.samples:
            own = sum(file.size for file in sample.files)
            files, content = files + len(sample.files), content + own
            if own > largest or not largest_key:
                largest, largest_key = own, sample.key
            for field in sample.fields:
                fields[field] = fields.get(field, 0) + 1
        seen(samples, size)
    findings.raise_refused()
    if not samples:
        left_out = ", ".join(f"{count} {reason}" for reason, count in findings.left_out.items())
        raise UsageError(
            f"there is no sample in {', '.join(f'`{root}`' for root in given.sources)}"
            + (f" (left out: {left_out})" if left_out else ""),
            subject=given.sources[0],
            hint="a sample is made of files called `key.field`, e.g. `001.jpg` and `001.json`",
        )
    return Survey(
        samples, files, shards, size, content, (largest_key, largest), dict(sorted(fields.items())),
        whole.fingerprint(), findings,
    )  # fmt: skip


def _walk(given: PackInput, findings: Findings) -> Iterator[SourceFile]:
    for root in given.sources:
        prefix = f"{os.path.basename(root)}/" if len(given.sources) > 1 else ""
        yield from walk_directory(root, findings, prefix=prefix)
