"""Checksums: known values, pieces that combine, text forms that come back."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager import errors
from stager.checksum import Hasher, combine_all, crc64nvme, digest_of
from stager.errors import FormatError, StagerError, Throttled
from stager.formats.digests import decode_crc64nvme, encode_crc64nvme


def test_the_check_value_of_the_standard() -> None:
    """CRC-64/NVME of the nine digits is the published check value."""
    assert crc64nvme(b"123456789") == 0xAE8B14860A799888


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_pieces_combine_to_the_whole(pieces: list[bytes]) -> None:
    """However a stream is cut, the combined CRC and the one-pass digest are those of the whole."""
    whole = b"".join(pieces)
    hasher = Hasher()
    for piece in pieces:
        hasher.update(piece)
    assert combine_all([(crc64nvme(piece), len(piece)) for piece in pieces]) == crc64nvme(whole)
    assert hasher.digest() == digest_of(whole)
    assert hasher.digest().sha256 == hashlib.sha256(whole).hexdigest() and hasher.size == len(whole)


@given(st.integers(0, 2**64 - 1))
def test_the_text_form_comes_back(crc: int) -> None:
    """Encoding and decoding are inverse."""
    assert decode_crc64nvme(encode_crc64nvme(crc)) == crc


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!!", "AAAAAAAAAAAAAAAA"])
def test_other_text_is_refused(text: str) -> None:
    """What is not eight bytes in base64 is a FormatError."""
    with pytest.raises(FormatError):
        decode_crc64nvme(text)


def test_every_error_survives_pickling() -> None:
    """Errors cross from worker processes with subject, hint and extras."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StagerError)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        error = pickle.loads(pickle.dumps(kind("broken", subject="thing", hint="mend it")))
        assert type(error) is kind
        assert str(error) == "broken\nhint: mend it" and error.subject == "thing"
    assert pickle.loads(pickle.dumps(Throttled("wait", retry_after_s=2.5))).retry_after_s == 2.5
