"""Exact resume with everything at once: a mix, a shuffle and a filter, at every batch, on other ranks and workers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from stager import StagedDataset, StagedLoader, commit, read_commit
from tests.dataset.shards import write_with_manifest

GLOBAL_BATCH = 8
# (world size, DataLoader workers of each rank)
SETUPS = [(1, 0), (1, 3), (2, 1), (4, 2), (8, 0)]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")

Rank = list[list[bytes]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, float]]:
    """Two datasets of 23 and 18 samples."""
    folder = tmp_path_factory.mktemp("resume")
    return [
        (write_with_manifest(folder / "first", [7, 0, 9, 7]), 0.6),
        (write_with_manifest(folder / "second", [10, 8]), 0.4),
    ]


def keep(sample: dict[str, Any]) -> bool:
    return sample["cls"][-1] not in b"36"


def loader(
    sources: list[tuple[Path, float]], rank: int, world: int, workers: int, state: str | None = None
) -> StagedLoader:
    dataset = StagedDataset(
        sources,
        global_batch_size=GLOBAL_BATCH,
        lanes=2,
        window=2,
        seed=11,
        epoch_samples=44,
        decode=False,
        select=keep,
        rank=rank,
        world_size=world,
    )
    made = StagedLoader(dataset, num_workers=workers, timeout=60 if workers else 0)
    if state is not None:
        made.load_state_dict(json.loads(state))
    return made


def rows(batch: dict[str, Any]) -> list[bytes]:
    """Every sample of a batch as bytes: whether it stands in, key, URL and all fields."""
    columns = (batch["__mask__"].tolist(), batch["__key__"], batch["__url__"], batch["cls"], batch["txt"])
    return [repr(row).encode() for row in zip(*columns, strict=True)]


def real(ranks: list[Rank]) -> list[bytes]:
    """The samples of all global batches that stand at their own places, in order."""
    return [
        row for step in zip(*ranks, strict=True) for part in step for row in part if row.startswith(b"(True")
    ]


@pytest.mark.parametrize("setup", range(len(SETUPS)))
def test_resume_at_every_batch_on_the_same_and_on_another_setup(
    sources: list[tuple[Path, float]], setup: int
) -> None:
    """From the state after any batch: the same ranks get the same bytes, other ranks the same global batches of them."""
    world, workers = SETUPS[setup]
    other_world, other_workers = SETUPS[(setup + 1) % len(SETUPS)]
    whole, states = [], [[] for _ in range(world)]
    for rank in range(world):
        mine = loader(sources, rank, world, workers)
        states[rank].append(json.dumps(mine.state_dict()))
        batches = []
        for batch in mine:
            batches.append(rows(batch))
            states[rank].append(json.dumps(mine.state_dict()))
        whole.append(batches)
    assert all(ranks == states[0] for ranks in states) and max(map(len, states[0])) < 1024
    assert len({len(batches) for batches in whole}) == 1
    assert all(len({len(part) for part in step}) == 1 for step in zip(*whole, strict=True))
    expected = [rows(batch) for batch in loader(sources, 0, 1, 0)]
    assert real(whole) == real([expected])
    for done, state in enumerate(states[0]):
        same = [
            [rows(batch) for batch in loader(sources, rank, world, workers if done % 3 == 0 else 0, state)]
            for rank in range(world)
        ]
        if done < len(expected):
            assert same == [batches[done:] for batches in whole]
            other = [
                [
                    rows(batch)
                    for batch in loader(sources, rank, other_world, other_workers if done % 3 else 0, state)
                ]
                for rank in range(other_world)
            ]
            assert real(other) == real([expected[done:]])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_takes_and_gives_the_place(sources: list[tuple[Path, float]], workers: int) -> None:
    """StatefulDataLoader resumes at every batch, its own state through JSON where it has no workers."""

    def stateful() -> StatefulDataLoader[Any]:
        dataset = StagedDataset(
            sources, batch_size=4, window=2, seed=11, epoch_samples=26, decode=False, select=keep
        )
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    mine = stateful()
    whole, states = [], []
    for batch in mine:
        whole.append(rows(batch))
        states.append(mine.state_dict())
    assert len(whole) == 7
    for done, state in enumerate(states[:-1], start=1):
        resumed = stateful()
        resumed.load_state_dict(json.loads(json.dumps(state)) if workers == 0 else state)
        assert [rows(batch) for batch in resumed] == whole[done:]


def test_a_checkpoint_hands_the_place_back(sources: list[tuple[Path, float]], tmp_path: Path) -> None:
    """What commit() writes beside a checkpoint is what load_state_dict takes, weights that changed included."""
    mine = loader(sources, 0, 1, 0)
    seen = []
    for batch in mine:
        seen.append(rows(batch))
        if len(seen) == 2:
            mine.set_weights([1, 2])
            (tmp_path / "step-2").mkdir()
            commit(tmp_path / "step-2", step=2, loader=mine)
    marker = read_commit(tmp_path / "step-2")
    assert marker is not None and marker.cursor is not None
    resumed = loader(sources, 0, 1, 2, json.dumps(dict(marker.cursor)))
    assert [rows(batch) for batch in resumed] == seen[2:]


def test_persistent_workers_take_lanes_and_weights_of_a_loaded_state(
    sources: list[tuple[Path, float]],
) -> None:
    """They hold a dataset of their own, made with other lanes; what the state says holds all the same."""

    def dataset(lanes: int | None) -> StagedDataset:
        return StagedDataset(sources, batch_size=4, seed=3, lanes=lanes, epoch_samples=24)

    origin = StagedLoader(dataset(2))
    batches, state = [], {}
    for batch in origin:
        batches.append(batch["__key__"])
        if len(batches) == 3:
            origin.set_weights([0, 1])
            state = origin.state_dict()
    persistent = StagedLoader(dataset(None), num_workers=2, persistent_workers=True, timeout=60)
    assert [batch["__key__"] for batch in persistent] != batches
    persistent.load_state_dict(state)
    assert [batch["__key__"] for batch in persistent] == batches[3:]


def test_leaving_out(tmp_path: Path) -> None:
    """The next kept sample of the batch stands in; a batch with none takes one from further on; none at all is told."""
    source = write_with_manifest(tmp_path / "data", [12])

    def numbers(select: Any, **options: Any) -> list[tuple[list[int], list[bool]]]:
        dataset = StagedDataset(source, shuffle=False, select=select, **options)
        return [(batch["cls"].tolist(), batch["__mask__"].tolist()) for batch in dataset]

    assert numbers(lambda sample: sample["cls"] in (1, 2, 9, 11), batch_size=4) == [
        ([1, 1, 2, 1], [False, True, True, False]),
        ([9, 9, 9, 9], [False] * 4),
        ([9, 9, 11, 11], [False, True, False, True]),
    ]
    last = numbers(lambda sample: sample["cls"] == 0, batch_size=6)[1]
    assert last == ([0] * 6, [False] * 6)
    with pytest.raises(Exception, match="select leaves out every sample"):
        numbers(lambda sample: False, batch_size=4)
    with pytest.raises(KeyError) as caught:
        numbers(lambda sample: sample["none"], batch_size=4)
    assert any("stager: in select, of sample" in note for note in caught.value.__notes__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        singles = StagedDataset(source, shuffle=False, select=lambda sample: sample["cls"] % 2)
        assert [sample["__mask__"] for sample in singles] == [False, True] * 6
    mapped = StagedDataset(
        source,
        batch_size=3,
        shuffle=False,
        select=lambda sample: sample["cls"] % 3,
        map=lambda sample: sample["cls"],
    )
    assert next(iter(mapped)) == [1, 1, 2]
