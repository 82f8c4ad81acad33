"""The lister of streams: whatever the chunks, it finds what the lister of buffers finds."""

from __future__ import annotations

import io
import itertools
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.tar import Listing, list_members
from stager.formats.tar_stream import StreamLister

NAME = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=150)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def list_stream(raw: bytes, cuts: list[int], *, of: str = "x.tar") -> Listing:
    lister = StreamLister(len(raw), of=of)
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        lister.feed(raw[start:stop])
    return lister.finish()


def write(names: list[str], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            if number % 4 == 3:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
                continue
            info.size = number * 313
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return out.getvalue()


@given(
    st.lists(NAME, max_size=8), FORMATS, st.lists(st.integers(0, 1 << 20), max_size=12), st.binary(max_size=4)
)
@settings(max_examples=120)
def test_chunks_make_no_difference(names: list[str], form: int, cuts: list[int], tail: bytes) -> None:
    """Members, offsets, skipped kinds and what follows the end are the same, wherever the stream is cut."""
    try:
        raw = write(names, form) + tail
    except (ValueError, UnicodeEncodeError):
        return  # USTAR cannot hold the name
    assert list_stream(raw, cuts) == list_members(raw, of="x.tar")


@given(st.integers(0, 8000), st.lists(st.integers(0, 1 << 20), max_size=5), st.integers(0, 7))
@settings(max_examples=150)
def test_damage_is_found_as_in_a_buffer(place: int, cuts: list[int], bit: int) -> None:
    """A flipped bit gives the same members or a FormatError in both."""
    raw = bytearray(write(["a.txt", "b" * 130, "ü.txt", "d", "e.txt"], tarfile.PAX_FORMAT))
    raw[place % len(raw)] ^= 1 << bit
    expected: Listing | None
    try:
        expected = list_members(bytes(raw), of="x.tar")
    except FormatError:
        expected = None
    if expected is None:
        with pytest.raises(FormatError):
            list_stream(bytes(raw), cuts)
    else:
        assert list_stream(bytes(raw), cuts) == expected


@pytest.mark.parametrize("length", [0, 1, 511, 512, 700, 1023, 1536, 2047])
def test_an_early_end_is_found(length: int) -> None:
    """Cut anywhere before the closing blocks, it is an error that names the archive."""
    raw = write(["a.txt", "b.txt", "c.txt"], tarfile.USTAR_FORMAT)
    with pytest.raises(FormatError, match=r"x\.tar"):
        list_stream(raw[:length], [300])


def test_an_extension_that_claims_gigabytes_is_refused_at_once() -> None:
    """Memory is bounded by what a name may need, not by what a header says."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type = tarfile.XHDTYPE
    info.size = 5 << 30
    lister = StreamLister(10 << 30, of="x.tar")
    with pytest.raises(FormatError, match="claims"):
        lister.feed(info.tobuf(tarfile.USTAR_FORMAT))
