"""Train from staged shards with Lightning, whose checkpoints keep the loader's place: nothing has to be added for it.

python examples/train_lightning.py /data/shards checkpoints --steps 60
python examples/train_lightning.py /data/shards checkpoints --steps 90 --resume checkpoints/step=60.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from byte_transformer import ByteTransformer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from train_bytes import log_step, to_ids

from stager import StagedDataset, StagedLoader
from stager.trainers.lightning import StagerCallback


class Bytes(LightningModule):
    """The model, and a line of the log for every step."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.model = ByteTransformer()
        self._log = log

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch["ids"])
        log_step(self._log, self.global_step + 1, batch, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    dataset = StagedDataset(options.source, batch_size=16, seed=7, decode=False, map=to_ids, drop_last=True)
    loader = StagedLoader(dataset, num_workers=options.workers)
    keep = ModelCheckpoint(
        options.checkpoints, filename="{step}", every_n_train_steps=options.save_every, save_top_k=-1
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[keep, StagerCallback(loader=loader)],
        logger=False,
    )
    trainer.fit(Bytes(options.log), loader, ckpt_path=options.resume, weights_only=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--log", type=Path, default=Path("train.jsonl"))
    train(parser.parse_args())


if __name__ == "__main__":
    main()
