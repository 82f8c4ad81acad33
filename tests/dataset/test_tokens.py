"""Blocks of ids from npy and plain members, as views until the batch is made."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import webdataset

from stager import StagedDataset, StagedLoader, TokenBlocks
from stager.errors import FormatError, UsageError


def npy(array: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, numpy.asarray(array), version=version)
    return file.getvalue()


def write(folder: Path, members: list[bytes], field: str) -> Path:
    """Four samples a shard."""
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/s-%03d.tar", maxcount=4, verbose=0, encoder=False) as writer:
        for number, data in enumerate(members):
            writer.write({"__key__": f"{number:04d}", field: data})
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("field", "dtype"), [("npy", None), ("ids.npy", None), ("bin", "uint16"), ("u4", "uint32")]
)
def test_every_id_once_in_blocks(tmp_path: Path, field: str, dtype: str | None, workers: int) -> None:
    """Ten samples of 24 ids are batches of blocks of eight; over all of them every id comes once."""
    arrays = [numpy.arange(24 * number, 24 * number + 24, dtype=dtype or "int32") for number in range(10)]
    members = [npy(array) if dtype is None else array.tobytes() for array in arrays]
    source = write(tmp_path / "data", members, field)
    tokens = TokenBlocks(8, field=field, dtype=dtype, blocks=3)
    loader = StagedLoader(StagedDataset(source, batch_size=4, seed=1, tokens=tokens), num_workers=workers)
    batches = list(loader)
    assert [batch["ids"].shape for batch in batches] == [(12, 8), (12, 8), (6, 8)]
    assert batches[0]["ids"].dtype == torch.int64 and len(batches[0]["__key__"]) == 4
    rows = torch.cat([batch["ids"] for batch in batches])
    assert sorted(rows.flatten().tolist()) == list(range(240))
    assert torch.equal(rows, rows[:, :1] + torch.arange(8))


def test_blocks_are_views_of_the_member() -> None:
    """Nothing is copied until the batch: the blocks share memory with what was read, also where they overlap."""
    array = numpy.arange(17, dtype="<u2")
    data = memoryview(array.tobytes())
    blocks = TokenBlocks(5, field="bin", dtype="uint16", stride=4).decode("bin", data)
    assert blocks.tolist() == [list(range(begin, begin + 5)) for begin in (0, 4, 8, 12)]
    assert numpy.shares_memory(blocks, numpy.frombuffer(data, "u1"))
    inside = npy(array, (2, 0))
    blocks = TokenBlocks(17).decode("npy", memoryview(inside))
    assert blocks.tolist() == [list(range(17))] and numpy.shares_memory(
        blocks, numpy.frombuffer(inside, "u1")
    )


def test_ids_in_any_order_of_bytes() -> None:
    """An npy member may have its big end first, or more dimensions than one."""
    assert TokenBlocks(3).decode("npy", npy(numpy.arange(6, dtype=">i4").reshape(2, 3))).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_the_mask_is_one_of_blocks(tmp_path: Path) -> None:
    """With select, every block knows whether its sample stands in."""
    source = write(tmp_path / "data", [numpy.full(4, number, "<u2").tobytes() for number in range(4)], "bin")
    dataset = StagedDataset(
        source,
        batch_size=4,
        shuffle=False,
        tokens=TokenBlocks(2, field="bin", dtype="uint16"),
        select=lambda sample: sample["bin"][0, 0] != 1,
    )
    batch = next(iter(dataset))
    assert batch["ids"][:, 0].tolist() == [0, 0, 2, 2, 2, 2, 3, 3]
    assert batch["__mask__"].tolist() == [True, True, False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"\1\0" * 7, {"field": "bin", "dtype": "uint16"}, "7 ids are 1 blocks of 4 and 3 more"),
        (b"\1\0" * 8, {"field": "bin", "dtype": "uint16", "blocks": 3}, "2 blocks of 4 ids, not 3"),
        (b"\1\0\1", {"field": "bin", "dtype": "uint16"}, "3 bytes are no whole number of uint16"),
        (b"no array", {}, "no npy member"),
        (npy([1.0] * 4), {}, "whole numbers, not float64"),
        (npy([1] * 4)[:-8], {}, r"\(4,\) of int64 is said"),
        (npy(numpy.array([1, 2], dtype="i8"), (3, 0)), {}, "no npy member"),
    ],
)
def test_what_is_not_blocks_is_named(
    tmp_path: Path, data: bytes, options: dict[str, Any], message: str
) -> None:
    """With the shard and the sample."""
    source = write(tmp_path / "data", [data], options.get("field", "npy"))
    dataset = StagedDataset(source, batch_size=1, tokens=TokenBlocks(4, **options))
    with pytest.raises(FormatError, match=rf"s-000\.tar`: `0000\..*{message}"):
        next(iter(dataset))


def test_the_rest_is_dropped_if_asked_for() -> None:
    """And a member that is too short for a block has none."""
    tokens = TokenBlocks(4, field="bin", dtype="uint8", rest="drop")
    assert tokens.decode("bin", bytes(range(10))).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tokens.decode("bin", b"abc").shape == (0, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": 4, "stride": 5},
        {"length": 4, "stride": 0},
        {"length": 4, "blocks": 0},
        {"length": 4, "rest": "keep"},
        {"length": 4, "field": "bin"},
        {"length": 4, "field": "bin", "dtype": "float32"},
        {"length": 4, "field": "bin", "dtype": "int17"},
        {"length": 4, "dtype": "uint16"},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    """What cannot be meant is refused."""
    with pytest.raises(UsageError):
        TokenBlocks(**options)


def test_tokens_stand_alone(tmp_path: Path) -> None:
    """Beside tokens there is nothing to decode or collate."""
    source = write(tmp_path / "data", [npy([1, 2])], "npy")
    for options in ({"batch_size": 1, "decode": False}, {"batch_size": 1, "fields": ["npy"]}, {}):
        with pytest.raises(UsageError, match="tokens"):
            StagedDataset(source, tokens=TokenBlocks(2), **options)
