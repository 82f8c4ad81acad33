"""A StagedDataset as the source of somebody's existing webdataset pipeline."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset

from stager import StagedDataset
from tests.dataset.shards import write_with_webdataset


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_webdataset(tmp_path_factory.mktemp("wds") / "data", 30, 8)


def test_stages_go_on_from_it(source: Path) -> None:
    """decode, map, select, to_tuple and batched work on it as on WebDataset itself, and give the same."""

    def stages() -> list[Any]:
        return [
            webdataset.decode(),
            webdataset.select(lambda sample: sample["cls"] % 3),
            webdataset.map_dict(cls=lambda number: 2 * number),
            webdataset.to_tuple("cls", "txt"),
            webdataset.batched(4),
        ]

    mine = webdataset.DataPipeline(StagedDataset(source, decode=False, shuffle=False), *stages())
    paths = sorted(str(path) for path in source.glob("*.tar"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files to the collector
        theirs = list(
            webdataset.DataPipeline(
                webdataset.SimpleShardList(paths), webdataset.tarfile_to_samples(), *stages()
            )
        )
        gc.collect()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(torch.as_tensor(one[0]), torch.as_tensor(other[0])) and one[1] == other[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_web_loader_every_sample_once(source: Path, workers: int) -> None:
    """Workers share the samples by themselves: no split_by_worker is needed, nothing is doubled."""
    pipeline = webdataset.DataPipeline(
        StagedDataset(source, decode=False, seed=3), webdataset.decode(), webdataset.to_tuple("cls")
    )
    loader = webdataset.WebLoader(pipeline, batch_size=None, num_workers=workers)
    first = [number for (number,) in loader]
    assert sorted(first) == list(range(30)) != first


def test_the_pipeline_resumes(source: Path) -> None:
    """Where a stage gives one for one, the dataset's state is the pipeline's."""
    dataset = StagedDataset(source, decode=False, seed=3)
    pipeline = webdataset.DataPipeline(dataset, webdataset.decode(), webdataset.to_tuple("cls"))
    whole = []
    for number, (value,) in enumerate(pipeline):
        whole.append(value)
        if number == 10:
            state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert [value for (value,) in pipeline] == whole[11:]
