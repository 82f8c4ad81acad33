"""Fields to values, by webdataset's own handlers, with what executes code left out unless it is asked for."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import webdataset.autodecode as autodecode

from stager.errors import ConfigError, FormatError, UsageError

Handler = Callable[[str, bytes], Any]
Decode = bool | str | Handler | Sequence[str | Handler]

_PICKLES = frozenset({"pyd", "pkl", "pickle"})


class FieldDecoder:
    """Decodes a field by its name's last extension, as ``webdataset.WebDataset(...).decode(...)`` does.

    ``txt``, ``cls``, ``json``, ``npy``, ``npz``, ``mp``, ``cbor``, ``ten`` and their like have handlers of their own; a
    field that ends in ``.gz`` is inflated first; images stay bytes until an image specification asks for them. ``pth`` is
    loaded with ``weights_only``; fields that are pickles are refused unless allowed.
    """

    def __init__(self, decode: Decode, *, allow_pickle: bool) -> None:
        """Choose the handlers.

        Args:
            decode: True for webdataset's basic handlers; an image specification such as ``"pil"`` or ``"torchrgb8"``, a
                handler ``f(field, data) -> value or None``, or a list of these, to come before them.
            allow_pickle: Whether fields may run code while they are decoded.

        Raises:
            UsageError: An unknown image specification, or something that cannot be called.
        """
        given = (
            []
            if isinstance(decode, bool)
            else [decode]
            if isinstance(decode, str) or callable(decode)
            else decode
        )
        self._own = [_handler(one) for one in given]
        self._allow_pickle = allow_pickle
        self._decoder: autodecode.Decoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}

    def decode(self, field: str, data: bytes, where: Callable[[str], str]) -> Any:
        """The value of ``field``.

        Raises:
            FormatError: The handler failed; the message begins with ``where(field)``: shard, member and offset.
            UsageError: The field is a pickle.
            ConfigError: The handler needs a package that is not installed.
        """
        if self._decoder is None:
            first = [autodecode.gzfilter, *([] if self._allow_pickle else [_weights, _refuse_pickle])]
            self._decoder = autodecode.Decoder(self._own, pre=first)
        try:
            return self._decoder.decode1(field, data)
        except _PickleRefused:
            of = where(field)
            raise UsageError(
                f"{of}: the field `{field}` is a pickle, which runs code when it is read",
                subject=of,
                hint="pass allow_pickle=True if you trust who packed it, or leave the field out with fields=[...]",
            ) from None
        except ImportError as error:
            of = where(field)
            raise ConfigError(
                f"{of}: decoding the field `{field}` needs the package `{error.name}`",
                subject=of,
                hint=f"pip install {error.name}, or pass decode=False or fields=[...] without `{field}`",
            ) from error
        except Exception as error:
            of = where(field)
            raise FormatError(
                f"{of}: the field `{field}` cannot be decoded: {type(error).__name__}: {error}",
                subject=of,
                hint="the member is not what its extension says; see it with `tar -xf SHARD MEMBER`",
            ) from error


def _handler(given: object) -> Handler:
    if isinstance(given, str):
        if given not in autodecode.imagespecs:
            raise UsageError(
                f"decode={given!r} is not an image specification",
                subject="decode",
                hint=f"one of {', '.join(autodecode.imagespecs)}",
            )
        handler: Handler = autodecode.ImageHandler(given)
        return handler
    if not callable(given):
        raise UsageError(f"decode takes specifications and handlers, not {given!r}", subject="decode")
    return given


class _PickleRefused(Exception):
    pass


def _extension(key: str) -> str:
    return key.rpartition(".")[2]


def _refuse_pickle(key: str, data: bytes) -> None:
    if _extension(key) in _PICKLES:
        raise _PickleRefused


def _weights(key: str, data: bytes) -> Any:
    if _extension(key) == "pth":
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return None
