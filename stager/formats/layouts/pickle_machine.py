"""A pickle machine that runs nothing: classes become plain records, and every growth is bounded.

A pickle is a program, and the daemon runs next to credentials. This machine executes the opcodes that checkpoints need and
no others, and calls nothing. `pickle.Unpickler` with a strict `find_class` would not do: one opcode makes it reserve
gigabytes, and nested tuples as keys make it recurse without end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OBJECTS_MAX = 32_000_000
STACK_MAX = 100_000
MARKS_MAX = 200
_CHECK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that the pickle names; never called."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object that the pickle makes: what it would be made from, and its state."""

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


class Refused(Exception):
    """The pickle wants what this machine does not do."""


@dataclass(slots=True)
class Machine:
    """Stack, marks and memo of one run. Nothing here recurses, and every growth is bounded.

    Attributes:
        raw: The pickle.
        known: Whether a name, given by module and name, may stand in it; nothing is imported either way.
        lenient: Takes what files of `torch.save` hold as well: persistent ids, and items given to objects.
    """

    raw: bytes
    known: Callable[[str, str], bool]
    lenient: bool = False
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """The object that the pickle makes.

        Raises:
            Refused: It wants what this machine does not do.
            IndexError, KeyError, struct.error, UnicodeDecodeError: It ends early or is no pickle.
        """
        raw, stack, memo = self.raw, self.stack, self.memo
        position = check_at = 0
        while True:
            if position >= check_at:
                # An opcode takes a byte at least and adds an object at most, so now and then is often enough.
                check_at = position + _CHECK_BYTES
                if len(stack) > STACK_MAX or len(memo) > OBJECTS_MAX:
                    raise Refused(
                        f"it holds more than {STACK_MAX} or remembers more than {OBJECTS_MAX} objects"
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
                    raise Refused("it ends with something left over")
                return stack[0]
            else:
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise Refused(f"opcode {code:#04x} at byte {position - 1}")
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
        if len(self.marks) >= MARKS_MAX:
            raise Refused(f"it nests deeper than {MARKS_MAX}")
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
        if isinstance(target, list):
            target.extend(added)
        elif not (self.lenient and isinstance(target, Record)):
            raise Refused("it appends to what is no list")

    def update(self, added: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record) and (self.lenient or target.kind.name == "OrderedDict"):
            target.state = target.state if isinstance(target.state, dict) else {}
            target = target.state
        if not isinstance(target, dict) or len(added) % 2:
            raise Refused("it sets items of what is no dictionary")
        for place in range(0, len(added), 2):
            target[_as_key(added[place])] = added[place + 1]

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or not self.known(module, name):
            raise Refused(f"it names `{str(module)[:80]}.{str(name)[:80]}`")
        self.stack.append(Name(module, name))

    def make(self) -> None:
        """REDUCE and NEWOBJ: an object of a known class, made of arguments that are kept and not used."""
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise Refused("it calls what is no known class")
        self.stack.append(Record(kind, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Record):
            raise Refused("it gives state to what is no object")
        target.state = state

    def persist(self) -> None:
        """BINPERSID: torch's way to name a tensor's bytes. What it names is not looked at."""
        if not self.lenient:
            raise Refused("it names an object outside itself")
        self.stack[-1] = None


def _as_key(key: Any) -> Any:
    # Only keys whose hash costs little: a nest of tuples may take for ever to hash.
    plain = str | int | bytes | float | None
    if isinstance(key, plain | Record) or (
        isinstance(key, tuple) and all(isinstance(part, plain) for part in key)
    ):
        return key
    raise Refused("it uses a nested key")


def _pop_value(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pair(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.update([key, value])


def _stack_global(machine: Machine) -> None:
    name = machine.stack.pop()
    machine.name(machine.stack.pop(), name)


def _frame(machine: Machine) -> None:
    if machine.number(8) > len(machine.raw) - machine.position:
        raise IndexError


def _protocol(machine: Machine) -> None:
    version = machine.number(1)
    if not 2 <= version <= 5:
        raise Refused(f"pickle protocol {version}")


def _float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


_OPERATIONS: dict[int, Callable[[Machine], object]] = {
    0x80: _protocol,
    0x95: _frame,
    0x28: Machine.mark,
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
    0x52: Machine.make,  # REDUCE
    0x81: Machine.make,  # NEWOBJ
    0x62: Machine.build,
    0x51: Machine.persist,
}
