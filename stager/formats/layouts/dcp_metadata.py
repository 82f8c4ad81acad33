"""PyTorch DCP's ``.metadata`` without PyTorch: read by a pickle machine that knows a few names and runs nothing.

Any other name, opcode or excess of size ends in a FormatError.

What torch 2.14 writes is in `torch/distributed/checkpoint/filesystem.py` (`finish`) and `metadata.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from stager.errors import FormatError
from stager.formats.layouts.pickle_machine import Machine, Record, Refused
from stager.formats.names import check_relative_path

METADATA_BYTES_MAX = 256 << 20
_OFFSET_MAX = 1 << 62

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
# Megatron Core keeps every rank's plan in its metadata, and derives both classes.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ROOTS = ("Metadata", "MCoreMetadata")
_DTYPE = re.compile(
    r"bfloat16|bool|bit|bits(?:8|16|1x8|2x4|4x2)|c?(?:half|float|double)|complex(?:32|64|128)|float(?:16|32|64)"
    r"|float[48]_[a-z0-9_]{2,20}|u?int(?:[1-8]|16|32|64)|int|short|long|qu?int(?:8|32)|quint(?:2x4|4x2)"
)
_KNOWN: frozenset[tuple[str, str]] = frozenset(
    [
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(
            (_METADATA, name)
            for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
        ),
        *((_METADATA, name) for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")),
        *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
        *(
            (_PLANNER, name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("PurePosixPath", "WindowsPath")
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a ``.metadata`` file says of the files next to it.

    Attributes:
        shards: Bytes that each referenced file must have at least, by its relative path.
        save_id: Drawn anew for each save, where the version of torch writes one.
    """

    shards: dict[str, int]
    save_id: str = ""


def decode_dcp_metadata(raw: bytes, *, of: str = ".metadata") -> DcpMetadata:
    """The records in ``raw``.

    Raises:
        FormatError: Truncated, too large, not a DCP metadata pickle, or it names anything unknown.
    """
    if len(raw) > METADATA_BYTES_MAX:
        raise FormatError(f"`{of}` has {len(raw)} bytes; at most {METADATA_BYTES_MAX} are read", subject=of)
    try:
        root = Machine(raw, _is_known).run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError):
        raise FormatError(f"`{of}` ends early or is no pickle", subject=of) from None
    except Refused as refused:
        raise FormatError(
            f"`{of}` is refused: {refused}",
            subject=of,
            hint="only what torch.distributed.checkpoint writes is read; was the file altered?",
        ) from None
    return _extract(root, of=of)


def _extract(root: object, *, of: str) -> DcpMetadata:
    storage = _field(root, _ROOTS, "storage_data", of=of)
    if not isinstance(storage, dict):
        raise FormatError(f"`{of}` has no storage records", subject=of)
    shards: dict[str, int] = {}
    for info in storage.values():
        path = _field(info, ("_StorageInfo",), "relative_path", of=of)
        offset = _field(info, ("_StorageInfo",), "offset", of=of)
        length = _field(info, ("_StorageInfo",), "length", of=of)
        if not (_is_count(offset) and _is_count(length)):
            raise FormatError(f"`{of}` has a storage record without offset and length", subject=of)
        if path not in shards:
            check_relative_path(path, of=f"{of}: relative_path")
        shards[path] = max(shards.get(path, 0), offset + length)
    meta = _state(root).get("storage_meta")
    save_id = _state(meta).get("save_id") if isinstance(meta, Record) else None
    return DcpMetadata(shards, save_id if isinstance(save_id, str) else "")


def _field(record: object, kinds: Collection[str], name: str, *, of: str) -> Any:
    if not isinstance(record, Record) or record.kind.name not in kinds:
        raise FormatError(f"`{of}` has no {' or '.join(kinds)} where one belongs", subject=of)
    return _state(record).get(name)


def _state(record: object) -> dict[Any, Any]:
    state = record.state if isinstance(record, Record) else None
    return state if isinstance(state, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _OFFSET_MAX


def _is_known(module: str, name: str) -> bool:
    return (module, name) in _KNOWN or (module == "torch" and _DTYPE.fullmatch(name) is not None)
