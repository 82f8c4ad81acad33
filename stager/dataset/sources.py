"""Where a dataset's shards are: a local directory read in place, or a cache that the node's daemon fills."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from stager.client import Client
from stager.dataset.index_cache import IndexCache
from stager.dataset.shard_files import open_shard
from stager.errors import ConfigError, FormatError, NotFound, StagerError, UsageError
from stager.formats import wire
from stager.formats.manifest import DATASET_MANIFEST_BYTES_MAX, MANIFEST_NAME, decode_dataset_manifest
from stager.formats.shard_table import ShardNames, ShardTable, read_shard_table, table_of
from stager.logs import event

OPEN_AGAIN_S = 10.0
PIECE_BYTES = 4 << 20
_LOGGER = logging.getLogger("stager.dataset")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its name in the dataset, its bytes, its samples, and the place of its dataset among those of a mix."""

    name: str
    size: int
    samples: int
    source: int = 0


class Source(Protocol):
    """What a reader may ask about a dataset's shards. Picklable, and without open files or connections."""

    @property
    def name(self) -> str:
        """The dataset, as the user gave it."""
        ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def shard_samples(self) -> Sequence[int]:
        """Samples of every shard, in the order that shards are numbered in."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of fields over all samples; empty where that is not known."""
        ...

    def shard(self, number: int) -> Shard:
        """A shard by its number."""
        ...

    def url(self, shard: Shard) -> str:
        """The shard as the ``__url__`` of its samples."""
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


@dataclass(frozen=True)
class _Listed:
    """What a table of shards tells of a dataset.

    Attributes:
        name: The dataset, as the user gave it.
        table: Its shards.
    """

    name: str
    table: ShardTable

    @property
    def fingerprint(self) -> str:
        return self.table.fingerprint

    @property
    def fields(self) -> tuple[str, ...]:
        return self.table.fields

    @property
    def shard_samples(self) -> Sequence[int]:
        return self.table.samples

    def shard(self, number: int) -> Shard:
        table = self.table
        return Shard(table.names[number], table.sizes[number], table.samples[number])

    def url(self, shard: Shard) -> str:
        return f"{self.name}/{shard.name}"


@dataclass(frozen=True)
class DirectorySource(_Listed):
    """Shards in a local directory or on a parallel file system, read in place."""

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


@dataclass(frozen=True)
class CachedSource(_Listed):
    """Shards of a bucket in the node's cache. A shard that is there is opened without asking anybody."""

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
    source: str | os.PathLike[str],
    *,
    find_socket: Callable[[], str | None],
    patience_s: float,
    wait_s: float,
    indices: IndexCache | None = None,
) -> Source:
    """The shards of ``source``.

    Args:
        source: A local directory, a ``file://`` URL, or the URL of a dataset in a bucket.
        find_socket: Gives the socket of the daemon that stages datasets from buckets, or None; asked for a bucket only.
        patience_s: How long to try to reach a daemon that is not there.
        wait_s: How long to wait for the manifest.
        indices: Takes the indices of shards that had to be read.

    Raises:
        UsageError: No such directory, or nothing in it that could be read.
        ConfigError: A bucket, and no daemon to stage it.
        FormatError: The manifest or a shard is damaged; the message names it.
        Unavailable, DeadlineExceeded: The daemon, or the manifest, did not come in time.
    """
    text = os.fspath(source)
    scheme = urlsplit(text).scheme
    if scheme == "file":
        return _open_directory(unquote(urlsplit(text).path), indices)
    if "://" not in text:
        return _open_directory(os.path.abspath(os.path.expanduser(text)), indices)
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
    table = _read_manifest(reply.manifest_path)
    if table.fingerprint != reply.fingerprint:
        raise FormatError(
            f"the daemon's manifest of `{source}` changed while it was opened",
            subject=source,
            hint="open it again",
        )
    return CachedSource(source, table, client, reply.dataset, reply.shards_directory)


def _open_directory(directory: str, indices: IndexCache | None) -> DirectorySource:
    if not os.path.isdir(directory):
        what = "is a file, not a directory of shards" if os.path.exists(directory) else "does not exist"
        raise UsageError(
            f"`{directory}` {what}",
            subject=directory,
            hint="give the directory that `stager pack` or webdataset.ShardWriter wrote, or a URL such as s3://bucket/data",
        )
    manifest_path = os.path.join(directory, MANIFEST_NAME)
    if not os.path.exists(manifest_path):
        return _scan_directory(directory, indices)
    return DirectorySource(directory, _read_manifest(manifest_path))


def _read_manifest(path: str) -> ShardTable:
    """The shards of a manifest, read in pieces: it may name millions."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > DATASET_MANIFEST_BYTES_MAX:
                raise FormatError(f"`{path}` has more than {DATASET_MANIFEST_BYTES_MAX} bytes", subject=path)
            table = read_shard_table(iter(lambda: file.read(PIECE_BYTES), b""), of=path)
            if table is None:
                file.seek(0)
                table = table_of(decode_dataset_manifest(file.read(DATASET_MANIFEST_BYTES_MAX), of=path))
    except OSError as error:
        raise StagerError(f"cannot read `{path}`: {error.strerror}", subject=path) from error
    return table


def _scan_directory(directory: str, indices: IndexCache | None) -> DirectorySource:
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
    sizes, samples = array("Q"), array("Q")
    for name in names:
        path = os.path.join(directory, name)
        with open_shard(path, indices=indices) as opened:
            size, index = opened.size, opened.index
        whole.update(f"{name}\n{size} {len(index)}\n".encode("utf-8", "surrogateescape"))
        whole.update(index.layout_digest())
        fields.update(index.fields)
        sizes.append(size)
        samples.append(len(index))
    event(_LOGGER, logging.INFO, "dataset.scanned", directory=directory, shards=len(names))
    table = ShardTable(ShardNames(names), sizes, samples, whole.hexdigest()[:32], tuple(sorted(fields)))
    return DirectorySource(directory, table)
