"""Run by the tests in processes of their own: the frameworks themselves write checkpoints and load them again.

``python frameworks.py COMMAND FOLDER [RANK WORLD]``; the rendezvous of two ranks is a file next to the folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402


def made_state(seed: int = 1, rows: int = 64) -> dict[str, object]:
    """A model, its optimizer after a step, and a cursor."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, rows), torch.nn.ReLU(), torch.nn.Linear(rows, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "cursor": {"position": 7}}


def same(left: object, right: object) -> bool:
    """Whether two states are equal, tensors bit by bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def save_dcp(folder: str) -> None:
    """One process, without a process group."""
    dcp.save(made_state(), checkpoint_id=folder, no_dist=True)


def load_dcp(folder: str) -> None:
    """Fails unless what is loaded equals what `save_dcp` saved."""
    state = made_state(seed=2)
    state["cursor"] = {"position": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(state, made_state()), "the restored state differs"


def save_dcp_rotating(folder: str) -> None:
    """Five saves, each of other values; the one before is removed as soon as the next is there."""
    for step in range(1, 6):
        dcp.save(made_state(seed=step), checkpoint_id=f"{folder}/step-{step}", no_dist=True)
        if step > 1:
            shutil.rmtree(f"{folder}/step-{step - 1}")
        time.sleep(1.0)


def load_dcp_rotated(folder: str) -> None:
    """Fails unless every ``step-<N>`` that is there equals what was saved for it."""
    for path in Path(folder).iterdir():
        state = made_state(seed=99)
        dcp.load(state, checkpoint_id=path, no_dist=True)
        assert same(state, made_state(seed=int(path.name.split("-")[1]))), f"{path} differs"


def save_dcp_ranks(folder: str, rank: str, world: str) -> None:
    """Several ranks with gloo; a sharded tensor and values that each rank has for itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group = f"file://{os.path.dirname(folder)}/rendezvous-{os.path.basename(folder)}"
    torch.distributed.init_process_group("gloo", init_method=group, rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    whole = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), f"rng_{rank}": torch.full((16,), float(rank))}
    dcp.save(state, checkpoint_id=folder)
    torch.distributed.destroy_process_group()


def save_dcp_without_collectives(folder: str) -> None:
    """The experimental form with a metadata file a rank."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    group = f"file://{os.path.dirname(folder)}/rendezvous-{os.path.basename(folder)}"
    torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    dcp.save(made_state(), storage_writer=FileSystemWriter(folder), use_collectives=False)
    torch.distributed.destroy_process_group()


def save_files(folder: str) -> None:
    """Files of torch.save, in both formats."""
    state = made_state()
    torch.save(state, Path(folder, "model-100.pt"))
    torch.save(state, Path(folder, "legacy-7.pth"), _use_new_zipfile_serialization=False)


def save_trainer(folder: str) -> None:
    """A real training run of transformers' Trainer, saved at steps 2 and 4."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    examples = [
        {
            "input_ids": torch.randint(0, 50, (8,)),
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": i % 2,
        }
        for i in range(16)
    ]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
    )
    Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=examples).train()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
