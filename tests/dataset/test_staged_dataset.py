"""The dataset read in place: samples, order, resume, ranks, workers, and what it refuses."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader

from stager import StagedDataset, StagedLoader
from stager.dataset import Batch
from stager.errors import FormatError, NotFound, UsageError
from tests.dataset.shards import key_of, write_with_manifest, write_with_webdataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 samples in five shards, one of them empty, with a manifest."""
    return write_with_manifest(tmp_path_factory.mktemp("data"), [7, 0, 9, 3, 10])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples in four shards of webdataset.ShardWriter, without a manifest."""
    return write_with_webdataset(tmp_path_factory.mktemp("written"), 30, 8)


def keys(items: Iterator[Any]) -> list[list[str]]:
    return [batch["__key__"] for batch in items]


def test_samples_are_dicts_as_webdataset_gives_them(written: Path) -> None:
    """Keys and bytes of shards that ShardWriter wrote equal what webdataset itself reads."""
    mine = list(StagedDataset(written, shuffle=False, decode=False))
    paths = sorted(str(path) for path in written.glob("*.tar"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files to the collector
        theirs = list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False))
        gc.collect()
    strip = [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in theirs]
    assert mine == strip


def test_decoded_by_field(written: Path) -> None:
    """decode=True gives the values of webdataset's basic handlers."""
    sample = next(iter(StagedDataset(written, shuffle=False)))
    assert sample["__key__"] == key_of(0)
    assert sample["__url__"].endswith("shard-000000.tar")
    assert (sample["txt"], sample["cls"], sample["bin"]) == ("text 0", 0, bytes(9))


def test_every_sample_once_in_another_order_each_epoch(shards: Path) -> None:
    """An epoch is a permutation; finishing it begins the next one; set_epoch goes back."""
    dataset = StagedDataset(shards, seed=7)
    epochs = [[sample["cls"] for sample in dataset] for _ in range(3)]
    assert all(sorted(epoch) == list(range(29)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    dataset.set_epoch(1)
    assert [sample["cls"] for sample in dataset] == epochs[1]
    assert dataset.epoch == 2


def test_without_a_manifest_too(written: Path) -> None:
    """A scanned directory is shuffled, counted and fingerprinted alike each time."""
    dataset = StagedDataset(written)
    assert sorted(sample["cls"] for sample in dataset) == list(range(30))
    assert dataset.samples == len(dataset) == 30
    assert dataset.fingerprint == StagedDataset(written).fingerprint


def test_a_batch_is_a_dict_of_columns(shards: Path) -> None:
    """Numbers stack to a tensor, text stays a list; the last batch is short."""
    batches = list(StagedDataset(shards, batch_size=8, shuffle=False))
    assert [len(batch["__key__"]) for batch in batches] == [8, 8, 8, 5]
    assert isinstance(batches[0], Batch)
    assert torch.equal(batches[0]["cls"], torch.arange(8))
    assert batches[0]["txt"] == [f"text {number}" for number in range(8)]
    assert len(StagedDataset(shards, batch_size=8)) == 4
    assert len(StagedDataset(shards, batch_size=8, drop_last=True)) == 3
    assert len(list(StagedDataset(shards, batch_size=8, drop_last=True))) == 3


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_resume_at_every_batch(shards: Path, workers: int) -> None:
    """The state after any batch, through JSON, gives exactly the remaining batches in a new loader and the next epoch."""

    def loader(num_workers: int) -> StagedLoader:
        return StagedLoader(StagedDataset(shards, batch_size=4, seed=7, window=2), num_workers=num_workers)

    first = loader(workers)
    whole, states = [], [json.dumps(first.state_dict())]
    for batch in first:
        whole.append(batch["__key__"])
        states.append(json.dumps(first.state_dict()))
    following = keys(iter(loader_at(loader(0), first.state_dict())))
    assert len(whole) == len(first) == 8
    assert max(map(len, states)) < 1024
    for done, state in enumerate(states):
        resumed = loader_at(loader(workers), json.loads(state))
        assert keys(iter(resumed)) == whole[done:]
        if done in (3, 8):
            assert keys(iter(resumed)) == following


def loader_at(loader: StagedLoader, state: dict[str, Any]) -> StagedLoader:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_stream(shards: Path, workers: int) -> None:
    """The same batches from the dataset itself, a StagedLoader and both forms of a plain DataLoader, over two epochs."""

    def dataset() -> StagedDataset:
        return StagedDataset(shards, batch_size=5, seed=3)

    plain = dataset()
    expected = [keys(iter(plain)) for _ in range(2)]
    loader = StagedLoader(dataset(), num_workers=workers)
    assert [keys(iter(loader)) for _ in range(2)] == expected
    for options in ({}, {"batch_size": None}):
        unchanged = DataLoader(dataset(), num_workers=workers, **options)
        assert [keys(iter(unchanged)) for _ in range(2)] == expected
        assert len(unchanged) == len(expected[0])


def test_loaders_of_different_sizes_agree_within_themselves(shards: Path) -> None:
    """Plain DataLoaders that take turns over one dataset each see whole epochs, whatever the others did."""
    dataset = StagedDataset(shards, batch_size=4)
    loaders = [DataLoader(dataset, num_workers=workers) for workers in (1, 2, 3, 2, 1)]
    for loader in loaders * 2:
        assert sorted(key for batch in keys(iter(loader)) for key in batch) == sorted(map(key_of, range(29)))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_follow_the_trainer(shards: Path, context: str) -> None:
    """Workers that live on hear of set_epoch and of a loaded state, however they were started."""
    expected = StagedDataset(shards, batch_size=4, seed=5)
    epochs = [keys(iter(expected)) for _ in range(4)]
    loader = StagedLoader(
        StagedDataset(shards, batch_size=4, seed=5),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
        timeout=60,
    )
    assert keys(iter(loader)) == epochs[0]
    loader.set_epoch(3)
    states = []
    for batch in loader:
        states.append(loader.state_dict())
        assert batch["__key__"] == epochs[3][len(states) - 1]
        if len(states) == 2:
            break
    loader.load_state_dict(states[0])
    assert keys(iter(loader)) == epochs[3][1:]
    loader.set_epoch(1)
    assert keys(iter(loader)) == epochs[1]
    assert keys(iter(loader)) == epochs[2]


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("copy", [True, False])
def test_undecoded_bytes_come_through_workers(written: Path, context: str, copy: bool) -> None:
    """However they travel: the loader reads them in place, plain loaders' workers send them, and both give the same."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "decode": False, "copy": copy}
    here = list(StagedDataset(written, **options))
    kind = bytes if copy else memoryview
    assert all(type(value) is kind for batch in here for value in batch["txt"])
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    handed = list(StagedLoader(StagedDataset(written, **options), **workers))
    assert handed == here
    assert all(type(value) is kind for batch in handed for value in batch["txt"])
    sent = list(DataLoader(StagedDataset(written, **options), batch_size=None, **workers))
    assert sent == here
    assert all(type(value) is bytes for batch in sent for value in batch["txt"])
    single = StagedDataset(written, seed=3, decode=False, copy=copy)
    assert list(StagedLoader(single, **workers)) == list(StagedDataset(written, seed=3, decode=False))


def test_views_reach_map_and_collate_in_workers(written: Path) -> None:
    def dataset() -> StagedDataset:
        return StagedDataset(
            written, batch_size=4, decode=False, copy=False, map=_length_of_view, collate=sum
        )

    assert list(StagedLoader(dataset(), num_workers=2)) == list(dataset())


def _length_of_view(sample: dict[str, Any]) -> int:
    assert isinstance(sample["txt"], memoryview)
    return len(sample["txt"])


def test_default_collation_of_single_samples(shards: Path) -> None:
    """Without batch_size, a plain DataLoader batches samples as it does with any dataset."""
    loader = DataLoader(StagedDataset(shards), batch_size=6, num_workers=2)
    seen = [number for batch in loader for number in batch["cls"].tolist()]
    assert sorted(seen) == list(range(29))


def test_ranks_partition_every_global_batch(shards: Path) -> None:
    """Two ranks take halves of the batches of one, in as many steps each, repeating less than a rank's worth."""
    alone = [batch["cls"].tolist() for batch in StagedDataset(shards, global_batch_size=8, seed=1)]
    ranks = [
        [
            batch["cls"].tolist()
            for batch in StagedDataset(shards, global_batch_size=8, seed=1, rank=rank, world_size=2)
        ]
        for rank in range(2)
    ]
    assert [left + right for left, right in zip(*ranks, strict=True)][:3] == alone[:3]
    assert ranks[0][3] + ranks[1][3] in (alone[3], alone[3] + alone[3][:1])
    assert len(ranks[0]) == len(ranks[1]) == 4


def test_resume_on_another_world_and_batch(shards: Path) -> None:
    """A state of one rank goes on with two ranks and the same global batch, and with another batch, without loss."""
    alone = StagedDataset(shards, global_batch_size=8, seed=1)
    items = iter(alone)
    begun = [next(items)["cls"].tolist() for _ in range(2)]
    state = alone.state_dict()
    rest = [batch["cls"].tolist() for batch in items]
    for size in (8, 6):
        parts = []
        for rank in range(2):
            part = StagedDataset(
                shards, global_batch_size=size, seed=1, rank=rank, world_size=2, drop_last=False
            )
            part.load_state_dict(state)
            parts.append([batch["cls"].tolist() for batch in part])
        joined = [left + right for left, right in zip(*parts, strict=True)]
        if size == 8:
            assert joined[0] == rest[0]
        seen = [number for batch in begun + joined for number in batch]
        assert set(seen) == set(range(29))
        assert len(seen) - 29 < 2


def test_lanes_come_with_the_state(shards: Path) -> None:
    """A run begun on two nodes goes on with its two lanes on one; other explicit lanes are refused."""
    two = StagedDataset(shards, global_batch_size=8, lanes=2)
    items = iter(two)
    next(items)
    state = two.state_dict()
    one = StagedDataset(shards, global_batch_size=8)
    one.load_state_dict(state)
    assert keys(iter(one)) == keys(items)
    with pytest.raises(UsageError, match="lanes=2"):
        StagedDataset(shards, global_batch_size=8, lanes=1).load_state_dict(state)
    with pytest.raises(UsageError, match="6 or 8"):
        StagedDataset(shards, global_batch_size=7).load_state_dict(state)


def test_rank_from_the_launcher(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK, WORLD_SIZE and LOCAL_WORLD_SIZE choose rank, batch and lanes."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dataset = StagedDataset(shards, batch_size=2)
    assert dataset.state_dict()["lanes"] == 2
    assert len(dataset) == 4
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UsageError, match="rank 4 of a world of 4"):
        StagedDataset(shards)


def test_broken_off_iterations_begin_again(shards: Path) -> None:
    """Looking at one batch costs nothing: the next iteration begins where that one did."""
    for loader in (StagedLoader(StagedDataset(shards, batch_size=4)), StagedDataset(shards, batch_size=4)):
        first = next(iter(loader))["__key__"]
        assert next(iter(loader))["__key__"] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_who_counts_items_gets_the_next_epoch(shards: Path, workers: int) -> None:
    """An epoch is finished with its last item, whether or not the one after it is asked for."""

    def made() -> StagedLoader:
        return StagedLoader(StagedDataset(shards, batch_size=7, seed=5), num_workers=workers)

    plain = made()
    expected = [[batch["__key__"] for batch in plain] for _ in range(3)]
    counted = made()
    found = [[batch["__key__"] for batch in islice(counted, len(counted))] for _ in range(3)]
    assert found == expected
    counted.set_epoch(2)
    assert [batch["__key__"] for batch in counted] == expected[2]


def test_set_epoch_keeps_a_loaded_place(shards: Path) -> None:
    """The usual loop calls set_epoch(epoch) right after load_state_dict."""
    dataset = StagedDataset(shards, batch_size=4)
    dataset.set_epoch(2)
    items = iter(dataset)
    next(items)
    resumed = StagedDataset(shards, batch_size=4)
    resumed.load_state_dict(dataset.state_dict())
    assert resumed.epoch == 2
    resumed.set_epoch(2)
    assert keys(iter(resumed)) == keys(items)


def test_state_is_refused_where_nobody_knows_it(shards: Path) -> None:
    """With workers of a plain DataLoader the dataset says so rather than give a stale place."""
    dataset = StagedDataset(shards, batch_size=4)
    next(iter(DataLoader(dataset, num_workers=1)))
    with pytest.raises(UsageError, match="StagedLoader"):
        dataset.state_dict()


def test_state_of_a_changed_dataset_is_refused(shards: Path, tmp_path: Path) -> None:
    """Fingerprint, seed and window are compared, and named."""
    state = StagedDataset(shards, seed=1).state_dict()
    other = write_with_manifest(tmp_path / "other", [7, 0, 9, 3, 11])
    with pytest.raises(UsageError, match="another dataset"):
        StagedDataset(other, seed=1).load_state_dict(state)
    with pytest.raises(UsageError, match="seed=1"):
        StagedDataset(shards, seed=2).load_state_dict(state)
    with pytest.raises(FormatError, match="position"):
        StagedDataset(shards, seed=1).load_state_dict({**state, "position": None})


def test_map_fields_collate_and_handlers(written: Path) -> None:
    """fields choose, a handler decodes first, map comes last, collate makes the batch."""
    dataset = StagedDataset(
        written,
        batch_size=3,
        shuffle=False,
        fields=["cls", "bin"],
        decode=lambda name, data: len(data) if name.endswith("bin") else None,
        map=lambda sample: (sample["cls"], sample["bin"]),
        collate=tuple,
    )
    assert next(iter(dataset)) == ((0, 9), (1, 9), (2, 9))
    assert next(
        iter(StagedDataset(written, batch_size=2, shuffle=False, map=lambda sample: sample["cls"]))
    ) == [0, 1]


def test_an_error_in_map_names_the_sample(shards: Path) -> None:
    """The user's own exception goes through, with a note."""
    with pytest.raises(ZeroDivisionError) as caught:
        list(StagedDataset(shards, shuffle=False, map=lambda sample: 1 // (sample["cls"] - 3)))
    assert any(key_of(3) in note and "shard-000000.tar" in note for note in caught.value.__notes__)


def test_copies_are_independent(shards: Path) -> None:
    """A deep copy, or one through pickle, iterates by itself, also with workers."""
    dataset = StagedDataset(shards, batch_size=4)
    expected = keys(iter(StagedDataset(shards, batch_size=4)))
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert keys(iter(StagedLoader(other, num_workers=1))) == expected
    assert keys(iter(dataset)) == expected


def test_threads_read_side_by_side(shards: Path) -> None:
    """Iterations of several threads over datasets of one directory do not disturb each other."""
    expected = keys(iter(StagedDataset(shards, batch_size=2, window=1)))
    found: list[list[list[str]]] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(keys(iter(StagedDataset(shards, batch_size=2, window=1))))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 4


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    """A cut, a flipped header and a missing shard are errors that name it, never fewer samples."""
    data = write_with_manifest(tmp_path / "data", [4, 4])
    shard = data / "shard-000001.tar"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1024])
    with pytest.raises(FormatError, match=r"shard-000001\.tar.*bytes; the manifest says"):
        list(StagedDataset(data))
    shard.write_bytes(raw[:1030] + b"\xff" + raw[1031:])
    with pytest.raises(FormatError, match=r"shard-000001\.tar` at byte 1024"):
        list(StagedDataset(data))
    shard.unlink()
    with pytest.raises(NotFound, match=r"shard-000001\.tar"):
        list(StagedDataset(data))
    (data / "manifest.json").unlink()
    shard.write_bytes(raw[:-1024])
    with pytest.raises(FormatError, match=r"shard-000001\.tar.*cut short"):
        StagedDataset(data)


def test_undecodable_fields_are_named(tmp_path: Path) -> None:
    """The message has shard, member and offset; pickles are refused unless allowed."""
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        writer.write({"__key__": "one", "json": b"{", "pyd": pickle.dumps(5)})
    with pytest.raises(FormatError, match=r"a\.tar`: `one\.json` at byte \d+: .*cannot be decoded"):
        list(StagedDataset(tmp_path, fields=["json"]))
    with pytest.raises(UsageError, match="is a pickle"):
        list(StagedDataset(tmp_path, fields=["pyd"]))
    assert next(iter(StagedDataset(tmp_path, fields=["pyd"], allow_pickle=True)))["pyd"] == 5


def test_an_error_in_a_worker_reaches_the_trainer(tmp_path: Path) -> None:
    """A damaged shard met in a worker raises in the loop, with its message."""
    data = write_with_manifest(tmp_path / "data", [4, 4])
    (data / "shard-000001.tar").write_bytes(b"\0" * 100)
    with pytest.raises(FormatError, match=r"shard-000001\.tar"):
        list(StagedLoader(StagedDataset(data, batch_size=2, decode=False), num_workers=1, timeout=60))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"batch_size": 4, "global_batch_size": 4}, "both given"),
        ({"global_batch_size": 5, "rank": 0, "world_size": 2}, "4 or 6"),
        ({"batch_size": 4, "lanes": 3}, "3 or 6"),
        ({"batch_size": 30, "drop_last": True}, "29 samples, less than a global batch of 30"),
        ({"rank": 1}, "go together"),
        ({"seed": -1}, "seed must be"),
        ({"window": 0}, "window must be"),
        ({"fields": ["jpg"]}, "no field `jpg`"),
        ({"decode": "rainbow"}, "not an image specification"),
        ({"wait_timeout_s": 0}, "wait_timeout_s"),
        ({"on_daemon_loss": "panic"}, "on_daemon_loss"),
        ({"collate": list}, "collate without batch_size"),
    ],
)
def test_arguments_are_checked_at_once(shards: Path, arguments: dict[str, Any], message: str) -> None:
    """What cannot work is refused when the dataset is made, with what would."""
    with pytest.raises(UsageError, match=message):
        StagedDataset(shards, **arguments)


def test_sources_are_checked_at_once(tmp_path: Path) -> None:
    """A missing, empty or wrong directory is named, with a hint."""
    with pytest.raises(UsageError, match="does not exist"):
        StagedDataset(tmp_path / "missing")
    with pytest.raises(UsageError, match="neither a manifest"):
        StagedDataset(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match=r"manifest\.json` is not a dataset manifest"):
        StagedDataset(tmp_path)
    empty = write_with_manifest(tmp_path / "empty", [0])
    with pytest.raises(UsageError, match="no samples"):
        StagedDataset(empty)


def test_batches_of_batches_are_refused(shards: Path) -> None:
    """A batch size given to dataset and DataLoader says where it belongs."""
    with pytest.raises(UsageError, match="batches of 2 batches"):
        next(iter(DataLoader(StagedDataset(shards, batch_size=4), batch_size=2)))


def test_more_workers_than_batches(shards: Path) -> None:
    """Workers without work end at once."""
    assert len(keys(iter(StagedLoader(StagedDataset(shards, batch_size=20), num_workers=3, timeout=60)))) == 2
