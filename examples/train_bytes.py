"""Train a byte-level transformer from staged shards, with checkpoints by torch's own distributed checkpoint (DCP).

    STAGER_SOCKET=/run/stager/stager.sock python examples/train_bytes.py s3://bucket/dataset checkpoints --steps 60

Nothing here copies, uploads or downloads: the loader reads what the daemon has staged, ``dcp.save`` writes to local disk,
and ``commit`` says that the checkpoint is finished and where in the data it was taken. ``--resume DIR`` goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from byte_transformer import CONTEXT, ByteTransformer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stager import StagedDataset, StagedLoader, commit, read_commit


def to_ids(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's file as ``CONTEXT + 1`` byte values, from a place that its key chooses."""
    text: bytes = sample["py"]
    key = sample["__key__"]
    start = zlib.crc32(key.encode()) % max(1, len(text) - CONTEXT)
    window = text[start : start + CONTEXT + 1].ljust(CONTEXT + 1, b"\n")
    return {"__key__": key, "ids": torch.frombuffer(bytearray(window), dtype=torch.uint8).long()}


def log_step(log: Path, step: int, batch: dict[str, Any], loss: torch.Tensor) -> None:
    """Which samples this step saw, and what came of it: what a resumed run is compared by."""
    keys = hashlib.sha256("\n".join(batch["__key__"]).encode()).hexdigest()
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "keys": keys, "loss": loss.item().hex()}) + "\n")


def save(folder: Path, step: int, model: ByteTransformer, optimizer: torch.optim.Optimizer) -> Path:
    """A DCP checkpoint of this step."""
    path = folder / f"step-{step}"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, no_dist=True)
    return path


def load(path: Path, model: ByteTransformer, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of `save`."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what we mean
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = StagedDataset(
        options.source, batch_size=options.batch, seed=7, window=8, decode=False, map=to_ids, drop_last=True
    )
    loader = StagedLoader(dataset, num_workers=options.workers)
    step = 0
    if options.resume:
        load(options.resume, model, optimizer)
        marker = read_commit(options.resume)
        if marker is None or marker.step is None or marker.cursor is None:
            sys.exit(f"{options.resume} was not committed with its step and its place in the data")
        step = marker.step
        loader.load_state_dict(dict(marker.cursor))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=options.steps, completed=step, loss=float("nan"))
        while step < options.steps:
            for batch in loader:
                loss = model(batch["ids"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                log_step(options.log, step, batch, loss)
                progress.update(task, completed=step, loss=loss.item())
                if step % options.save_every == 0 or step == options.steps:
                    path = save(options.checkpoints, step, model, optimizer)
                    commit(path, step=step, metrics={"loss": loss.item()}, loader=loader)
                if step == options.steps:
                    break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", help="a packed dataset: s3://bucket/prefix through the daemon, or a directory"
    )
    parser.add_argument("checkpoints", type=Path, help="where to save, on local disk")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="a checkpoint's directory")
    parser.add_argument("--log", type=Path, default=Path("train.jsonl"), help="a line for every step")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
