"""Plans: pure, exact in size, the same for the same input."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.formats.tar import END_OF_ARCHIVE
from stager.pack.plan import Limits, PlanHasher, SeededPlace, ShardPlan, cut_shards, fill_shards, sample_bytes
from stager.pack.samples import PackSample, SourceFile
from stager.pack.spill import Spill

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=60)


def make_samples(sizes: list[int]) -> list[PackSample]:
    return [
        PackSample(
            f"{number:04d}", ("txt",), (SourceFile(f"{number:04d}.txt", f"/x/{number:04d}.txt", size, 1),)
        )
        for number, size in enumerate(sizes)
    ]


def plan_shards(samples: list[PackSample], limits: Limits) -> list[ShardPlan]:
    return list(fill_shards(samples, cut_shards(map(sample_bytes, samples), limits)))


def shuffle_samples(samples: Iterable[PackSample], seed: int) -> list[PackSample]:
    spill = Spill(SeededPlace(seed))
    for sample in samples:
        spill.append(sample)
    found = list(spill)
    spill.close()
    return found


@given(SIZES, st.integers(1024, 20_000), st.none() | st.integers(1, 10))
def test_shards_hold_every_sample_once_within_their_limits(
    sizes: list[int], bytes_max: int, samples_max: int | None
) -> None:
    """Order is kept, no shard is empty, and only a lone sample may be larger than a shard."""
    samples = make_samples(sizes)
    shards = plan_shards(samples, Limits(bytes_max, samples_max))
    assert [sample for shard in shards for sample in shard.samples] == samples
    for shard in shards:
        assert shard.samples
        assert shard.size == len(END_OF_ARCHIVE) + sum(map(sample_bytes, shard.samples))
        assert shard.size <= bytes_max or len(shard.samples) == 1
        assert samples_max is None or len(shard.samples) <= samples_max
    assert [shard.name for shard in shards[:2]] == ["shard-000000.tar", "shard-000001.tar"][: len(shards)]


@given(SIZES, st.integers(0, 5))
def test_a_shuffle_is_a_permutation_of_its_seed(sizes: list[int], seed: int) -> None:
    """The same seed gives the same order whatever the order of the input; nothing is lost."""
    samples = make_samples(sizes)
    once = shuffle_samples(samples, seed)
    assert once == shuffle_samples(reversed(samples), seed)
    assert sorted(once) == sorted(samples)


def test_fingerprints_follow_the_input() -> None:
    """A changed time, size or name changes the fingerprint of its shard and no other's."""
    samples = make_samples([10] * 9)
    before = plan_shards(samples, Limits(shard_samples_max=3))
    file = samples[4].files[0]
    samples[4] = samples[4]._replace(files=(file._replace(mtime_ns=2),))
    after = plan_shards(samples, Limits(shard_samples_max=3))
    assert [one.fingerprint == two.fingerprint for one, two in zip(before, after, strict=True)] == [
        True,
        False,
        True,
    ]
    hashes = []
    for shards in (before, before, after):
        whole = PlanHasher("")
        for shard in shards:
            for sample in shard.samples:
                whole.add(sample)
        hashes.append(whole.fingerprint())
    assert hashes[0] == hashes[1] != hashes[2]


@given(SIZES, st.integers(1, 7))
def test_the_last_shards_are_alike(sizes: list[int], samples_max: int) -> None:
    """No shard is left with a few samples: the last two share what they have."""
    counts = list(cut_shards([1024] * len(sizes), Limits(1 << 30, samples_max)))
    assert sum(counts) == len(sizes) and max(counts) <= samples_max
    assert all(count == samples_max for count in counts[:-2])
    assert len(counts) < 2 or abs(counts[-1] - counts[-2]) <= 1


def test_a_shuffle_of_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted in runs on disk, the order is the one that memory gives."""
    samples = make_samples([7] * 1000)
    in_memory = shuffle_samples(samples, 3)
    monkeypatch.setattr("stager.pack.spill.MEMORY_ITEMS_MAX", 90)
    assert shuffle_samples(samples, 3) == in_memory != samples
    unsorted: Spill[PackSample] = Spill()
    for sample in samples:
        unsorted.append(sample)
    assert list(unsorted) == samples == list(unsorted)
    unsorted.close()
