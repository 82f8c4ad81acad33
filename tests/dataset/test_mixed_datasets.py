"""Mixing through the dataset: shares, workers and ranks, resume, and weights that change in a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stager import StagedDataset, StagedLoader
from stager.errors import UsageError
from tests.dataset.daemon import ThreadDaemon
from tests.dataset.shards import write_with_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_manifest(tmp_path_factory.mktemp("mixed") / "text", [7, 5, 0, 9])


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_manifest(tmp_path_factory.mktemp("mixed") / "code", [6, 4])


def urls(items: Iterator[Any] | StagedLoader | StagedDataset) -> list[list[str]]:
    """What identifies each sample of each batch, over sources."""
    return [_urls(batch) for batch in items]


def _urls(batch: dict[str, Any]) -> list[str]:
    return [f"{url}:{key}" for url, key in zip(batch["__url__"], batch["__key__"], strict=True)]


def share(batches: list[list[str]], source: Path) -> float:
    every = [url for batch in batches for url in batch]
    return sum(url.startswith(f"{source}/") for url in every) / len(every)


def iterator_at(dataset: StagedDataset, state: dict[str, Any]) -> Iterator[Any]:
    dataset.load_state_dict(state)
    return iter(dataset)


def mix(text: Path, code: Path, **options: Any) -> StagedDataset:
    return StagedDataset([(text, 0.75), (code, 0.25)], batch_size=4, seed=7, window=2, **options)


def test_an_epoch_has_the_shares_and_the_samples_of_all(text: Path, code: Path) -> None:
    """Every batch of four has three of one and one of the other; sources are read on over epochs."""
    dataset = mix(text, code)
    assert dataset.samples == 31 and len(dataset) == 8
    epochs = [urls(dataset) for _ in range(4)]
    assert all(len(batch) == 4 for epoch in epochs for batch in epoch[:-1])
    for epoch in epochs:
        for batch in epoch[:-1]:
            assert sum(url.startswith(f"{code}/") for url in batch) == 1
    read = [url for epoch in epochs for batch in epoch for url in batch if url.startswith(f"{code}/")]
    for pass_ in range(len(read) // 10):
        assert len(set(read[10 * pass_ : 10 * pass_ + 10])) == 10
    dataset.set_epoch(1)
    assert urls(dataset) == epochs[1]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_ranks_do_not_change_the_stream(text: Path, code: Path, workers: int) -> None:
    """The same global batches from loaders of any size, and from two ranks together."""
    plain = mix(text, code, epoch_samples=40)
    expected = [urls(plain) for _ in range(2)]
    for loader in (
        StagedLoader(mix(text, code, epoch_samples=40), num_workers=workers),
        DataLoader(mix(text, code, epoch_samples=40), num_workers=workers),
    ):
        assert [urls(loader) for _ in range(2)] == expected
    ranks = [
        urls(
            StagedDataset(
                [(text, 3), (code, 1)],
                global_batch_size=4,
                seed=7,
                window=2,
                epoch_samples=40,
                rank=rank,
                world_size=2,
            )
        )
        for rank in range(2)
    ]
    assert [left + right for left, right in zip(*ranks, strict=True)] == expected[0]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_weights_change_at_the_next_batch_and_on_resume(
    text: Path, code: Path, options: dict[str, Any]
) -> None:
    """In the middle of an epoch, with workers that have prefetched; every state before and after resumes exactly."""
    loader = StagedLoader(mix(text, code, epoch_samples=64), **options)
    seen, states = [], [json.dumps(loader.state_dict())]
    for batch in loader:
        seen.append(_urls(batch))
        if len(seen) == 6:
            loader.set_weights([1, 3])
        states.append(json.dumps(loader.state_dict()))
    assert len(seen) == len(loader) == 16
    assert share(seen[:6], text) == 0.75 and share(seen[6:], text) == 0.25
    following = urls(loader)
    assert share(following, text) == 0.25
    for done in (5, 6, 7, 12, 16):
        resumed = StagedLoader(mix(text, code, epoch_samples=64), **options)
        resumed.load_state_dict(json.loads(states[done]))
        rest = urls(resumed)
        if done >= 6:
            assert rest == seen[done:]
            assert urls(resumed) == following
        else:
            assert rest[0] == seen[5] and share(rest, text) == 0.75


def test_weights_change_without_a_loader_too(text: Path, code: Path) -> None:
    """The dataset itself goes on with the new weights; a plain DataLoader's workers cannot, and say so."""
    dataset = mix(text, code, epoch_samples=64)
    seen = []
    for batch in dataset:
        seen.append(_urls(batch))
        if len(seen) == 8:
            dataset.set_weights([0, 1])
    assert len(seen) == 16
    assert share(seen[:8], text) == 0.75 and share(seen[8:], text) == 0
    dataset = mix(text, code)
    next(iter(DataLoader(dataset, num_workers=1)))
    with pytest.raises(UsageError, match="known to the DataLoader's workers"):
        dataset.set_weights([1, 1])
    with pytest.raises(UsageError, match="set_weights is for a mix"):
        StagedDataset(text).set_weights([1])


def test_a_script_with_other_weights_is_told(text: Path, code: Path) -> None:
    """The state's weights win nowhere in silence; those it began with, or has now, are accepted."""
    dataset = mix(text, code)
    iterator = iter(dataset)
    next(iterator)
    dataset.set_weights([1, 1])
    state = dataset.state_dict()
    for weights in (0.75, 0.25), (2, 2):
        pairs = list(zip((text, code), weights, strict=True))
        resumed = StagedDataset(pairs, batch_size=4, seed=7, window=2)
        resumed.load_state_dict(state)
        copied = copy.deepcopy(resumed)
        assert urls(resumed) == urls(copied) == urls(iterator_at(mix(text, code), state))
    other = StagedDataset([(text, 2), (code, 1)], batch_size=4, seed=7, window=2)
    with pytest.raises(UsageError, match=r"weights 1:1 \(not 2:1\)"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="only one of the two is a mix"):
        StagedDataset(text, batch_size=4, seed=7, window=2).load_state_dict(state)


def test_one_source_may_come_twice(text: Path) -> None:
    """Two entries of one dataset are two streams with orders of their own."""
    dataset = StagedDataset([(text, 1), (text, 1)], shuffle=True)
    keys = [sample["__key__"] for sample in dataset]
    assert len(keys) == 42
    assert keys[::2] != keys[1::2]
    assert sorted(keys) == sorted([*keys[::2], *keys[::2]])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "no sources"),
        ([("TEXT", 1, 2)], {}, "list of"),
        (["TEXT"], {}, "list of"),
        ([("TEXT", -1)], {}, "number from 0 up"),
        ([("TEXT", 0)], {}, "every weight is 0"),
        ([("TEXT", 1)], {"epoch_samples": 0}, "epoch_samples must be"),
        ([("TEXT", 1), ("CODE", 1)], {"lanes": 12, "batch_size": 12}, "source 1 of the mix has 10 samples"),
        ([("TEXT", 1)], {"fields": ["jpg"]}, "no field"),
        ("TEXT", {"epoch_samples": 5}, "length of a mix"),
    ],
)
def test_what_cannot_be_mixed_is_refused_at_once(
    text: Path, code: Path, source: Any, options: dict[str, Any], message: str
) -> None:
    """With the reason."""
    names = {"TEXT": text, "CODE": code}
    if isinstance(source, str):
        source = names[source]
    else:
        source = [(names[pair[0]], *pair[1:]) if isinstance(pair, tuple) else names[pair] for pair in source]
    with pytest.raises(UsageError, match=message):
        StagedDataset(source, **options)


def test_every_source_is_announced_and_asked_for(text: Path, code: Path, tmp_path: Path) -> None:
    """Through a daemon, a rank is a reader of each source, at its own place and pace; misses go to the right one."""
    with (
        ThreadDaemon(tmp_path / "a", text, tmp_path / "cache-a") as first,
        ThreadDaemon(tmp_path / "b", code, tmp_path / "cache-b") as second,
    ):
        direct = mix(text, code)
        opened = [
            StagedDataset(f"s3://bucket/{name}", socket=str(tmp_path / socket))._source
            for name, socket in (("text", "a"), ("code", "b"))
        ]
        staged = mix(text, code)
        object.__setattr__(staged._source, "sources", tuple(opened))
        assert [batch["__key__"] for batch in staged] == [batch["__key__"] for batch in direct]
        for daemon, number, pace in ((first, 0, 4 / 3), (second, 1, 4.0)):
            announced = [request for path, request in daemon.calls if path == "/v1/announce"]
            assert announced[0].reader.endswith(f"/{number}")
            assert announced[0].order["pace"] == pace and announced[0].position == 0
            assert set(daemon.wanted()) == {path.name for path in daemon.cache.iterdir()}
