"""What a file of `torch.save` says of its run: numbers, texts and None at the top of its dictionary, read without torch.

Names and file counts tell little of a checkpoint that is one file a rank; DeepSpeed writes the world's size into it,
Lightning and others the step. Facts only add to what the files themselves prove: where they cannot be read there are
none.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from stager.errors import FormatError
from stager.formats.layouts.api import Candidate, Unfinished
from stager.formats.layouts.pickle_machine import Machine, Record, Refused
from stager.formats.layouts.structure import zip_members

_PICKLE_BYTES_MAX = 4 << 20
Facts = Mapping[str, int | str | None]

_STEP_KEYS = ("global_step", "global_steps", "iteration", "step", "steps")


def torch_dictionary(candidate: Candidate, path: str) -> Mapping[Any, Any]:
    """The dictionary that ``path`` holds, everything but plain values as records; empty where it cannot be told.

    Raises:
        FileNotFoundError: The file has gone.
    """
    try:
        root = Machine(_pickle(candidate, path), lambda module, name: True, lenient=True).run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, Refused, FormatError, Unfinished):
        return {}
    found = root.state if isinstance(root, Record) else root
    return found if isinstance(found, dict) else {}


def torch_facts(candidate: Candidate, path: str) -> Facts:
    """Plain values by their key in the dictionary that ``path`` holds. As `torch_dictionary`."""
    found = torch_dictionary(candidate, path)
    return {
        key: value
        for key, value in found.items()
        if isinstance(key, str) and isinstance(value, int | str | None) and not isinstance(value, bool)
    }


def stated_step(facts: Facts) -> int | None:
    """The training step among facts."""
    steps = (facts.get(key) for key in _STEP_KEYS)
    return next((step for step in steps if isinstance(step, int) and 0 <= step < 1 << 62), None)


def _pickle(candidate: Candidate, path: str) -> bytes:
    """The pickle inside; empty if there is none that could be read cheaply."""
    for member in zip_members(candidate, path) or ():
        if member.name.rsplit("/", 1)[-1] == "data.pkl" and member.is_stored:
            if member.size > _PICKLE_BYTES_MAX:
                return b""
            header = candidate.read(path, member.offset, 30)
            name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
            return candidate.read(path, member.offset + 30 + name_bytes + extra_bytes, member.size)
    return b""
