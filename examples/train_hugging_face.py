"""Train from staged shards with the Hugging Face Trainer; the callback keeps the place in the data with each checkpoint.

python examples/train_hugging_face.py /data/shards checkpoints --steps 60
python examples/train_hugging_face.py /data/shards checkpoints --steps 90 --resume checkpoints/checkpoint-60
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from byte_transformer import ByteTransformer
from train_bytes import log_step, to_ids
from transformers import Trainer, TrainingArguments

from stager import StagedDataset, StagedLoader, read_commit
from stager.trainers.hugging_face import StagerCallback


class BytesTrainer(Trainer):  # type: ignore[misc]  # transformers tells no types
    """Takes its batches from a `StagedLoader`, as they are."""

    def __init__(self, loader: StagedLoader, log: Path, **named: Any) -> None:
        super().__init__(**named)
        self._loader = loader
        self._log = log

    def get_train_dataloader(self) -> StagedLoader:
        return self._loader

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        loss: torch.Tensor = model(inputs["ids"])
        log_step(self._log, self.state.global_step + 1, inputs, loss)
        return loss


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    dataset = StagedDataset(options.source, batch_size=16, seed=7, decode=False, map=to_ids, drop_last=True)
    loader = StagedLoader(dataset, num_workers=options.workers)
    if options.resume:
        marker = read_commit(options.resume)
        if marker is None or marker.cursor is None:
            sys.exit(f"{options.resume} was not committed with its place in the data")
        loader.load_state_dict(dict(marker.cursor))
    arguments = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        save_steps=options.save_every,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        # The loader stands at the right place by itself: the Trainer need not read up to it.
        ignore_data_skip=True,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = BytesTrainer(
        loader,
        options.log,
        model=ByteTransformer(),
        args=arguments,
        train_dataset=dataset,
        callbacks=[StagerCallback(loader=loader)],
    )
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)


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
