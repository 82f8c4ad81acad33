"""The control API's messages: HTTP and JSON on a unix socket, under ``/v1/``.

==========  ======================  ==========================================================
method      path                    request -> reply
==========  ======================  ==========================================================
GET         ``/v1/live``            -> ``{"live": true}`` while the loop turns
GET         ``/v1/ready``           -> 200 or 503, ``{"ready": ..., "waiting_for": [...]}``
GET         ``/v1/status``          -> everything ``stager status`` shows
POST        ``/v1/open``            `OpenRequest` -> `OpenReply`
POST        ``/v1/announce``        `AnnounceRequest` -> `AnnounceReply`
POST        ``/v1/want``            `WantRequest` -> `WantReply`
POST        ``/v1/seal``            `SealRequest` -> `SealReply`
GET         ``/metrics``            -> Prometheus text
==========  ======================  ==========================================================

A failure is a status of 400 and up with ``{"error": {"kind", "message", "subject", "hint"}}``; `kind` is the class name
in `stager.errors`, so that the caller raises what the daemon raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stager import errors
from stager.errors import FormatError, StagerError, UsageError
from stager.formats.fields import as_object, load_object, take_count, take_text
from stager.formats.names import check_relative_path

API_VERSION = 1
MESSAGE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Make a dataset known and wait until its manifest is on this node."""

    source: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class OpenReply:
    """Where the dataset lies on this node: the manifest, and the directory that shards appear in by their names."""

    dataset: str
    fingerprint: str
    manifest_path: str
    shards_directory: str


@dataclass(frozen=True, slots=True)
class AnnounceRequest:
    """A reader's order and place: enough to compute what it reads next. Announcing again replaces the last one.

    Attributes:
        dataset: As `OpenReply` named it.
        reader: Stable name of the reader, e.g. ``<host>/<job>/<rank>``.
        order: The order's parameters, as `stager.formats.order` encodes them.
        position: Samples of the global stream that were consumed.
        rank: Of ``world`` ranks, for which lanes this node reads.
        world: Number of ranks.
    """

    dataset: str
    reader: str
    order: Mapping[str, Any]
    position: int
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """What the daemon makes of it: the cache that the run needs so as never to fetch a shard twice in an epoch."""

    cache_bytes_needed: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class WantRequest:
    """Fetch a shard now, before all prefetching, and answer when it is there."""

    dataset: str
    shard: str
    deadline_s: float
    damaged: bool = False
    """The copy that is there was found damaged: verify it again, and fetch it anew if it is."""


@dataclass(frozen=True, slots=True)
class WantReply:
    path: str


@dataclass(frozen=True, slots=True)
class SealRequest:
    """Take a directory as a complete checkpoint now; with ``wait``, answer when it is committed in the bucket."""

    directory: str
    wait: bool = False
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True)
class SealReply:
    checkpoint: str
    state: str


def encode(message: object) -> bytes:
    """A message of this module as JSON."""
    return json.dumps(asdict(message), ensure_ascii=False, allow_nan=False).encode()  # type: ignore[call-overload]  # any dataclass


def decode_open_request(raw: bytes) -> OpenRequest:
    value = _load(raw)
    return OpenRequest(take_text(value, "source", at="open"), _seconds(value))


def decode_open_reply(raw: bytes) -> OpenReply:
    value = _load(raw)
    names = ("dataset", "fingerprint", "manifest_path", "shards_directory")
    return OpenReply(*(take_text(value, name, at="open") for name in names))


def decode_announce_request(raw: bytes) -> AnnounceRequest:
    value = _load(raw)
    at = "announce"
    request = AnnounceRequest(
        dataset=take_text(value, "dataset", at=at),
        reader=take_text(value, "reader", at=at, length_max=500),
        order=as_object(value.get("order"), at="announce: order"),
        position=take_count(value, "position", at=at),
        rank=take_count(value, "rank", at=at, most=10_000_000),
        world=take_count(value, "world", at=at, most=10_000_000),
    )
    if request.rank >= request.world:
        raise FormatError(f"announce: rank {request.rank} of {request.world}", subject="announce")
    return request


def decode_announce_reply(raw: bytes) -> AnnounceReply:
    value = _load(raw)
    return AnnounceReply(
        take_count(value, "cache_bytes_needed", at="announce"),
        take_count(value, "cache_bytes", at="announce"),
    )


def decode_want_request(raw: bytes) -> WantRequest:
    value = _load(raw)
    return WantRequest(
        dataset=take_text(value, "dataset", at="want"),
        shard=check_relative_path(value.get("shard"), of="want: shard"),
        deadline_s=_seconds(value),
        damaged=value.get("damaged") is True,
    )


def decode_want_reply(raw: bytes) -> WantReply:
    return WantReply(take_text(_load(raw), "path", at="want"))


def decode_seal_request(raw: bytes) -> SealRequest:
    value = _load(raw)
    return SealRequest(
        directory=take_text(value, "directory", at="seal"),
        wait=value.get("wait") is True,
        deadline_s=_seconds(value),
    )


def decode_seal_reply(raw: bytes) -> SealReply:
    value = _load(raw)
    return SealReply(take_text(value, "checkpoint", at="seal"), take_text(value, "state", at="seal"))


@dataclass(frozen=True, slots=True)
class ErrorReply:
    kind: str
    message: str
    subject: str = ""
    hint: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def encode_error(error: StagerError) -> bytes:
    """The body of a failed call."""
    reply = ErrorReply(type(error).__name__, error.message, error.subject, error.hint)
    # A message may quote what is not Unicode; it is told all the same.
    return json.dumps({"error": asdict(reply)}, ensure_ascii=False).encode("utf-8", "replace")


def decode_error(raw: bytes, *, status: int) -> StagerError:
    """The error that the daemon raised, of the same class where this side knows it."""
    try:
        value = as_object(_load(raw).get("error"), at="error")
        texts = {
            name: take_text(value, name, at="error", length_max=1 << 16)
            for name in ("message", "subject", "hint")
        }
        kind = getattr(errors, take_text(value, "kind", at="error"), None)
    except FormatError:
        return StagerError(f"the daemon answered {status} without saying why", subject="control API")
    if not (isinstance(kind, type) and issubclass(kind, StagerError)):
        kind = StagerError
    return kind(texts["message"], subject=texts["subject"], hint=texts["hint"])


def _load(raw: bytes) -> Mapping[str, Any]:
    if len(raw) > MESSAGE_BYTES_MAX:
        raise UsageError(f"a control message has at most {MESSAGE_BYTES_MAX} bytes", subject="control API")
    return load_object(raw, of="control message")


def _seconds(value: Mapping[str, Any]) -> float:
    found = value.get("deadline_s", 600.0)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found <= 7 * 86400:
        raise FormatError(
            "`deadline_s` must be seconds, more than 0 and at most a week", subject="deadline_s"
        )
    return float(found)
