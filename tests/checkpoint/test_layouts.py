"""Layout adapters: what the frameworks wrote is accepted, what is half of it never is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from stager.checkpoint.look import look
from stager.disk import LocalDisk
from stager.errors import ConfigError
from stager.formats.commits import CommitMarker, encode_marker
from stager.formats.layouts.api import Complete, Corrupt, NotMine, Verdict, Writing
from stager.formats.layouts.detection import check_layout_name
from stager.formats.layouts.steps import is_directory_name, is_unfinished_name, step_in
from tests.checkpoint.conftest import Copy

SECOND_NS = 10**9


def judged(path: Path, *, layout: str = "auto", ranks: int | None = None) -> Verdict | None:
    """The verdict on ``path``, or None if nothing is there."""
    found = look(LocalDisk(), str(path.parent), path.name, layout=layout, ranks=ranks)
    return None if found is None else found.verdict


def age(path: Path, seconds: float) -> None:
    """Set a file's time ``seconds`` after that of its youngest sibling; negative is before."""
    newest = max(
        other.stat().st_mtime_ns for other in path.parent.rglob("*") if other.is_file() and other != path
    )
    stamp = newest + int(seconds * SECOND_NS)
    os.utime(path, ns=(stamp, stamp))


def test_dcp_of_one_process(copied: Copy) -> None:
    """A real DCP save is complete; its marker is known as such."""
    verdict = judged(copied("save_dcp", "step-100"))
    assert verdict == Complete("torch_dcp", 100, (".metadata", "__0_0.distcp"), 0.5, (".metadata",), ranks=1)


def test_dcp_of_two_ranks(copied: Copy) -> None:
    """Shards of both ranks are demanded, whatever order they came in."""
    path = copied("save_dcp_ranks", "step-100")
    verdict = judged(path)
    assert isinstance(verdict, Complete) and verdict.ranks == 2
    (path / "__1_0.distcp").unlink()
    assert isinstance(judged(path), Writing)


def test_dcp_without_collectives(copied: Copy) -> None:
    """One metadata file a rank; with a known number of ranks each must be there."""
    path = copied("save_dcp_without_collectives", "step-100")
    verdict = judged(path)
    assert isinstance(verdict, Complete) and verdict.markers == ("__0.metadata",) and verdict.settle_s == 60.0
    assert isinstance(judged(path, ranks=1), Complete)
    assert isinstance(judged(path, ranks=2), Writing)


def test_dcp_is_never_accepted_half_written(copied: Copy, tmp_path: Path) -> None:
    """Files appear one after another and grow: complete is said only when the last byte is there."""
    whole = copied("save_dcp_ranks", "step-100")
    order = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    grown = tmp_path / "grown" / "step-100"
    grown.mkdir(parents=True)
    assert isinstance(judged(grown), NotMine)
    for name in order:
        body = (whole / name).read_bytes()
        for cut in (0, len(body) // 2, len(body) - 1):
            temporary = grown / (".metadata.tmp" if name == ".metadata" else name)
            temporary.write_bytes(body[:cut])
            assert isinstance(judged(grown), Writing), f"{name} with {cut} bytes"
        temporary.unlink()
        (grown / name).write_bytes(body)
    assert isinstance(judged(grown), Complete)


def test_dcp_marker_of_an_earlier_save(copied: Copy) -> None:
    """Saving into the same directory rewrites shards under an old marker, which then says nothing."""
    path = copied("save_dcp", "step-100")
    age(path / "__0_0.distcp", 1)
    verdict = judged(path)
    assert isinstance(verdict, Writing) and "earlier save" in verdict.reason
    age(path / ".metadata", 0)
    assert isinstance(judged(path), Complete)


def test_dcp_leftovers_are_ignored(copied: Copy) -> None:
    """Shards of a larger world that the marker does not name neither hinder nor travel; other files do travel."""
    path = copied("save_dcp", "step-100")
    (path / "__3_0.distcp").write_bytes(b"old")
    (path / "train_state.json").write_text("{}")
    verdict = judged(path)
    assert isinstance(verdict, Complete)
    assert verdict.files == (".metadata", "__0_0.distcp", "train_state.json")


def test_dcp_truncated_shard_is_corrupt(copied: Copy) -> None:
    """A shard shorter than the marker says, and not younger, will not get better."""
    path = copied("save_dcp", "step-100")
    body = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(body[:-1])
    age(path / "__0_0.distcp", -5)
    assert isinstance(judged(path), Corrupt)


def test_dcp_damaged_marker_is_corrupt(copied: Copy) -> None:
    """A marker that does not parse is said to be damaged, by name."""
    path = copied("save_dcp", "step-100")
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    verdict = judged(path)
    assert isinstance(verdict, Corrupt) and "step-100/.metadata" in verdict.reason


@pytest.mark.parametrize(
    "name", ["step-100.backup", "tmp_step-100", "tmp-checkpoint-5", ".step-100", "step-100.r2"]
)
def test_other_names_are_no_checkpoints(copied: Copy, name: str) -> None:
    """A valid checkpoint under a name that no trainer gives is left alone."""
    path = copied("save_dcp", "step-100")
    path.rename(path.with_name(name))
    assert isinstance(judged(path.with_name(name)), NotMine)


def test_trainer_of_transformers(copied: Copy) -> None:
    """A real Trainer's checkpoint is complete, all its files belong to it."""
    path = copied("save_trainer", "checkpoint-4")
    verdict = judged(path)
    assert isinstance(verdict, Complete)
    assert (verdict.layout, verdict.step, verdict.ranks, verdict.settle_s) == ("hf_trainer", 4, 1, 0.5)
    assert set(verdict.files) == {entry.name for entry in path.iterdir()}
    assert verdict.markers == ("trainer_state.json",)


def test_trainer_is_never_accepted_half_written(copied: Copy, tmp_path: Path) -> None:
    """Files of a real checkpoint appear in the order of their times, each cut somewhere before it is whole."""
    whole = copied("save_trainer", "checkpoint-4")
    order = sorted(whole.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
    assert order[-1].name == "trainer_state.json"
    grown = tmp_path / "grown" / "checkpoint-4"
    grown.mkdir(parents=True)
    for source in order:
        body = source.read_bytes()
        needed = len(body.rstrip())  # a JSON document without its final line break is whole
        for cut in (0, needed // 2, needed - 1):
            (grown / source.name).write_bytes(body[:cut])
            assert not isinstance(judged(grown), Complete | Corrupt), f"{source.name} with {cut} bytes"
        shutil.copy2(source, grown / source.name)
    assert isinstance(judged(grown), Complete)


def test_trainer_says_itself_that_it_is_incomplete(copied: Copy) -> None:
    """The sentinel of a save on SIGTERM vetoes everything else."""
    path = copied("save_trainer", "checkpoint-4")
    (path / "checkpoint-is-incomplete.txt").touch()
    assert isinstance(judged(path), Writing)


def test_trainer_ranks(copied: Copy) -> None:
    """Every rank's random state is waited for where their number is known, and settles long where it is not."""
    path = copied("save_trainer", "checkpoint-4")
    (path / "rng_state.pth").rename(path / "rng_state_0.pth")
    shutil.copy2(path / "rng_state_0.pth", path / "rng_state_2.pth")
    verdict = judged(path)
    assert isinstance(verdict, Writing) and "rng_state_1.pth" in verdict.reason
    shutil.copy2(path / "rng_state_0.pth", path / "rng_state_1.pth")
    verdict = judged(path)
    assert isinstance(verdict, Complete) and (verdict.ranks, verdict.settle_s) == (3, 60.0)
    verdict = judged(path, ranks=3)
    assert isinstance(verdict, Complete) and verdict.settle_s == 2.0
    assert isinstance(judged(path, ranks=4), Writing)


def test_trainer_state_of_an_earlier_save(copied: Copy) -> None:
    """Weights younger than the state are a save that has not ended; a state of another step says nothing."""
    path = copied("save_trainer", "checkpoint-4")
    age(path / "model.safetensors", 1)
    assert isinstance(judged(path), Writing)
    age(path / "trainer_state.json", 1)
    assert isinstance(judged(path), Complete)
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps({**state, "global_step": 2}))
    assert isinstance(judged(path), Writing)


def test_trainer_with_nested_dcp(copied: Copy, tmp_path: Path) -> None:
    """FSDP's nested directories follow DCP's rule, and their marker is uploaded before the trainer's state."""
    path = copied("save_trainer", "checkpoint-4")
    nested = path / "pytorch_model_fsdp_0"
    shutil.move(copied("save_dcp", "step-100"), nested)
    age(path / "trainer_state.json", 1)
    verdict = judged(path)
    assert isinstance(verdict, Complete)
    assert verdict.markers == ("pytorch_model_fsdp_0/.metadata", "trainer_state.json")
    (nested / "__0_0.distcp").unlink()
    assert isinstance(judged(path), Writing)


def test_trainer_with_nested_deepspeed(copied: Copy) -> None:
    """Optimizer shards of every rank, whole; made by DeepSpeed's documented names, not by DeepSpeed."""
    path = copied("save_trainer", "checkpoint-4")
    nested = path / "global_step4"
    nested.mkdir()
    shards = [nested / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    for shard in (*shards, nested / "mp_rank_00_model_states.pt"):
        shutil.copy2(path / "optimizer.pt", shard)
    (path / "latest").write_text("global_step4")
    age(path / "trainer_state.json", 1)
    assert isinstance(judged(path), Complete)
    shards[1].rename(nested / "away")
    assert isinstance(judged(path), Writing)
    (nested / "away").rename(shards[1])
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    age(path / "trainer_state.json", 1)
    assert isinstance(judged(path), Writing)


def test_trainer_index_names_a_missing_file(copied: Copy) -> None:
    """A safetensors index is an expected set."""
    path = copied("save_trainer", "checkpoint-4")
    index = {
        "metadata": {},
        "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    age(path / "trainer_state.json", 1)
    verdict = judged(path)
    assert isinstance(verdict, Writing) and "model-00002" in verdict.reason


def test_torch_save_files(copied: Copy) -> None:
    """Both formats are recognised; the one without a tail to check settles long."""
    verdict = judged(copied("save_files", "model-100.pt"))
    assert verdict == Complete("torch_file", 100, ("model-100.pt",), 2.0)
    verdict = judged(copied("save_files", "legacy-7.pth"))
    assert verdict == Complete("torch_file", 7, ("legacy-7.pth",), 60.0)


def test_torch_save_truncated_at_every_byte_of_its_tail(copied: Copy) -> None:
    """A file that grows in place is complete at its last byte and not before."""
    path = copied("save_files", "model-100.pt")
    body = path.read_bytes()
    cuts = {0, 1, 3, 4, len(body) // 3, len(body) // 2, *range(len(body) - 600, len(body))}
    for cut in sorted(cuts):
        path.write_bytes(body[:cut])
        assert isinstance(judged(path), Writing), cut
    path.write_bytes(body + b"x")
    assert not isinstance(judged(path), Complete)
    path.write_bytes(b"not a checkpoint at all")
    assert isinstance(judged(path), Corrupt)


@pytest.mark.parametrize(
    "name", ["model.pt.tmp", ".model.pt", "notes.txt", "training_args.bin", "x.dirty.pt.part"]
)
def test_other_files_are_no_checkpoints(tmp_path: Path, copied: Copy, name: str) -> None:
    """Only names that torch.save files have."""
    path = copied("save_files", "model-100.pt")
    path.rename(path.with_name(name))
    assert isinstance(judged(path.with_name(name)), NotMine)


def test_commit_marker_is_believed_at_once(tmp_path: Path) -> None:
    """The trainer's own word makes any directory complete, with what it says of step, metrics and cursor."""
    path = tmp_path / "anything"
    path.mkdir()
    (path / "weights.bin").write_bytes(b"w")
    assert isinstance(judged(path), NotMine)
    marker = CommitMarker(7, {"loss": 2.5}, {"position": 3})
    (path / ".stager-commit.json").write_bytes(encode_marker(marker))
    verdict = judged(path)
    assert isinstance(verdict, Complete)
    assert (verdict.layout, verdict.step, verdict.settle_s, verdict.commit) == ("commit", 7, 0.0, marker)
    assert verdict.markers == (".stager-commit.json",)
    age(path / "weights.bin", 1)
    assert isinstance(judged(path), Writing)


def test_commit_marker_over_a_known_layout(copied: Copy) -> None:
    """The framework's rules add step and markers, and veto what is damaged."""
    path = copied("save_dcp", "step-100")
    (path / ".stager-commit.json").write_bytes(encode_marker(CommitMarker()))
    verdict = judged(path)
    assert isinstance(verdict, Complete)
    assert (verdict.layout, verdict.step, verdict.settle_s) == ("torch_dcp", 100, 0.0)
    assert verdict.markers == (".metadata", ".stager-commit.json")
    (path / ".metadata").write_bytes(b"broken")
    age(path / ".stager-commit.json", 1)
    assert isinstance(judged(path), Corrupt)
    (path / ".stager-commit.json").write_text("{")
    assert isinstance(judged(path), Corrupt)


def test_a_named_layout_sees_nothing_else(copied: Copy) -> None:
    """The configuration's layout excludes the others; an unknown one is refused with the known ones."""
    assert isinstance(judged(copied("save_files", "model-100.pt"), layout="torch_dcp"), NotMine)
    with pytest.raises(ConfigError, match="hf_trainer"):
        check_layout_name("megatron-lm")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("step_00100", 100),
        ("global_step7", 7),
        ("checkpoint-12", 12),
        ("iter_0000100", 100),
        ("epoch=1-step=250", 250),
        ("epoch=1-step=250-loss=0.25", 250),
        ("42", 42),
        ("final", None),
        ("step-x", None),
        ("1" * 19, None),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    """The number after ``step``, else the last one."""
    assert is_directory_name(name) and step_in(name) == step


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "step-100.backup", "x.tmp", "a" * 201, "é", "a\n"]
)
def test_names_that_are_refused(name: str) -> None:
    """Full matches only."""
    assert not is_directory_name(name)


def test_unfinished_names() -> None:
    """Names by which frameworks say that they are not done."""
    for name in ("tmp_step-1", "a-unfinished", "x.partial", "x.incomplete", "7.orbax-checkpoint-tmp-3", ".x"):
        assert is_unfinished_name(name)
    assert not is_unfinished_name("temporal-net")


def test_vanished_and_odd_candidates(tmp_path: Path) -> None:
    """Nothing there is None; an empty directory and undecodable names are no checkpoints and no crash."""
    assert judged(tmp_path / "gone") is None
    (tmp_path / "empty").mkdir()
    assert isinstance(judged(tmp_path / "empty"), NotMine)
    odd = tmp_path / "odd"
    odd.mkdir()
    os.close(os.open(os.fsencode(odd) + b"/\xff\xfe.pt", os.O_CREAT))
    assert isinstance(judged(odd), Corrupt)
