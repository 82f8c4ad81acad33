"""Tar archives: ours are read by others, theirs by us, and damage is always found."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import FormatError
from stager.formats.index import index_shard
from stager.formats.samples import group_samples, is_metadata, split_name
from stager.formats.tar import END_OF_ARCHIVE, list_members, member_bytes, member_header, padded

NAME = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=120,
)
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join).filter(lambda path: len(path.encode()) < 900)
MEMBERS = st.lists(st.tuples(PATH, st.binary(max_size=1500)), max_size=6)


def write_ours(members: list[tuple[str, bytes]]) -> bytes:
    pieces = []
    for name, data in members:
        pieces += [member_header(name, len(data)), data, bytes(padded(len(data)) - len(data))]
    return b"".join([*pieces, END_OF_ARCHIVE])


def write_with_tarfile(members: list[tuple[str, bytes]], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read_ours(raw: bytes) -> list[tuple[str, bytes]]:
    return [
        (member.name, raw[member.data_offset : member.data_offset + member.size])
        for member in list_members(raw, of="x.tar").members
    ]


@given(MEMBERS)
def test_what_we_write_everybody_reads(members: list[tuple[str, bytes]]) -> None:
    """Our archive gives the same names and bytes to our parser and to the standard library's."""
    raw = write_ours(members)
    assert read_ours(raw) == members
    assert len(raw) == sum(member_bytes(name, len(data)) for name, data in members) + len(END_OF_ARCHIVE)
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        found = []
        for info in tar:
            body = tar.extractfile(info)
            assert body is not None
            found.append((info.name, body.read()))
    # tarfile takes trailing slashes off; our names have none by construction.
    assert found == members


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@given(members=MEMBERS)
@settings(max_examples=40)
def test_what_others_write_we_read(form: int, members: list[tuple[str, bytes]]) -> None:
    """GNU long names, PAX records and float times of other writers come out as they went in."""
    assert read_ours(write_with_tarfile(members, form)) == members


def test_short_ascii_names_cost_one_block() -> None:
    """PAX is for names that need it: up to 100 bytes, or 255 with a folder to split at, do not."""
    assert len(member_header("a" * 100, 1)) == 512
    assert len(member_header("d" * 150 + "/" + "n" * 100, 1)) == 512
    assert len(member_header("n" * 101, 1)) == 1536
    assert len(member_header("ü.txt", 1)) == 1536


def test_sizes_beyond_the_octal_field() -> None:
    """A member of more than 8 GiB carries its size in a PAX record, which we and tarfile read."""
    size = 9 << 30
    header = member_header("big.bin", size)
    info = tarfile.TarInfo.frombuf(header[1024:], "utf-8", "strict")
    assert info.name == "big.bin" and b"size=%d\n" % size in header
    with pytest.raises(FormatError, match=f"would end at byte {size + len(header)}"):
        list_members(header + bytes(1024), of="x.tar")


@pytest.mark.parametrize("form", ["ours", tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_truncation_is_found_at_every_byte(form: int | str) -> None:
    """Wherever a shard is cut, even at a member's boundary, it is an error and not fewer samples."""
    members = [("a.txt", b"1" * 600), ("ü" * 60 + ".txt", b"2"), ("c.txt", b"")]
    raw = write_ours(members) if isinstance(form, str) else write_with_tarfile(members, form)
    end = list_members(raw, of="x.tar").end
    for length in range(end - 512):
        with pytest.raises(FormatError, match=r"x\.tar"):
            list_members(raw[:length], of="x.tar")
    assert read_ours(raw[: end - 512]) == members


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_bit_in_a_header_is_found(data: st.DataObject) -> None:
    """No flipped bit outside the data passes as another name or size."""
    members = [("a.txt", b"1" * 600), ("ü" * 60 + ".txt", b"2")]
    raw = bytearray(write_ours(members))
    listing = list_members(bytes(raw), of="x.tar")
    inside = {
        place
        for member in listing.members
        for place in range(member.data_offset, member.data_offset + padded(member.size))
    }
    place = data.draw(st.sampled_from([place for place in range(listing.end - 1024) if place not in inside]))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read_ours(bytes(raw))
    except FormatError:
        return
    # The bodies of PAX extensions have no checksum of their own: there only the name can have changed.
    assert [body for _, body in found] == [body for _, body in members]


@given(st.binary(max_size=3000))
def test_noise_is_refused(raw: bytes) -> None:
    """Bytes that are not a tar raise FormatError and nothing else."""
    try:
        list_members(raw, of="x.tar")
    except FormatError as error:
        assert "x.tar" in str(error)


def test_an_error_page_is_not_a_tar() -> None:
    """HTML that a proxy served instead of the shard says what it is not."""
    with pytest.raises(FormatError, match="not a tar"):
        list_members(b"<html>" + b" " * 2000, of="x.tar")


def test_other_kinds_are_counted_not_lost_in_silence() -> None:
    """Directories and links make no members, and are told."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE):
            info = tarfile.TarInfo("thing" + kind.decode())
            info.type = kind
            info.linkname = "a.txt"
            tar.addfile(info)
    listing = list_members(out.getvalue(), of="x.tar")
    assert not listing.members
    assert listing.skipped == {"directory": 1, "hard link": 1, "symbolic link": 1}


def test_two_archives_in_one_file_are_told() -> None:
    """What follows the end is not silently ignored."""
    raw = write_ours([("a.txt", b"1")])
    assert list_members(raw + raw, of="x.tar").trailing
    assert not list_members(raw + bytes(9000), of="x.tar").trailing
    with pytest.raises(FormatError, match="follows the archive's end"):
        index_shard(raw + raw, of="x.tar")


def test_sparse_members_are_refused() -> None:
    """A sparse file's bytes in the tar are not its content."""
    header = bytearray(member_header("a.txt", 0))
    header[156:157] = b"S"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(FormatError, match="sparse"):
        list_members(bytes(header) + END_OF_ARCHIVE, of="x.tar")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a/b/001.seg.png", ("a/b/001", "seg.png")),
        ("x.JPG", ("x", "jpg")),
        ("2.0/1.5 v2.png", ("2.0/1", "5 v2.png")),
        ("./a.jpg", ("./a", "jpg")),
        ("a..jpg", ("a", ".jpg")),
        ("LICENSE", None),
        (".hidden", None),
        ("d/.jpg", None),
        ("d.x/file", None),
    ],
)
def test_keys_and_fields(name: str, split: tuple[str, str] | None) -> None:
    """The first dot of the file name divides key and field; a name without a stem has none."""
    assert split_name(name) == split


def test_metadata_by_its_first_component() -> None:
    """Only a leading ``__x__`` is metadata."""
    assert is_metadata("__meta__") and is_metadata("__meta__/a.json")
    assert not is_metadata("a/__x__/b.jpg") and not is_metadata("__info__.json")


def test_samples_and_their_index() -> None:
    """Neighbours with one key make a sample; the index gives each field's bytes."""
    members = [
        ("a.jpg", b"J"),
        ("a.json", b"{}"),
        ("__m__/x.json", b""),
        ("b.jpg", b"K" * 700),
        ("README", b"r"),
        ("a.txt", b"t"),
    ]
    raw = write_ours(members)
    grouping = group_samples(list_members(raw, of="x.tar"), of="x.tar")
    assert [(sample.key, list(sample.fields)) for sample in grouping.samples] == [
        ("a", ["jpg", "json"]),
        ("b", ["jpg"]),
        ("a", ["txt"]),
    ]
    assert grouping.skipped == {"metadata": 1, "no key": 1} and grouping.repeated == ("a",)
    index = index_shard(raw, of="x.tar")
    assert len(index) == 3 and index.fields == ("jpg", "json", "txt") and index.key(1) == "b"
    [place] = index.places(1)
    assert raw[place.offset : place.offset + place.size] == b"K" * 700 and place.name == "jpg"
    with pytest.raises(FormatError, match="3 samples"):
        index.places(3)


def test_a_field_given_twice_is_refused() -> None:
    """Names that differ only in case would hide one another."""
    with pytest.raises(FormatError, match=r"`a\.JPG`.*second time"):
        index_shard(write_ours([("a.jpg", b"1"), ("a.JPG", b"2")]), of="x.tar")
