"""The pickle machine for ``.metadata``: real files are read, everything else is refused without harm."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.layouts.dcp_metadata import decode_dcp_metadata


@pytest.fixture(scope="module")
def real(written: Callable[[str], Path]) -> bytes:
    """What torch wrote."""
    return (written("save_dcp_ranks") / "step-100" / ".metadata").read_bytes()


def test_real_metadata(real: bytes, written: Callable[[str], Path]) -> None:
    """Shards with the bytes they must have, and the save's id."""
    metadata = decode_dcp_metadata(real)
    sizes = {
        path.name: path.stat().st_size for path in (written("save_dcp_ranks") / "step-100").glob("*.distcp")
    }
    assert metadata.shards.keys() == sizes.keys()
    assert all(0 < least <= sizes[path] for path, least in metadata.shards.items())
    assert len(metadata.save_id) == 36


def test_truncated_at_every_byte(real: bytes) -> None:
    """Nothing shorter than the whole is taken for it."""
    for cut in {*range(0, len(real), 5), *range(len(real) - 100, len(real)), *range(100)}:
        with pytest.raises(FormatError):
            decode_dcp_metadata(real[:cut])
    with pytest.raises(FormatError):
        decode_dcp_metadata(real + b".")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_altered_bytes_never_escape(real: bytes, data: Any) -> None:
    """Flipped bytes give records or a FormatError, never another exception."""
    altered = bytearray(real)
    for _ in range(data.draw(st.integers(1, 4))):
        altered[data.draw(st.integers(0, len(real) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_dcp_metadata(bytes(altered))
    except FormatError:
        pass


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_noise_never_escapes(raw: bytes) -> None:
    """Any bytes at all."""
    with pytest.raises(FormatError):
        decode_dcp_metadata(b"\x80\x04" + raw)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch /tmp/stager-was-here",)


def test_code_is_not_run(tmp_path: Path) -> None:
    """A pickle that would run a command is refused by the name of what it wants to run."""
    for protocol in range(6):
        with pytest.raises(FormatError):
            decode_dcp_metadata(pickle.dumps(_Evil(), protocol=protocol))
    with pytest.raises(FormatError, match=r"posix\.system"):
        decode_dcp_metadata(pickle.dumps(_Evil(), protocol=4))
    assert not Path("/tmp/stager-was-here").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo place that would make CPython reserve 16 GB
        b"\x80\x04" + b"(" * 100_000,  # marks
        b"\x80\x04" + b"]" * 2_000_000,  # stack
        b"\x80\x04)" + b"\x85" * 200_000 + b".",  # a deep tuple
        b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",  # ... as a key, whose hash would overflow the C stack
        b"\x80\x04})"
        + b"2\x86" * 60
        + b"Ns.",  # ... doubled each time: 2**60 steps to hash (DUP is not known)
        b"\x80\x04})" + b"\x94h\x00\x86\x94" * 60 + b"Ns.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",  # a text of 2**63 bytes
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2**63 bytes
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # a number of 2 GB
        b"\x80\x04\x82\x01.",  # the extension registry
        b"\x80\x04Pid\n.",  # persistent ids
        b"I1\n.",  # protocol 0
        b"\x80\x04N.",
        b"\x80\x04]].",
        b"",
        b".",
        b"\x80",
    ],
)
def test_bombs(raw: bytes) -> None:
    """Excess is refused at once."""
    with pytest.raises(FormatError):
        decode_dcp_metadata(raw)


def _metadata(path: object, offset: object, length: object) -> bytes:
    """A hand-made pickle of one storage record, as torch's would be."""
    module = "torch.distributed.checkpoint.metadata"

    def name(module: str, name: str) -> bytes:
        return b"c" + f"{module}\n{name}\n".encode()

    def value(item: object) -> bytes:
        return pickle.dumps(item, protocol=2)[2:-1]

    info = (
        name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        + b")\x81}("
        + b"".join(
            value(k) + value(v)
            for k, v in {"relative_path": path, "offset": offset, "length": length}.items()
        )
        + b"ub"
    )
    key = name(module, "MetadataIndex") + b")\x81}b"
    return (
        b"\x80\x02"
        + name(module, "Metadata")
        + b")\x81}"
        + value("storage_data")
        + b"}"
        + key
        + info
        + b"ssb."
    )


@pytest.mark.parametrize(
    ("path", "offset", "length"),
    [
        ("../../etc/passwd", 0, 1),
        ("/etc/passwd", 0, 1),
        ("a", -1, 1),
        ("a", 0, 1 << 70),
        ("a", True, 1),
        ("a", 0, None),
        (7, 0, 1),
        ("\ud800", 0, 1),
    ],
)
def test_records_are_checked(path: object, offset: object, length: object) -> None:
    """Paths that leave the directory, and numbers that are none."""
    with pytest.raises(FormatError):
        decode_dcp_metadata(_metadata(path, offset, length))


def test_a_hand_made_record_is_read() -> None:
    """The older protocol with its own opcodes."""
    assert decode_dcp_metadata(_metadata("__0_0.distcp", 5, 7)).shards == {"__0_0.distcp": 12}
