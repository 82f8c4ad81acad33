"""Traps that frameworks and file systems set, by their documented rules; and what somebody with ill intent leaves there."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stager.checkpoint.detect import Detector, Phase, Take
from stager.checkpoint.look import Look, look
from stager.disk import LocalDisk
from stager.formats.layouts.api import (
    SETTLE_COUNTED_S,
    SETTLE_MARKED_S,
    SETTLE_RANKS_S,
    SETTLE_SOUND_S,
    Complete,
    Corrupt,
    Entry,
    NotMine,
    Verdict,
    Writing,
)
from stager.formats.layouts.detection import LAYOUTS
from tests.checkpoint.made import MADE, Made, dcp_metadata, index_body, json_body, torch_body, verdict_on

DCP = MADE["1 DCP"]
TRAINER = MADE["11 Trainer"]
MEGATRON = MADE["18 Megatron"]


def accepted(verdict: Verdict) -> Complete:
    assert isinstance(verdict, Complete), verdict
    return verdict


def waits_for(verdict: Verdict, what: str) -> None:
    assert isinstance(verdict, Writing) and what in verdict.reason, verdict


def written(made: Made, folder: Path) -> Path:
    """The checkpoint on a real disk."""
    for number, (path, body) in enumerate(made.files.items()):
        target = folder / made.name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)
        os.utime(target, ns=(number * 10**9, number * 10**9))
    return folder / made.name


def looked(path: Path, **how: Any) -> Verdict:
    found = look(LocalDisk(), str(path.parent), path.name, **how)
    assert found is not None
    return found.verdict


# --- names that say "not yet"


@pytest.mark.parametrize(
    "name",
    [
        "tmp_step-100",  # torch_checkpointing
        "tmp-checkpoint-100",  # transformers 4.36 to 4.38
        "checkpoint-100-tmp",  # SimpleTuner
        "step-100.incomplete",  # xtuner
        "100.orbax-checkpoint-tmp",  # Orbax
        "100.orbax-checkpoint-tmp-1700000000",
        "step-100.backup",  # torchtitan's own resume once took it
        "._dlrover_ckpt_stage",
    ],
)
@pytest.mark.parametrize(
    "made", [DCP, TRAINER, MADE["14 Accelerate"], MADE["24 Orbax"]], ids=lambda m: m.layout
)
def test_temporary_names(made: Made, name: str) -> None:
    """A directory that its framework renames, or that somebody put aside, is never taken, whatever it holds."""
    assert isinstance(verdict_on(replace(made, name=name)), NotMine)


@pytest.mark.parametrize("label", MADE)
def test_unfinished_marker_beside(label: str) -> None:
    """Row 23: NeMo's sibling is there before anything is written, and again while it is removed; every layout heeds it."""
    made = MADE[label]
    stem = made.name.removesuffix(".ckpt")
    verdict = verdict_on(replace(made, beside={**made.beside, f"{stem}-unfinished": b""}))
    waits_for(verdict, "-unfinished")


def test_sentinel_of_a_save_on_sigterm() -> None:
    """Row 13: created first and removed last; transformers itself does not read it."""
    waits_for(verdict_on(TRAINER.having("checkpoint-is-incomplete.txt", b"")), "checkpoint-is-incomplete.txt")


def test_nvrx_dirty_file() -> None:
    """Row 22: another rank's file that is still being written makes the iteration wait; the one before it counts."""
    made = MADE["22 NVRx"]
    dirty = made.without("1/iter_0000100_1_local.pt").having("1/iter_0000100_1_local.dirty.pt", b"x")
    assert isinstance(verdict_on(dirty), Writing)
    before = {f"{rank}/iter_0000090_{rank}_local.pt": torch_body() for rank in range(2)}
    verdict = accepted(verdict_on(replace(dirty, files={**before, **dirty.files})))
    assert (verdict.step, verdict.files) == (90, tuple(sorted(before)))


def test_universal_with_working_files() -> None:
    """Row 9: the converter's `tmp/` is there until near the end."""
    waits_for(verdict_on(MADE["9 DeepSpeed universal"].having("tmp/0.pt", torch_body())), "working file")


def test_orbax_without_a_time_of_commit() -> None:
    """Rows 24 and 25: the metadata is there from the beginning; its time of commit is not."""
    made = MADE["24 Orbax"]
    waits_for(
        verdict_on(made.having("_CHECKPOINT_METADATA", json_body({"commit_timestamp_nsecs": None}))), "time"
    )


def test_nebula_placeholders() -> None:
    """Row 10: what DeepSpeed leaves at the usual places when Nebula has the checkpoint is none."""
    made = MADE["7 DeepSpeed ZeRO-2"]
    tiny = replace(made, files={path: torch_body(tensor_bytes=0) for path in made.files})
    waits_for(verdict_on(tiny), "Nebula")


# --- markers and trackers that lie


@pytest.mark.parametrize("label", ["7 DeepSpeed ZeRO-2", "7 DeepSpeed ZeRO-3", "7 DeepSpeed tensor parallel"])
def test_latest_proves_rank_0_only(label: str) -> None:
    """Rows 7 and 8: `latest` names the tag before the other ranks have written; the model states tell how many."""
    made = MADE[label]
    for path in made.files:
        verdict = verdict_on(made.without(path))
        assert isinstance(verdict, Writing), path
    assert accepted(verdict_on(made)).settle_s == SETTLE_COUNTED_S


def test_deepspeed_without_zero_waits_long() -> None:
    """Row 7: without ZeRO no other rank writes, but no file says so of an old version: only long quiet does."""
    facts = {"dp_world_size": 2, "mp_world_size": 1, "optimizer": None}
    made = Made("deepspeed", "global_step100", {"mp_rank_00_model_states.pt": torch_body(facts)}, ())
    assert accepted(verdict_on(made)).settle_s == SETTLE_RANKS_S


def test_tracker_of_megatron() -> None:
    """Rows 18 and 19: a tracker that has not come so far, or is garbage, proves nothing; one that went past does."""
    tracker = "latest_checkpointed_iteration.txt"
    legacy = MADE["19 Megatron legacy"]
    for content in (b"99", b"", b"release", b"\xff", b"1" * 40):
        waits_for(verdict_on(replace(legacy, beside={tracker: content})), tracker)
        assert accepted(verdict_on(replace(MEGATRON, beside={tracker: content}))).settle_s == SETTLE_RANKS_S
    assert accepted(verdict_on(replace(legacy, beside={tracker: b"200\n"}))).settle_s == SETTLE_MARKED_S
    assert accepted(verdict_on(MEGATRON)).settle_s == SETTLE_MARKED_S


def test_bridge_writes_after_its_tracker() -> None:
    """Row 21: the tracker is there and `run_config.yaml` is not, without which nothing loads."""
    made = MADE["21 Megatron-Bridge"]
    waits_for(verdict_on(made.without("run_config.yaml")), "run_config.yaml")
    # Before its first own file, the copy of an earlier save tells whose directory it will be.
    waits_for(verdict_on(made.without("run_config.yaml").without("train_state.pt")), "train_state.pt")


def test_dlrover_tracker() -> None:
    """Row 27: the tracker's number is what counts, for files that would be complete to their framework."""
    made = MADE["27 DLRover"]
    waits_for(verdict_on(replace(made, beside={"dlrover_latest.txt": b"99"})), "dlrover_latest.txt")
    waits_for(verdict_on(replace(made, beside={"._dlrover_ckpt_stage": b""})), "dlrover_latest.txt")


def test_trainer_state_of_another_step() -> None:
    """Row 11: a directory that was copied or renamed by hand does not pass for another step."""
    waits_for(verdict_on(TRAINER.having("trainer_state.json", json_body({"global_step": 50}))), "of step 50")


def test_stale_configuration_of_megatron() -> None:
    """Row 18: `metadata.json` of an earlier save is older than the `.metadata` of this one."""
    waits_for(verdict_on(MEGATRON, late=".metadata"), "earlier save")


def test_metadata_of_megatron() -> None:
    """Row 18: Megatron Core's metadata is of a class of its own and holds every rank's plan; real ones are read in
    tests/frameworks."""
    shards = {path: len(body) for path, body in MEGATRON.files.items() if path.endswith(".distcp")}
    verdict = verdict_on(MEGATRON.having(".metadata", dcp_metadata(shards, of_megatron=True)))
    assert accepted(verdict).files == tuple(sorted(MEGATRON.files))


def test_stale_meta_of_lightning() -> None:
    """Row 16: `meta.pt` of an earlier save is older than the `.metadata` of this one."""
    waits_for(verdict_on(MADE["16 Lightning FSDP"], late=".metadata"), "earlier save")


# --- ranks, worlds and nodes


@pytest.mark.parametrize(
    "label",
    [
        "2 DCP without collectives",
        "3 safetensors of ranks",
        "4 CheckpointWriter",
        "5 torch_checkpointing",
        "11 Trainer of ranks",
        "14 Accelerate",
        "22 NVRx",
    ],
)
def test_a_rank_that_never_comes(label: str) -> None:
    """Where each rank writes for itself with no barrier, a known number of ranks is demanded. A shard that went into a
    sibling directory, by the wall clock in its name, is thereby missed and not overlooked."""
    made = MADE[label]
    assert made.ranks is not None
    assert isinstance(verdict_on(made, ranks=made.ranks + 1), Writing)
    unknown = replace(made, ranks=None)
    if made.layout != "nvrx":  # one rank's own files say nothing of the others: only long quiet does
        assert accepted(verdict_on(unknown)).settle_s == SETTLE_RANKS_S


@pytest.mark.parametrize("label", ["1 DCP", "11 Trainer with FSDP", "14 Accelerate with FSDP", "18 Megatron"])
def test_leftover_shards_of_another_world(label: str) -> None:
    """What the marker does not name is left over from a save by more ranks, and does not travel."""
    made = MADE[label]
    folder = next(path for path in made.files if path.endswith("__0_0.distcp")).removesuffix("__0_0.distcp")
    leftover = f"{folder}__7_0.distcp"
    older = replace(made, files={leftover: b"old", **made.files})
    verdict = accepted(verdict_on(older))
    assert leftover not in verdict.files and set(verdict.files) == set(made.files)


@pytest.mark.parametrize("label", ["1 DCP", "7 DeepSpeed ZeRO-2", "11 Trainer of ranks", "18 Megatron"])
def test_a_node_without_the_marker(label: str) -> None:
    """On a disk of its own, a node that has no rank 0 sees shards and no marker for ever: long quiet must do there, and
    nowhere else."""
    made = MADE[label]
    there = {
        path: body
        for path, body in made.files.items()
        if "1" in path.split("mp_rank")[0] and path.endswith((".distcp", "optim_states.pt", ".pth"))
    }
    part = replace(made, files=there, ranks=None)
    assert there and isinstance(verdict_on(part), Writing)
    assert accepted(verdict_on(part, node_local=True)).settle_s == SETTLE_RANKS_S


def test_files_after_the_marker() -> None:
    """Rows 15, 18, 21: what still comes after the marker opens the verdict again; the quiet time begins anew."""
    detector = Detector()
    files = {".metadata": Entry(5, 5, 5), "__0_0.distcp": Entry(7, 4, 4)}
    verdict = Complete("torch_dcp", 1, tuple(files), SETTLE_SOUND_S)
    assert detector.observe("step-1", Look("step-1", False, files, verdict), 0.0) is None
    more = {**files, "tokenizer/vocab.json": Entry(9, 6, 6)}
    longer = replace(verdict, files=tuple(more))
    assert detector.observe("step-1", Look("step-1", False, more, longer), SETTLE_SOUND_S) is None
    assert isinstance(
        detector.observe("step-1", Look("step-1", False, more, longer), 2 * SETTLE_SOUND_S), Take
    )


def test_overwritten_after_it_was_taken() -> None:
    """A resumed run that saves the same step again is another checkpoint: size, time and inode are remembered."""
    detector = Detector()
    files = {".metadata": Entry(5, 5, 5)}
    found = Look("step-1", False, files, Complete("torch_dcp", 1, tuple(files), SETTLE_SOUND_S))
    detector.observe("step-1", found, 0.0)
    taken = detector.observe("step-1", found, 1.0)
    assert isinstance(taken, Take)
    detector.take("step-1", taken.fingerprint)
    assert detector.observe("step-1", found, 2.0) is None
    for changed in (Entry(6, 5, 5), Entry(5, 6, 5), Entry(5, 5, 6)):
        again = replace(found, files={".metadata": changed})
        assert detector.observe("step-1", again, 3.0) is None
        assert detector.standings()[0].phase is Phase.SETTLING


# --- layouts that another tier or another program answers for


@pytest.mark.parametrize(
    ("name", "files"),
    [
        # Row 33, Determined: the master's database says what is complete; the files prove nothing.
        ("0a1b2c3d", {"metadata.json": json_body({}), "code/model.py": b"pass"}),
        # Row 28, ByteCheckpoint: from the second save on `.metadata` is written before the data.
        ("global_step_100", {f"model/{path}": body for path, body in DCP.files.items()}),
        # Row 26, GKE: the handshake of its replicator.
        ("replicator.yaml", {"replicator.yaml": b"job-name: a\n"}),
        ("job-s100-n0-w0.restore", {"job-s100-n0-w0.restore": b""}),
        # Row 32, HyperPod: a rank's blob for its memory tier.
        ("rank_0", {"step_100/checkpoint.pt": torch_body()}),
    ],
)
def test_what_is_not_guessed(name: str, files: Mapping[str, bytes]) -> None:
    """What nothing in the directory proves is not taken unasked; `stager.commit()` or `stager seal` says so."""
    assert isinstance(verdict_on(Made("", name, files, ())), NotMine)


# --- ill intent


def test_metadata_that_names_other_classes() -> None:
    """A pickle in place of DCP's metadata runs nothing and is told by name."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch /tmp/stager-was-here",)

    for label in ("1 DCP", "11 Trainer with FSDP", "16 Lightning FSDP", "18 Megatron", "23 NeMo"):
        made = MADE[label]
        marker = next(path for path in made.files if path.endswith(".metadata"))
        for protocol in range(6):
            verdict = verdict_on(made.having(marker, pickle.dumps(Evil(), protocol=protocol)))
            assert isinstance(verdict, Corrupt) and ".metadata" in verdict.reason
    assert not os.path.exists("/tmp/stager-was-here")


def test_torch_file_that_names_other_classes() -> None:
    """Facts are read from the pickle inside without calling anything; where there are none, there are none."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch /tmp/stager-was-here",)

    name = "epoch=1-step=100.ckpt"
    facts = {"pytorch-lightning_version": "2.6.6", "global_step": Evil()}
    verdict = accepted(verdict_on(Made("", name, {name: torch_body(facts)}, ())))
    assert verdict.layout == "lightning" and not os.path.exists("/tmp/stager-was-here")


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../b", "a\x00b", "", "\ud800"])
def test_metadata_that_leaves_the_directory(path: str) -> None:
    """A manifest's path is checked before anything is looked up by it."""
    verdict = verdict_on(DCP.having(".metadata", dcp_metadata({path: 1})))
    assert isinstance(verdict, Corrupt), verdict


def test_snapshot_that_leaves_the_directory() -> None:
    """torchsnapshot's locations are paths from outside as well."""
    made = MADE["29 torchsnapshot"]
    raw = made.files[".snapshot_metadata"].replace(b"1/rng\n", b"../../etc/passwd\n")
    assert isinstance(verdict_on(made.having(".snapshot_metadata", raw)), Corrupt)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"weight_map":' * 100_000,
        b'{"global_step": ' + b"9" * 100_000 + b"}",
        b'{"global_step": 1e999}',
        b"null",
        b"\xff\xfe",
        b'{"weight_map": {"a": ["x"], "b": 5, "c": null, "d": "../../x"}}',
        b'{"weight_map": []}',
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize(
    ("label", "path"),
    [
        ("11 Trainer", "trainer_state.json"),
        ("11 Trainer with sharded weights", "model.safetensors.index.json"),
        ("3 safetensors with an index", "model.safetensors.index.json"),
        ("18 Megatron", "metadata.json"),
        ("24 Orbax", "_CHECKPOINT_METADATA"),
        ("29 torchsnapshot", ".snapshot_metadata"),
    ],
)
def test_json_of_ill_intent(label: str, path: str, body: bytes) -> None:
    """Deep, endless, of other types, no text: never complete, and never an exception."""
    assert isinstance(verdict_on(MADE[label].having(path, body)), Writing | Corrupt)


def test_json_too_large(tmp_path: Path) -> None:
    """A file that pretends to be a gigabyte of JSON is refused by its size, unread."""
    path = written(TRAINER, tmp_path)
    os.truncate(path / "trainer_state.json", 1 << 30)
    verdict = looked(path)
    assert isinstance(verdict, Corrupt) and "1073741824 bytes" in verdict.reason


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", (1 << 64) - 1) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 40) + b'{"w": {"data_offsets": [0, -1]}}'.ljust(40),
        struct.pack("<Q", 40) + b'{"w": {"data_offsets": [0]}}'.ljust(40),
        struct.pack("<Q", 40) + b'{"w": {"data_offsets": [0, 1.5]}}'.ljust(40),
        struct.pack("<Q", 20) + b"[" * 20,
        b"\0" * 400,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_safetensors_of_ill_intent(body: bytes) -> None:
    """A header that lies about its length or its tensors."""
    assert isinstance(verdict_on(TRAINER.having("model.safetensors", body)), Writing | Corrupt)


@pytest.mark.parametrize("label", [label for label, made in MADE.items() if made.needed])
def test_noise_in_the_place_of_each_file(label: str) -> None:
    """Every layout, with every file replaced by zeros or noise of the same size, gives a verdict and no exception."""
    made = MADE[label]
    for path in made.files:
        size = len(made.files[path])
        for body in (bytes(size), b"\xff" * size, b"PK\x03\x04" * (size // 4), b"." * size):
            for layout in ("auto", made.layout):
                assert isinstance(
                    verdict_on(made.having(path, body), layout=layout), Complete | Writing | Corrupt | NotMine
                )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_everything(layout: str) -> None:
    """Each adapter asked by name answers about the checkpoints of all the others."""
    for made in MADE.values():
        assert isinstance(verdict_on(made, layout=layout), Complete | Writing | Corrupt | NotMine)


def test_torchtitan_takes_what_its_backends_write() -> None:
    """Row 6: by name, in the three layouts; and nothing whose name only begins like its own."""
    for label in ("1 DCP", "3 safetensors with an index", "5 torch_checkpointing"):
        assert accepted(verdict_on(MADE[label], layout="torchtitan")).layout == "torchtitan"
        other = replace(MADE[label], name="step-100.backup")
        assert isinstance(verdict_on(other, layout="torchtitan"), NotMine)


def test_links_inside(tmp_path: Path) -> None:
    """A link out of the watched folder, to a directory or to nothing is refused by name; one to a file in it is taken."""
    watch = tmp_path / "watch"
    path = written(DCP, watch)
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    for target in (secret, tmp_path, watch / "nothing", Path("/dev/zero")):
        (path / "extra").symlink_to(target)
        verdict = looked(path)
        assert isinstance(verdict, Corrupt) and "extra" in verdict.reason, target
        (path / "extra").unlink()
    (watch / "shared.json").write_text("{}")
    (path / "extra").symlink_to(watch / "shared.json")
    assert "extra" in accepted(looked(path)).files


def test_last_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    """Row 15 and Composer: `last.ckpt`, removed and made again, leads to what is watched anyway and is passed over."""
    (tmp_path / "epoch=1-step=100.ckpt").write_bytes(torch_body())
    (tmp_path / "last.ckpt").symlink_to("epoch=1-step=100.ckpt")
    (tmp_path / "latest-rank0.pt").symlink_to("epoch=1-step=100.ckpt")
    for name in ("last.ckpt", "latest-rank0.pt"):
        assert isinstance(looked(tmp_path / name), NotMine)


def test_pipes_and_sockets(tmp_path: Path) -> None:
    """A pipe under a checkpoint's name, or inside one, is never opened: opening it would block for ever."""
    os.mkfifo(tmp_path / "model-100.pt")
    assert isinstance(looked(tmp_path / "model-100.pt"), NotMine)
    path = written(TRAINER, tmp_path)
    os.unlink(path / "optimizer.pt")
    os.mkfifo(path / "optimizer.pt")
    assert not isinstance(looked(path), Complete)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A file whose name is no UTF-8 cannot be named in a bucket: the checkpoint is refused, not silently thinned out."""
    path = written(DCP, tmp_path)
    os.close(os.open(os.fsencode(path) + b"/\xff.bin", os.O_CREAT))
    verdict = looked(path)
    assert isinstance(verdict, Corrupt) and "Unicode" in verdict.reason


def test_index_of_a_missing_folder() -> None:
    """An index may name files in folders; those are looked for there."""
    made = MADE["3 safetensors with an index"]
    waits_for(verdict_on(made.having("model.safetensors.index.json", index_body("a/b.safetensors"))), "a/b")


def test_settle_times_rise_with_doubt() -> None:
    """What proves less waits longer."""
    assert SETTLE_SOUND_S < SETTLE_MARKED_S < SETTLE_COUNTED_S < SETTLE_RANKS_S
    waits = {label: accepted(verdict_on(made)).settle_s for label, made in MADE.items()}
    assert waits["1 DCP"] == SETTLE_SOUND_S
    assert waits["11 Trainer"] == SETTLE_SOUND_S
    assert waits["11 Trainer of ranks"] == SETTLE_MARKED_S
    assert waits["20 Megatron non-persistent"] == SETTLE_RANKS_S
