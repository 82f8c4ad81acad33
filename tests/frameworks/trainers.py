"""Run by the tests in processes of their own, one a rank: the frameworks train, save, and resume from what was restored.

``python trainers.py COMMAND FOLDER [ARGUMENT...]``; rank, world and rendezvous come from the environment, as from torchrun.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")
import torch  # noqa: E402
from torch import nn  # noqa: E402

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
SLOW_S = 0.3


def slowly(module: Any, name: str) -> None:
    """Have a function of a framework rest before and after it writes, so that half a checkpoint stands there for long."""
    fast: Callable[..., Any] = getattr(module, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(SLOW_S * (1 + RANK))
        result = fast(*arguments, **named)
        time.sleep(SLOW_S)
        return result

    setattr(module, name, slow)


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def batches(start: int, count: int) -> list[torch.Tensor]:
    """Batch k is the same in every run."""
    return [
        torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        for number in range(start, start + count)
    ]


def begin() -> None:
    torch.distributed.init_process_group("gloo")


def end() -> None:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# --- torch DCP over FSDP2


def _fsdp() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], dict[str, Any]]]:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters())

    def state() -> dict[str, Any]:
        whole, optim = get_state_dict(model, optimizer)
        return {"model": whole, "optim": optim}

    return model, optimizer, state


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, count: int) -> float:
    loss = torch.tensor(0.0)
    for batch in batches(start, count):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def dcp_save(folder: str) -> None:
    """Six checkpoints, in turn by `save` and `async_save`, the last of which are two in the same directory; only two are
    kept."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    slowly(FileSystemWriter, "write_data")
    begin()
    gloo = torch.distributed.new_group(backend="gloo")
    model, optimizer, state = _fsdp()
    future = None
    for step in range(1, 7):
        _train(model, optimizer, step, 1)
        place = f"{folder}/step-{step}"
        if step % 2:
            dcp.save(state(), checkpoint_id=place)
        else:
            future = dcp.async_save(state(), checkpoint_id=place, process_group=gloo)
            future.result()
        time.sleep(1.5)
        if RANK == 0 and step > 2:
            shutil.rmtree(f"{folder}/step-{step - 2}")
    end()


def dcp_commit(folder: str) -> None:
    """Saved through our storage writer."""
    import torch.distributed.checkpoint as dcp

    from stager.trainers.dcp import StagerWriter

    begin()
    model, optimizer, state = _fsdp()
    loss = _train(model, optimizer, 1, 2)
    dcp.save(state(), storage_writer=StagerWriter(f"{folder}/step-2", step=2, metrics={"loss": loss}))
    end()


def dcp_fetch(folder: str, run: str) -> None:
    """Loaded through our storage reader, which restores what is not here: one rank does, the other waits."""
    import torch.distributed.checkpoint as dcp

    from stager.trainers.dcp import StagerReader

    begin()
    model, optimizer, state = _fsdp()
    resumed = state()
    dcp.load(resumed, storage_reader=StagerReader(f"{folder}/step-2", run=run))
    _train(model, optimizer, 1, 2)
    mine = state()
    assert all(
        torch.equal(resumed["model"][key].to_local(), mine["model"][key].to_local()) for key in mine["model"]
    )
    end()


def dcp_resume(folder: str, step: str) -> None:
    """What was restored, trained on, ends where a run that was never interrupted ends."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    begin()
    model, optimizer, state = _fsdp()
    resumed = state()
    dcp.load(resumed, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=resumed["model"], optim_state_dict=resumed["optim"])
    loss = _train(model, optimizer, int(step) + 1, 2)
    other, its_optimizer, _ = _fsdp()
    assert loss == _train(other, its_optimizer, 1, int(step) + 2)
    end()


# --- transformers


def _trainer(folder: str, steps: int, *callbacks: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    generator = torch.Generator().manual_seed(3)
    examples = [
        {
            "input_ids": torch.randint(0, 50, (8,), generator=generator),
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": number % 2,
        }
        for number in range(64)
    ]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
    )
    model = BertForSequenceClassification(config)
    return Trainer(model=model, args=arguments, train_dataset=examples, callbacks=list(callbacks))


def transformers_save(folder: str) -> None:
    """The Trainer saves at steps 2 and 4."""
    slowly(torch, "save")
    _trainer(folder, 4).train()


def transformers_commit(folder: str) -> None:
    """The same, and our callback tells of each checkpoint when all ranks have written."""
    from stager.trainers.hugging_face import StagerCallback

    slowly(torch, "save")
    _trainer(folder, 4, StagerCallback()).train()


def transformers_resume(folder: str) -> None:
    """The Trainer itself finds the newest checkpoint in the directory, and goes on from its step."""
    trainer = _trainer(folder, 6)
    trainer.train(resume_from_checkpoint=True)
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == [1, 2, 3, 4, 5, 6], steps
    assert trainer.state.global_step == 6


# --- Accelerate


def _accelerated(folder: str) -> tuple[Any, nn.Module, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler))


def accelerate_save(folder: str) -> None:
    """`save_state` twice, into `checkpoints/checkpoint_<i>`."""
    slowly(torch, "save")
    accelerator, model, optimizer, scheduler = _accelerated(folder)
    for step in range(2):
        _train(model, optimizer, step, 1)
        scheduler.step()
        accelerator.save_state()
    accelerator.wait_for_everyone()


def accelerate_resume(folder: str) -> None:
    """Trained on from the restored state, it ends where a run that was never interrupted ends."""
    accelerator, model, optimizer, _ = _accelerated(folder)
    accelerator.load_state(folder)
    rate = optimizer.param_groups[0]["lr"]
    loss = _train(model, optimizer, 2, 2)
    _, other, its_optimizer, its_scheduler = _accelerated(folder)
    for step in range(2):
        _train(other, its_optimizer, step, 1)
        its_scheduler.step()
    assert rate == its_optimizer.param_groups[0]["lr"]
    assert loss == _train(other, its_optimizer, 2, 2)
    accelerator.wait_for_everyone()


# --- Lightning


def _lightning(folder: str, steps: int, strategy: Any = "auto", *callbacks: Any) -> tuple[Any, Any, Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.losses: list[tuple[int, float]] = []

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = (self.model(batch) - batch).square().mean()
            self.losses.append((self.global_step, loss.item()))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def configure_model(self) -> None:
            if strategy != "auto":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    saving = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_steps=steps,
        callbacks=[saving, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(torch.stack(batches(0, 12)), batch_size=None)
    return trainer, Module(), loader


def lightning_save(folder: str) -> None:
    """`ModelCheckpoint` saves at steps 2 and 4, and `last.ckpt`."""
    slowly(torch, "save")
    trainer, module, loader = _lightning(folder, 4)
    trainer.fit(module, loader)


def lightning_resume(folder: str) -> None:
    """`ckpt_path` with the restored file."""
    trainer, module, loader = _lightning(f"{folder}-again", 6)
    trainer.fit(module, loader, ckpt_path=folder)
    assert trainer.global_step == 6 and [step for step, _ in module.losses] == [4, 5], module.losses


def lightning_sharded_save(folder: str) -> None:
    """FSDP2 through `ModelParallelStrategy`: a directory with DCP's files and `meta.pt`."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    slowly(FileSystemWriter, "write_data")
    strategy = ModelParallelStrategy(
        data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer, module, loader = _lightning(folder, 4, strategy)
    trainer.fit(module, loader)


def lightning_commit(folder: str) -> None:
    """Our callback tells of each: of files by one process, of directories by two."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from stager.trainers.lightning import StagerCallback

    strategy: Any = "auto"
    if WORLD > 1:
        strategy = ModelParallelStrategy(
            data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo"
        )
    trainer, module, loader = _lightning(folder, 4, strategy, StagerCallback())
    trainer.fit(module, loader)


def lightning_sharded_resume(folder: str) -> None:
    """`ckpt_path` with the restored directory."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer, module, loader = _lightning(f"{folder}-again", 6, strategy)
    trainer.fit(module, loader, ckpt_path=folder)
    assert trainer.global_step == 6 and [step for step, _ in module.losses] == [4, 5], module.losses


# --- DeepSpeed


def _deepspeed(stage: int) -> Any:
    import deepspeed

    # An operation in shared memory that would be compiled here, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    return engine


def _train_engine(engine: Any, start: int, count: int) -> float:
    loss = torch.tensor(0.0)
    for batch in batches(start, count):
        batch = batch.to(torch.bfloat16)
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def deepspeed_save(folder: str, stage: str) -> None:
    """`save_checkpoint` at steps 1 and 2, whose `latest` rank 0 writes before the other ranks have their shards."""
    engine = _deepspeed(int(stage))
    slowly(torch, "save")
    for step in range(2):
        _train_engine(engine, step, 1)
        engine.save_checkpoint(folder)


def deepspeed_resume(folder: str, stage: str) -> None:
    """`load_checkpoint` finds the tag by `latest`; trained on, it ends where a run that was not interrupted ends."""
    engine = _deepspeed(int(stage))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 2
    loss = _train_engine(engine, 2, 2)
    other = _deepspeed(int(stage))
    assert loss == _train_engine(other, 0, 4)


# --- Megatron Core


def _megatron(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    local = torch.arange(32 * 64, dtype=torch.float32).reshape(32, 64) + 10_000 * RANK + value
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", local, (0, RANK, WORLD)),
        "iteration": int(value),
    }


def megatron_save(folder: str) -> None:
    """`dist_checkpointing.save`, and then the tracker, as Megatron-LM's `save_checkpoint` writes it (its training script is
    not a package). Without CUDA there is nothing to wait for on its stream."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    slowly(FileSystemWriter, "write_data")
    begin()
    for step in (1, 2):
        place = f"{folder}/iter_{step:07d}"
        if RANK == 0:
            os.makedirs(place)
        torch.distributed.barrier()
        dist_checkpointing.save(_megatron(float(step)), place)
        torch.distributed.barrier()
        if RANK == 0:
            with open(f"{folder}/latest_checkpointed_iteration.txt", "w") as tracker:
                tracker.write(str(step))
    end()


def megatron_resume(folder: str) -> None:
    """The tracker beside the restored directory tells the iteration; `dist_checkpointing.load` gives its values."""
    from megatron.core import dist_checkpointing

    begin()
    with open(f"{folder}/latest_checkpointed_iteration.txt") as tracker:
        step = int(tracker.read())
    wanted = {"weight": _megatron(0.0)["weight"]}
    found = dist_checkpointing.load(wanted, f"{folder}/iter_{step:07d}")
    assert torch.equal(found["weight"], _megatron(float(step))["weight"].data) and found["iteration"] == step
    end()


# --- NVRx


def _nvrx(root: str) -> Any:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    return LocalCheckpointManager(root, "session")


def nvrx_save(folder: str) -> None:
    """Two local checkpoints, of which the manager keeps one. Its state dictionary demands CUDA; here it stays on the CPU."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

    def on_cpu(values: dict[str, Any]) -> Any:
        made = BasicTensorAwareStateDict({})
        made.state_dict = values
        return made

    slowly(torch, "save")
    begin()
    manager = _nvrx(folder)
    for step in (1, 2):
        manager.save(on_cpu({"w": torch.full((64, 64), float(10 * step + RANK)), "step": step}), step)
        time.sleep(3.5)
    end()


def nvrx_resume(root: str) -> None:
    """`find_latest` and `load` from the restored directory."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

    BasicTensorAwareStateDict.restore_tensor_device = lambda *_, **__: None
    begin()
    manager = _nvrx(root)
    assert manager.find_latest() == 2
    state, _ = manager.load()
    assert all(torch.equal(w, torch.full((64, 64), float(20 + RANK))) for w in state.tensors)
    end()


# --- torchtitan


def _titan(folder: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    class Optimizers:
        def state_dict(self) -> dict[str, Any]:
            return get_optimizer_state_dict(model, optimizer)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_optimizer_state_dict(model, optimizer, state)

    class Schedulers:
        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model, optimizer, _ = _fsdp()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2, async_mode="async"),
        dataloader=None,
        model_parts=[model],
        optimizers=Optimizers(),  # type: ignore[arg-type]
        lr_schedulers=Schedulers(),  # type: ignore[arg-type]
        states={},
        sd_adapter=None,
        base_folder=folder,
    )
    return model, optimizer, manager


def torchtitan_save(folder: str) -> None:
    """Its checkpoint manager saves steps 1 to 4 in the background and keeps two; the trainer around it is ours."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    slowly(FileSystemWriter, "write_data")
    begin()
    model, optimizer, manager = _titan(folder)
    for step in range(1, 5):
        _train(model, optimizer, step, 1)
        manager.save(step)
        manager.maybe_wait_for_saving()
        time.sleep(1.5)
    manager.close()
    end()


def torchtitan_resume(folder: str) -> None:
    """It finds the newest step by itself; trained on, it ends where a run that was not interrupted ends."""
    begin()
    model, optimizer, manager = _titan(folder)
    assert manager.load()
    loss = _train(model, optimizer, 5, 2)
    other, its_optimizer, _ = _fsdp()
    assert loss == _train(other, its_optimizer, 1, 6)
    manager.close()
    end()


# --- Orbax


def orbax_save(folder: str) -> None:
    """A `CheckpointManager` saves steps 1 and 2, in the background."""
    import numpy
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            state = {"w": numpy.full((256, 256), float(step)), "step": step}
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()


def orbax_resume(folder: str) -> None:
    """A manager over the restored directory finds the step and restores it."""
    import numpy
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == 2
        wanted = {"w": numpy.zeros((256, 256)), "step": 0}
        found = manager.restore(2, args=ocp.args.StandardRestore(wanted))
    assert (found["w"] == 2.0).all() and found["step"] == 2


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    # Some frameworks leave threads that keep the interpreter from ending.
    sys.stdout.flush()
    os._exit(0)
