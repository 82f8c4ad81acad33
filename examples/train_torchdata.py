"""Train from staged shards through torchdata's ``StatefulDataLoader``; its state goes into the checkpoint file.

python examples/train_torchdata.py /data/shards checkpoints --steps 60
python examples/train_torchdata.py /data/shards checkpoints --steps 90 --resume checkpoints/step-60.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from byte_transformer import ByteTransformer
from torchdata.stateful_dataloader import StatefulDataLoader
from train_bytes import log_step, to_ids

from stager import StagedDataset


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = StagedDataset(options.source, batch_size=16, seed=7, decode=False, map=to_ids, drop_last=True)
    loader: StatefulDataLoader[dict[str, torch.Tensor]] = StatefulDataLoader(
        dataset, batch_size=None, num_workers=options.workers
    )
    step = 0
    if options.resume:
        saved = torch.load(options.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    while step < options.steps:
        for batch in loader:
            loss = model(batch["ids"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            log_step(options.log, step, batch, loss)
            if step == options.steps:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "step": step,
                }
                torch.save(state, options.checkpoints / f"step-{step}.pt")
                break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--log", type=Path, default=Path("train.jsonl"))
    train(parser.parse_args())


if __name__ == "__main__":
    main()
