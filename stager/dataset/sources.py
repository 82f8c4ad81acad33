"""Where a dataset's shards are: a local directory read in place, or a cache that the node's daemon fills."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from stager.client import Client
from stager.dataset.shard_files import open_shard
from stager.errors import ConfigError, FormatError, NotFound, StagerError, UsageError
from stager.formats import wire
from stager.formats.manifest import (
    DATASET_MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    DatasetManifest,
    decode_dataset_manifest,
)
from stager.logs import event

OPEN_AGAIN_S = 10.0
_LOGGER = logging.getLogger("stager.dataset")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its name in the dataset, its bytes, its samples."""

    name: str
    size: int
    samples: int


class Source(Protocol):
    """What a reader may ask about a dataset's shards. Picklable, and without open files or connections."""

    @property
    def name(self) -> str:
        """The dataset, as the user gave it."""
        ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def shards(self) -> tuple[Shard, ...]: ...

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of fields over all samples; empty where that is not known."""
        ...

    def path(self, shard: Shard) -> str:
        """Where the shard is once it is on this node."""
        ...

    def fetch(self, shard: Shard, wait_s: float, *, damaged: bool) -> str:
        """Where the shard is, after waiting for it up to ``wait_s``; with ``damaged``, because what is there is bad."""
        ...

    def announce(
        self, order: Mapping[str, Any], position: int, reader: str, rank: int, world: int
    ) -> wire.AnnounceReply | None:
        """Tell whoever fills the cache what is read next; None where nobody does."""
        ...


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """Shards in a local directory or on a parallel file system, read in place."""

    name: str
    fingerprint: str
    shards: tuple[Shard, ...]
    fields: tuple[str, ...]

    def path(self, shard: Shard) -> str:
        return os.path.join(self.name, shard.name)

    def fetch(self, shard: Shard, wait_s: float, *, damaged: bool) -> str:
        if damaged:
            raise FormatError(f"`{self.path(shard)}` is damaged", subject=shard.name)  # the reader knows how
        raise NotFound(
            f"shard `{shard.name}` is not in `{self.name}`, though its manifest names it",
            subject=self.path(shard),
            hint="`stager verify` says what else is missing; copy or pack the dataset again",
        )

    def announce(
        self, order: Mapping[str, Any], position: int, reader: str, rank: int, world: int
    ) -> wire.AnnounceReply | None:
        return None


@dataclass(frozen=True, slots=True)
class CachedSource:
    """Shards of a bucket in the node's cache. A shard that is there is opened without asking anybody."""

    name: str
    fingerprint: str
    shards: tuple[Shard, ...]
    fields: tuple[str, ...]
    client: Client
    dataset: str
    directory: str

    def path(self, shard: Shard) -> str:
        return os.path.join(self.directory, shard.name)

    def fetch(self, shard: Shard, wait_s: float, *, damaged: bool) -> str:
        try:
            return self.client.want(self.dataset, shard.name, wait_s, damaged=damaged).path
        except NotFound:
            # A daemon whose cache was emptied no longer knows the dataset by name.
            self._open_again(wait_s)
            return self.client.want(self.dataset, shard.name, wait_s, damaged=damaged).path

    def announce(
        self, order: Mapping[str, Any], position: int, reader: str, rank: int, world: int
    ) -> wire.AnnounceReply | None:
        request = wire.AnnounceRequest(self.dataset, reader, order, position, rank, world)
        try:
            return self.client.announce(request)
        except NotFound:
            self._open_again(OPEN_AGAIN_S)
            return self.client.announce(request)

    def _open_again(self, wait_s: float) -> None:
        """Make the dataset known to a daemon that has lost it; FormatError if the bucket now holds another one."""
        reply = self.client.open(self.name, wait_s)
        if (reply.dataset, reply.fingerprint) != (self.dataset, self.fingerprint):
            raise FormatError(
                f"`{self.name}` was replaced while it was read: its fingerprint is now {reply.fingerprint}",
                subject=self.name,
                hint="begin again with the new dataset, or put the old one back",
            )


def open_source(
    source: str | os.PathLike[str], *, find_socket: Callable[[], str | None], patience_s: float, wait_s: float
) -> Source:
    """The shards of ``source``.

    Args:
        source: A local directory, a ``file://`` URL, or the URL of a dataset in a bucket.
        find_socket: Gives the socket of the daemon that stages datasets from buckets, or None; asked for a bucket only.
        patience_s: How long to try to reach a daemon that is not there.
        wait_s: How long to wait for the manifest.

    Raises:
        UsageError: No such directory, or nothing in it that could be read.
        ConfigError: A bucket, and no daemon to stage it.
        FormatError: The manifest or a shard is damaged; the message names it.
        Unavailable, DeadlineExceeded: The daemon, or the manifest, did not come in time.
    """
    text = os.fspath(source)
    scheme = urlsplit(text).scheme
    if scheme == "file":
        return _open_directory(unquote(urlsplit(text).path))
    if "://" not in text:
        return _open_directory(os.path.abspath(os.path.expanduser(text)))
    socket = find_socket()
    if socket is None:
        raise ConfigError(
            f"nobody stages `{text}` on this node: no daemon's socket is known",
            subject=text,
            hint="give cache=DIRECTORY for a private one, or start `stager run --config stager.toml` and give socket=... "
            "or STAGER_SOCKET",
        )
    return _open_cached(text.rstrip("/"), Client(socket, patience_s), wait_s)


def _open_cached(source: str, client: Client, wait_s: float) -> CachedSource:
    reply = client.open(source, wait_s)
    manifest = _read_manifest(reply.manifest_path)
    if manifest.fingerprint != reply.fingerprint:
        raise FormatError(
            f"the daemon's manifest of `{source}` changed while it was opened",
            subject=source,
            hint="open it again",
        )
    return CachedSource(
        source,
        manifest.fingerprint,
        _shards(manifest),
        manifest.fields,
        client,
        reply.dataset,
        reply.shards_directory,
    )


def _open_directory(directory: str) -> DirectorySource:
    if not os.path.isdir(directory):
        what = "is a file, not a directory of shards" if os.path.exists(directory) else "does not exist"
        raise UsageError(
            f"`{directory}` {what}",
            subject=directory,
            hint="give the directory that `stager pack` or webdataset.ShardWriter wrote, or a URL such as s3://bucket/data",
        )
    manifest_path = os.path.join(directory, MANIFEST_NAME)
    if not os.path.exists(manifest_path):
        return _scan_directory(directory)
    manifest = _read_manifest(manifest_path)
    return DirectorySource(directory, manifest.fingerprint, _shards(manifest), manifest.fields)


def _read_manifest(path: str) -> DatasetManifest:
    try:
        with open(path, "rb") as file:
            raw = file.read(DATASET_MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise StagerError(f"cannot read `{path}`: {error.strerror}", subject=path) from error
    if len(raw) > DATASET_MANIFEST_BYTES_MAX:
        raise FormatError(f"`{path}` has more than {DATASET_MANIFEST_BYTES_MAX} bytes", subject=path)
    return decode_dataset_manifest(raw, of=path)


def _shards(manifest: DatasetManifest) -> tuple[Shard, ...]:
    return tuple(Shard(entry.name, entry.size, entry.samples) for entry in manifest.shards)


def _scan_directory(directory: str) -> DirectorySource:
    """A directory of tars that nobody made a manifest for: every header is read once, in the order of the names.

    The fingerprint then stands for names, sizes, keys and fields, and where they lie; not for the members' bytes.
    """
    names = sorted(
        os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(directory), "*.tar"))
    )
    if not names:
        raise UsageError(
            f"`{directory}` has neither a {MANIFEST_NAME} nor any *.tar file",
            subject=directory,
            hint="pack it: `stager pack DIRECTORY_OF_FILES DESTINATION`",
        )
    whole = hashlib.sha256(b"stager-scanned-1\n")
    fields: set[str] = set()
    shards = []
    for name in names:
        path = os.path.join(directory, name)
        with open_shard(path) as opened:
            size, index = opened.size, opened.index
        whole.update(f"{name}\n{size} {len(index)}\n".encode("utf-8", "surrogateescape"))
        whole.update(index.layout_digest())
        fields.update(index.fields)
        shards.append(Shard(name, size, len(index)))
    event(_LOGGER, logging.INFO, "dataset.scanned", directory=directory, shards=len(shards))
    return DirectorySource(directory, whole.hexdigest()[:32], tuple(shards), tuple(sorted(fields)))
