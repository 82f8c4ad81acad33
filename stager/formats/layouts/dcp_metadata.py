"""PyTorch DCP's ``.metadata`` without PyTorch: a pickle machine that knows a few names and runs nothing.

The file is a pickle, and a pickle is a program. This machine executes the opcodes that such a file needs and no
others, calls nothing, and turns the classes it knows into plain records; any other name, opcode or excess of size ends
in a FormatError. `pickle.Unpickler` with a strict `find_class` would not do: one opcode makes it reserve gigabytes, and
nested tuples as keys make it recurse without end.

What torch 2.14 writes is in `torch/distributed/checkpoint/filesystem.py` (`finish`) and `metadata.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stager.errors import FormatError
from stager.formats.names import check_relative_path

METADATA_BYTES_MAX = 256 << 20
_OBJECTS_MAX = 32_000_000
_STACK_MAX = 100_000
_MARKS_MAX = 200
_CHECK_BYTES = 1 << 16
_OFFSET_MAX = 1 << 62

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
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


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the pickle names; never called."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class _Record:
    """An object that the pickle makes: what it would be made from, and its state."""

    kind: _Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


def decode_dcp_metadata(raw: bytes, *, of: str = ".metadata") -> DcpMetadata:
    """The records in ``raw``.

    Raises:
        FormatError: Truncated, too large, not a DCP metadata pickle, or it names anything unknown.
    """
    if len(raw) > METADATA_BYTES_MAX:
        raise FormatError(f"`{of}` has {len(raw)} bytes; at most {METADATA_BYTES_MAX} are read", subject=of)
    try:
        root = _Machine(raw).run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError):
        raise FormatError(f"`{of}` ends early or is no pickle", subject=of) from None
    except _Refused as refused:
        raise FormatError(
            f"`{of}` is refused: {refused}",
            subject=of,
            hint="only what torch.distributed.checkpoint writes is read; was the file altered?",
        ) from None
    return _extract(root, of=of)


def _extract(root: object, *, of: str) -> DcpMetadata:
    storage = _field(root, "Metadata", "storage_data", of=of)
    if not isinstance(storage, dict):
        raise FormatError(f"`{of}` has no storage records", subject=of)
    shards: dict[str, int] = {}
    for info in storage.values():
        path = _field(info, "_StorageInfo", "relative_path", of=of)
        offset = _field(info, "_StorageInfo", "offset", of=of)
        length = _field(info, "_StorageInfo", "length", of=of)
        if not (_is_count(offset) and _is_count(length)):
            raise FormatError(f"`{of}` has a storage record without offset and length", subject=of)
        if path not in shards:
            check_relative_path(path, of=f"{of}: relative_path")
        shards[path] = max(shards.get(path, 0), offset + length)
    meta = _state(root).get("storage_meta")
    save_id = _state(meta).get("save_id") if isinstance(meta, _Record) else None
    return DcpMetadata(shards, save_id if isinstance(save_id, str) else "")


def _field(record: object, kind: str, name: str, *, of: str) -> Any:
    if not isinstance(record, _Record) or record.kind.name != kind:
        raise FormatError(f"`{of}` has no {kind} where one belongs", subject=of)
    return _state(record).get(name)


def _state(record: object) -> dict[Any, Any]:
    state = record.state if isinstance(record, _Record) else None
    return state if isinstance(state, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _OFFSET_MAX


class _Refused(Exception):
    """The pickle wants what this machine does not do."""


@dataclass(slots=True)
class _Machine:
    """Stack, marks and memo of one run. Nothing here recurses, and every growth is bounded."""

    raw: bytes
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        raw, stack, memo = self.raw, self.stack, self.memo
        position = check_at = 0
        while True:
            if position >= check_at:
                # An opcode takes a byte at least and adds an object at most, so now and then is often enough.
                check_at = position + _CHECK_BYTES
                if len(stack) > _STACK_MAX or len(memo) > _OBJECTS_MAX:
                    raise _Refused(
                        f"it holds more than {_STACK_MAX} or remembers more than {_OBJECTS_MAX} objects"
                    )
            code = raw[position]
            position += 1
            # The four that make up half of every such file stand first; all others go through the table.
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(raw[position : position + 4], "little")])
                position += 4
            elif code == 0x4B:  # BININT1
                stack.append(raw[position])
                position += 1
            elif code == 0x68:  # BINGET
                stack.append(memo[raw[position]])
                position += 1
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or self.marks or position != len(raw):
                    raise _Refused("it ends with something left over")
                return stack[0]
            else:
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise _Refused(f"opcode {code:#04x} at byte {position - 1}")
                self.position = position
                operation(self)
                position = self.position

    def take(self, size: int) -> bytes:
        piece = self.raw[self.position : self.position + size]
        if len(piece) != size:
            raise IndexError
        self.position += size
        return piece

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def text(self, size: int) -> str:
        return str(self.take(size), "utf-8", "surrogatepass")

    def line(self) -> str:
        end = self.raw.find(b"\n", self.position, self.position + 500)
        if end < 0:
            raise IndexError
        found = str(self.raw[self.position : end], "ascii")
        self.position = end + 1
        return found

    def mark(self) -> None:
        if len(self.marks) >= _MARKS_MAX:
            raise _Refused(f"it nests deeper than {_MARKS_MAX}")
        self.marks.append(len(self.stack))

    def items(self) -> list[Any]:
        """What was stacked since the last mark."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, added: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise _Refused("it appends to what is no list")
        target.extend(added)

    def update(self, added: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, _Record) and target.kind.name == "OrderedDict":
            target.state = target.state if isinstance(target.state, dict) else {}
            target = target.state
        if not isinstance(target, dict) or len(added) % 2:
            raise _Refused("it sets items of what is no dictionary")
        for place in range(0, len(added), 2):
            target[_as_key(added[place])] = added[place + 1]

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or not _is_known(module, name):
            raise _Refused(f"it names `{str(module)[:80]}.{str(name)[:80]}`")
        self.stack.append(_Name(module, name))

    def make(self) -> None:
        """REDUCE and NEWOBJ: an object of a known class, made of arguments that are kept and not used."""
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if not isinstance(kind, _Name) or not isinstance(arguments, tuple):
            raise _Refused("it calls what is no known class")
        self.stack.append(_Record(kind, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _Record):
            raise _Refused("it gives state to what is no object")
        target.state = state


def _is_known(module: str, name: str) -> bool:
    return (module, name) in _KNOWN or (module == "torch" and _DTYPE.fullmatch(name) is not None)


def _as_key(key: Any) -> Any:
    # Only keys whose hash costs little: a nest of tuples may take for ever to hash.
    plain = str | int | bytes | float | None
    if isinstance(key, plain | _Record) or (
        isinstance(key, tuple) and all(isinstance(part, plain) for part in key)
    ):
        return key
    raise _Refused("it uses a nested key")


def _pop_value(machine: _Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pair(machine: _Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.update([key, value])


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    machine.name(machine.stack.pop(), name)


def _frame(machine: _Machine) -> None:
    if machine.number(8) > len(machine.raw) - machine.position:
        raise IndexError


def _protocol(machine: _Machine) -> None:
    version = machine.number(1)
    if not 2 <= version <= 5:
        raise _Refused(f"pickle protocol {version}")


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


_OPERATIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: _protocol,
    0x95: _frame,
    0x28: _Machine.mark,
    0x30: _pop_value,
    0x4E: lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    0x4D: lambda machine: machine.stack.append(machine.number(2)),  # BININT2
    0x4A: lambda machine: machine.stack.append(machine.number(4, signed=True)),  # BININT
    0x8A: lambda machine: machine.stack.append(machine.number(machine.number(1), signed=True)),  # LONG1
    0x47: _float,
    0x8C: lambda machine: machine.stack.append(machine.text(machine.number(1))),  # SHORT_BINUNICODE
    0x58: lambda machine: machine.stack.append(machine.text(machine.number(4))),  # BINUNICODE
    0x8D: lambda machine: machine.stack.append(machine.text(machine.number(8))),  # BINUNICODE8
    0x43: lambda machine: machine.stack.append(machine.take(machine.number(1))),  # SHORT_BINBYTES
    0x42: lambda machine: machine.stack.append(machine.take(machine.number(4))),  # BINBYTES
    0x5D: lambda machine: machine.stack.append([]),
    0x61: lambda machine: machine.extend([machine.stack.pop()]),  # APPEND
    0x65: lambda machine: machine.extend(machine.items()),  # APPENDS
    0x7D: lambda machine: machine.stack.append({}),
    0x73: _pair,  # SETITEM
    0x75: lambda machine: machine.update(machine.items()),  # SETITEMS
    0x29: lambda machine: machine.stack.append(()),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    0x74: lambda machine: machine.stack.append(tuple(machine.items())),  # TUPLE
    0x71: lambda machine: machine.remember(machine.number(1)),  # BINPUT
    0x72: lambda machine: machine.remember(machine.number(4)),  # LONG_BINPUT
    0x93: _stack_global,
    0x63: lambda machine: machine.name(machine.line(), machine.line()),  # GLOBAL
    0x52: _Machine.make,  # REDUCE
    0x81: _Machine.make,  # NEWOBJ
    0x62: _Machine.build,
}
