"""Checkpoints by the frameworks' documented rules: names, order and content as their sources give them, made without them.

Where a framework runs here, `tests/frameworks` has it write its own. What stands here is every layout, so that each file of
each can be taken away, cut and aged.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from stager.formats.layouts.api import Candidate, Entry, Verdict
from stager.formats.layouts.detection import judge

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS


@dataclass(frozen=True)
class Made:
    """A checkpoint as a framework leaves it.

    Attributes:
        layout: The adapter that must recognise it.
        name: Of the directory, or of the only file.
        files: Bodies by path, in the order in which they are written, a second apart.
        needed: Without any one of these it is not complete.
        unchecked: Those of them whose format does not tell their end; only an empty one is noticed.
        markers: What says "complete" to the framework, in order.
        step: What it is a checkpoint of.
        ranks: How many ranks write it; told to the adapter.
        beside: Files next to it.
    """

    layout: str
    name: str
    files: Mapping[str, bytes]
    needed: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    step: int | None = 100
    ranks: int | None = None
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_file(self) -> bool:
        return list(self.files) == [self.name]

    def without(self, path: str) -> Made:
        return replace(self, files={other: body for other, body in self.files.items() if other != path})

    def having(self, path: str, body: bytes) -> Made:
        """With this body at ``path``: where it stood, or last if it is new."""
        return replace(self, files={**self.files, path: body})


def verdict_on(
    made: Made,
    *,
    layout: str = "auto",
    late: str | None = None,
    node_local: bool = False,
    ranks: int | None = None,
) -> Verdict:
    """What the adapters say; ``late`` names a file that was written again after everything else."""
    listing = {
        path: Entry(len(body), START_NS + number * SECOND_NS, number + 1)
        for number, (path, body) in enumerate(made.files.items())
    }
    if late is not None:
        listing[late] = replace(listing[late], mtime_ns=START_NS + (len(listing) + 1) * SECOND_NS)

    def read(path: str, offset: int, size: int) -> bytes:
        return made.files[path][offset : offset + size]

    is_file = made.is_file
    wanted = made.ranks if ranks is None else ranks
    return judge(
        Candidate(made.name, is_file, listing, read, wanted, made.beside.get, node_local), layout=layout
    )


def torch_body(facts: Mapping[str, Any] | None = None, *, tensor_bytes: int = 2048) -> bytes:
    """A file of `torch.save` around a dictionary: a zip of stored members, its pickle first."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(dict(facts or {}), protocol=2))
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(range(256)) * (tensor_bytes // 256))
        archive.writestr("archive/version", b"3\n")
    return whole.getvalue()


def safetensors_body(tensor_bytes: int = 512) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}})
    return struct.pack("<Q", len(header)) + header.encode() + bytes(tensor_bytes)


def index_body(*names: str) -> bytes:
    return json_body(
        {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    )


def json_body(value: object) -> bytes:
    return json.dumps(value).encode()


class _Named:
    """An object of a class of torch; only its name goes into the pickle."""

    torch_name = ("", "")


def _torch_class(module: str, name: str) -> type[_Named]:
    return type(name, (_Named,), {"torch_name": (module, name)})


_METADATA = _torch_class("torch.distributed.checkpoint.metadata", "Metadata")
_INDEX = _torch_class("torch.distributed.checkpoint.metadata", "MetadataIndex")
_INFO = _torch_class("torch.distributed.checkpoint.filesystem", "_StorageInfo")


class _NamingPickler(pickle._Pickler):  # type: ignore[name-defined,misc]  # typeshed has only the C one
    def save_global(self, obj: object, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _Named):
            self.write(b"c%s\n%s\n" % tuple(part.encode() for part in obj.torch_name))
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    # Classes are saved by another way in.
    dispatch: ClassVar = {**pickle._Pickler.dispatch, type: save_global}  # type: ignore[attr-defined]


_PLAN = _torch_class("torch.distributed.checkpoint.planner", "SavePlan")
_MEGATRON_METADATA = _torch_class("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
_MEGATRON_PLAN = _torch_class("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan")


def dcp_metadata(shards: Mapping[str, int], *, of_megatron: bool = False) -> bytes:
    """DCP's ``.metadata`` that names these files with these bytes; Megatron Core's has every rank's plan as well."""

    def made(kind: type[_Named], **state: object) -> _Named:
        found = kind()
        found.__dict__.update(state)
        return found

    storage = {
        made(_INDEX, fqn=f"w{number}", offset=None, index=None): made(
            _INFO, relative_path=path, offset=0, length=size, transform_descriptors=None
        )
        for number, (path, size) in enumerate(shards.items())
    }
    raw = io.BytesIO()
    _NamingPickler(raw, protocol=2).dump(
        made(
            _MEGATRON_METADATA if of_megatron else _METADATA,
            state_dict_metadata={},
            planner_data=None,
            storage_data=storage,
            storage_meta=None,
            all_local_plans=[made(_PLAN, items=[]), made(_MEGATRON_PLAN, mcore_data={})]
            if of_megatron
            else None,
        )
    )
    return raw.getvalue()


def dcp_files(ranks: int = 2, prefix: str = "") -> dict[str, bytes]:
    """What DCP writes with collectives: the ranks' shards, then the coordinator's ``.metadata``."""
    shards = {f"__{rank}_0.distcp": bytes([rank + 1]) * 700 for rank in range(ranks)}
    metadata = dcp_metadata({path: len(body) for path, body in shards.items()})
    return {f"{prefix}{path}": body for path, body in {**shards, ".metadata": metadata}.items()}


def _with(*parts: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: body for part in parts for path, body in part.items()}


def _torch_dcp() -> Made:
    files = dcp_files()
    return Made("torch_dcp", "step-100", files, tuple(files), markers=(".metadata",))


def _dcp_without_collectives() -> Made:
    files: dict[str, bytes] = {}
    for rank in range(2):
        shard = {f"__{rank}_0.distcp": bytes([rank + 1]) * 700}
        files |= {**shard, f"__{rank}.metadata": dcp_metadata({path: 700 for path in shard})}
    markers = ("__0.metadata", "__1.metadata")
    return Made("torch_dcp", "step-100", files, tuple(files), markers=markers, ranks=2)


def _safetensors_index() -> Made:
    pieces = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    files = {**{piece: safetensors_body() for piece in pieces}, index: index_body(*pieces)}
    # Without the index the pieces' names still tell how many there are; it is then believed after long.
    return Made("safetensors", "step-100", files, tuple(pieces), markers=(index,))


def _safetensors_of_ranks() -> Made:
    files = {f"shard-{rank:05d}-model-{rank:05d}-of-00002.safetensors": safetensors_body() for rank in (1, 2)}
    return Made("safetensors", "step-100", files, tuple(files), ranks=2)


def _safetensors_consolidated() -> Made:
    ranks = {
        f"sharded/shard-{rank:05d}-model-00001-of-00001.safetensors": safetensors_body() for rank in (1, 2)
    }
    root, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    files = {**ranks, root: safetensors_body(), index: index_body(root)}
    return Made("safetensors", "step-100", files, (*ranks, root), markers=(index,), ranks=2)


def _checkpoint_writer() -> Made:
    files = {f"checkpoint_{rank}.pt": torch_body() for rank in range(2)}
    return Made("torch_checkpointing", "step-100", files, tuple(files), ranks=2)


def _torch_checkpointing() -> Made:
    ranks = {f"checkpoint_{rank}.pt": torch_body() for rank in range(2)}
    files = {**ranks, "metadata.pkl": pickle.dumps({"items": list(ranks)})}
    return Made("torch_checkpointing", "step-100", files, tuple(ranks), markers=("metadata.pkl",), ranks=2)


def _deepspeed_files(*, ranks: int = 2, slots: int = 1, stage: int = 2, prefix: str = "") -> dict[str, bytes]:
    facts = {
        "dp_world_size": ranks,
        "mp_world_size": slots,
        "global_steps": 100,
        "optimizer": None,
        "ds_config": {"zero_optimization": {"stage": stage}},
    }
    files: dict[str, bytes] = {}
    for slot in range(slots):
        for rank in range(ranks):
            if stage == 3:
                files[f"zero_pp_rank_{rank}_mp_rank_{slot:02d}_model_states.pt"] = torch_body(facts)
            elif rank == 0:
                files[f"mp_rank_{slot:02d}_model_states.pt"] = torch_body(facts)
        for rank in range(ranks):
            files[f"bf16_zero_pp_rank_{rank}_mp_rank_{slot:02d}_optim_states.pt"] = torch_body()
    return {prefix + path: body for path, body in files.items()}


def _deepspeed(stage: int, *, slots: int = 1) -> Made:
    files = _deepspeed_files(stage=stage, slots=slots)
    return Made("deepspeed", "global_step100", files, tuple(files), beside={"latest": b"global_step100"})


def _deepspeed_pipeline() -> Made:
    layers = {f"layer_{layer:02d}-model_00-model_states.pt": torch_body() for layer in range(3)}
    files = _with(layers, _deepspeed_files(stage=1))
    shards = tuple(path for path in files if path not in layers)
    return Made("deepspeed", "global_step100", files, shards, beside={"latest": b"global_step100"})


def _deepspeed_experts() -> Made:
    facts = {"dp_world_size": 2, "mp_world_size": 1, "global_steps": 100, "optimizer": None}
    experts = {f"layer_0_expert_{expert}_mp_rank_00_model_states.pt": torch_body() for expert in range(2)}
    optimizers = {f"expp_rank_{rank}_mp_rank_00_optim_states.pt": torch_body() for rank in range(2)}
    files = _with(experts, optimizers, {"mp_rank_00_model_states.pt": torch_body(facts)})
    return Made("deepspeed", "global_step100", files, ("mp_rank_00_model_states.pt",))


def _deepspeed_universal() -> Made:
    parts = {f"zero/layer.weight/{part}.pt": torch_body() for part in ("fp32", "exp_avg", "exp_avg_sq")}
    files = _with(parts, {"mp_rank_00_model_states.pt": torch_body()})
    name = "global_step100_universal"
    return Made(
        "deepspeed_universal",
        name,
        files,
        ("zero/layer.weight/fp32.pt",),
        beside={"latest_universal": name.encode()},
    )


def _trainer_files(ranks: int = 1) -> dict[str, bytes]:
    randoms = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    return {
        "config.json": json_body({"model_type": "bert"}),
        "model.safetensors": safetensors_body(),
        "training_args.bin": torch_body(),
        "optimizer.pt": torch_body(),
        "scheduler.pt": torch_body(),
        **{name: torch_body() for name in randoms},
        "trainer_state.json": json_body({"global_step": 100, "log_history": []}),
    }


_TRAINER_NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
_RANDOM = "rng_state"


def _trainer(ranks: int) -> Made:
    files = _trainer_files(ranks)
    randoms = tuple(path for path in files if path.startswith(_RANDOM))
    return Made(
        "hf_trainer",
        "checkpoint-100",
        files,
        (*_TRAINER_NEEDED, *randoms),
        markers=("trainer_state.json",),
        ranks=ranks,
    )


def _trainer_sharded() -> Made:
    pieces = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    files = _with(
        {"config.json": json_body({"model_type": "bert"})},
        {piece: safetensors_body() for piece in pieces},
        {index: index_body(*pieces)},
        {path: body for path, body in _trainer_files().items() if path != "model.safetensors"},
    )
    needed = (*pieces, index, *(path for path in _TRAINER_NEEDED if path != "model.safetensors"))
    return Made("hf_trainer", "checkpoint-100", files, needed, markers=("trainer_state.json",), ranks=1)


def _trainer_fsdp() -> Made:
    model, optimizer = dcp_files(2, "pytorch_model_fsdp_0/"), dcp_files(2, "optimizer_0/")
    rest = _trainer_files(2)
    del rest["model.safetensors"], rest["optimizer.pt"]
    markers = ("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata", "trainer_state.json")
    needed = (*model, *optimizer, "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")
    return Made(
        "hf_trainer",
        "checkpoint-100",
        _with(model, optimizer, rest),
        needed,
        markers=markers,
        ranks=2,
    )


def _trainer_deepspeed() -> Made:
    shards = _deepspeed_files(stage=3, prefix="global_step100/")
    rest = _trainer_files(2)
    del rest["model.safetensors"], rest["optimizer.pt"], rest["scheduler.pt"]
    files = _with(shards, {"latest": b"global_step100", "zero_to_fp32.py": b"# converts\n"}, rest)
    needed = (*shards, "latest", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")
    markers = ("latest", "trainer_state.json")
    return Made("hf_trainer", "checkpoint-100", files, needed, markers=markers, ranks=2)


def _accelerate_files(ranks: int = 2) -> dict[str, bytes]:
    return {
        "model.safetensors": safetensors_body(),
        "optimizer.bin": torch_body(),
        "scheduler.bin": torch_body(),
        "sampler.bin": torch_body(),
        **{f"random_states_{rank}.pkl": torch_body() for rank in range(ranks)},
        "custom_checkpoint_0.pkl": torch_body(),
    }


def _accelerate() -> Made:
    files = _accelerate_files()
    needed = ("random_states_0.pkl", "random_states_1.pkl")
    return Made("accelerate", "checkpoint_100", files, needed, ranks=2)


def _accelerate_fsdp() -> Made:
    model, optimizer = dcp_files(2, "pytorch_model_fsdp_0/"), dcp_files(2, "optimizer_0/")
    rest = _accelerate_files()
    del rest["model.safetensors"], rest["optimizer.bin"]
    needed = (*model, *optimizer, "random_states_0.pkl", "random_states_1.pkl")
    markers = ("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata")
    files = _with(model, optimizer, rest)
    return Made("accelerate", "checkpoint_100", files, needed, markers=markers, ranks=2)


def _accelerate_deepspeed() -> Made:
    shards = _deepspeed_files(prefix="pytorch_model/")
    rest = {f"random_states_{rank}.pkl": torch_body() for rank in range(2)}
    files = _with(shards, {"latest": b"pytorch_model"}, rest)
    return Made("accelerate", "checkpoint_100", files, (*shards, *rest), markers=("latest",), ranks=2)


_LIGHTNING = {"epoch": 1, "global_step": 100, "pytorch-lightning_version": "2.6.6"}


def _lightning_file() -> Made:
    name = "epoch=1-step=100.ckpt"
    return Made("lightning", name, {name: torch_body(_LIGHTNING)}, (name,))


def _lightning_fsdp() -> Made:
    files = _with(dcp_files(), {"meta.pt": torch_body(_LIGHTNING)})
    markers = (".metadata", "meta.pt")
    return Made("lightning", "epoch=1-step=100.ckpt", files, tuple(files), markers=markers)


def _lightning_deepspeed() -> Made:
    shards = _deepspeed_files(prefix="checkpoint/")
    files = _with(shards, {"latest": b"checkpoint", "zero_to_fp32.py": b"# converts\n"})
    return Made("lightning", "epoch=1-step=100.ckpt", files, tuple(shards), markers=("latest",))


_CORE = {"metadata.json": json_body({"sharded_backend": "torch_dist", "sharded_backend_version": 1})}
_TRACKED = {"latest_checkpointed_iteration.txt": b"100"}


def _megatron(*, tracked: bool = True) -> Made:
    files = _with({"common.pt": torch_body()}, dcp_files(), _CORE)
    needed = tuple(path for path in files if path != "common.pt")
    beside = _TRACKED if tracked else {}
    return Made(
        "megatron", "iter_0000100", files, needed, markers=(".metadata", "metadata.json"), beside=beside
    )


def _megatron_legacy() -> Made:
    slots = ("mp_rank_00_000", "mp_rank_00_001")
    files = {
        f"{slot}/{name}": torch_body()
        for slot in slots
        for name in ("model_optim_rng.pt", "distrib_optim.pt")
    }
    # Nothing tells how many model-parallel ranks there are but the tracker, which comes after a barrier.
    return Made("megatron", "iter_0000100", files, (), beside=_TRACKED)


def _megatron_bridge() -> Made:
    state = torch_body({"step": 100})
    files = _with(dcp_files(), _CORE, {"train_state.pt": state, "run_config.yaml": b"model: {}\n"})
    return Made(
        "megatron_bridge",
        "iter_0000100",
        files,
        tuple(files),
        unchecked=("run_config.yaml",),
        markers=(".metadata", "metadata.json", "train_state.pt", "run_config.yaml"),
        beside={**_TRACKED, "latest_train_state.pt": state},
    )


def _nvrx() -> Made:
    files = {f"{rank}/iter_0000100_{rank}_local.pt": torch_body() for rank in range(2)}
    return Made("nvrx", "session", files, tuple(files), ranks=2)


def _nemo() -> Made:
    weights = {f"weights/{path}": body for path, body in _with(dcp_files(), _CORE).items()}
    files = _with(weights, {"context/io.json": json_body({}), "context/model.yaml": b"model: {}\n"})
    markers = ("weights/.metadata", "weights/metadata.json")
    return Made("nemo", "model--step=100-last", files, tuple(weights), markers=markers)


def _orbax(*, marked: bool) -> Made:
    database = "state/ocdbt.process_0/manifest.ocdbt"
    files = {
        database: b"\x0c\xdb\x3a\x2a" + bytes(60),
        "state/ocdbt.process_0/d/0123": bytes(300),
        "state/_METADATA": json_body({"tree_metadata": {}}),
        "state/manifest.ocdbt": b"\x0c\xdb\x3a\x2a" + bytes(60),
        "_CHECKPOINT_METADATA": json_body({"commit_timestamp_nsecs": START_NS}),
    }
    success = {"commit_success.txt": b"Checkpoint commit was successful to step 100"} if marked else {}
    markers = ("_CHECKPOINT_METADATA", *success)
    return Made(
        "orbax",
        "100",
        {**files, **success},
        (database, "state/manifest.ocdbt", "_CHECKPOINT_METADATA"),
        unchecked=(database, "state/manifest.ocdbt"),
        markers=markers,
    )


def _dlrover() -> Made:
    files = _deepspeed_files()
    beside = {"dlrover_latest.txt": b"100", "latest": b"100"}
    return Made("dlrover", "global_step100", files, (), beside=beside)


def _torchsnapshot() -> Made:
    manifest = (
        "version: 0.1.0\nworld_size: 2\nmanifest:\n"
        "  0/model/w:\n    type: Tensor\n    location: replicated/model/w\n"
        "  1/rng:\n    type: object\n    location: 1/rng\n"
    )
    files = {"replicated/model/w": bytes(500), "1/rng": bytes(50), ".snapshot_metadata": manifest.encode()}
    return Made(
        "torchsnapshot",
        "step-100",
        files,
        tuple(files),
        unchecked=("replicated/model/w", "1/rng"),
        markers=(".snapshot_metadata",),
    )


def _composer_file() -> Made:
    name = "ep1-ba100-rank0.pt"
    return Made("composer", name, {name: torch_body()}, (name,))


def _composer_sharded() -> Made:
    files = dcp_files()
    return Made("composer", "ep1-ba100", files, tuple(files), markers=(".metadata",))


def _torch_file() -> Made:
    return Made("torch_file", "model-100.pt", {"model-100.pt": torch_body()}, ("model-100.pt",))


def _safetensors_file() -> Made:
    name = "model-100.safetensors"
    return Made("safetensors", name, {name: safetensors_body()}, (name,))


MADE: Mapping[str, Made] = {
    "1 DCP": _torch_dcp(),
    "2 DCP without collectives": _dcp_without_collectives(),
    "3 safetensors with an index": _safetensors_index(),
    "3 safetensors of ranks": _safetensors_of_ranks(),
    "3 safetensors consolidated": _safetensors_consolidated(),
    "4 CheckpointWriter": _checkpoint_writer(),
    "5 torch_checkpointing": _torch_checkpointing(),
    "7 DeepSpeed ZeRO-2": _deepspeed(2),
    "7 DeepSpeed ZeRO-3": _deepspeed(3),
    "7 DeepSpeed tensor parallel": _deepspeed(2, slots=2),
    "7 DeepSpeed pipeline": _deepspeed_pipeline(),
    "7 DeepSpeed experts": _deepspeed_experts(),
    "9 DeepSpeed universal": _deepspeed_universal(),
    "11 Trainer": _trainer(1),
    "11 Trainer of ranks": _trainer(3),
    "11 Trainer with sharded weights": _trainer_sharded(),
    "11 Trainer with FSDP": _trainer_fsdp(),
    "11 Trainer with DeepSpeed": _trainer_deepspeed(),
    "14 Accelerate": _accelerate(),
    "14 Accelerate with FSDP": _accelerate_fsdp(),
    "14 Accelerate with DeepSpeed": _accelerate_deepspeed(),
    "15 Lightning file": _lightning_file(),
    "16 Lightning FSDP": _lightning_fsdp(),
    "17 Lightning DeepSpeed": _lightning_deepspeed(),
    "18 Megatron": _megatron(),
    "19 Megatron legacy": _megatron_legacy(),
    "20 Megatron non-persistent": _megatron(tracked=False),
    "21 Megatron-Bridge": _megatron_bridge(),
    "22 NVRx": _nvrx(),
    "23 NeMo": _nemo(),
    "24 Orbax": _orbax(marked=False),
    "25 Orbax with its marker": _orbax(marked=True),
    "27 DLRover": _dlrover(),
    "29 torchsnapshot": _torchsnapshot(),
    "30 Composer file": _composer_file(),
    "30 Composer sharded": _composer_sharded(),
    "36 torch.save": _torch_file(),
    "36 safetensors file": _safetensors_file(),
}
