"""What a checkpoint layout is asked, and what it answers. Pure: a snapshot of names and a way to read bytes go in.

A candidate is a direct child of the watched directory: a directory with all below it, or a single file. An adapter
answers from names, sizes, times and a few small reads; it never looks at the file system itself, and it reads what a
hostile or half-written checkpoint may hold, so everything it reads is bounded and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from stager.errors import FormatError
from stager.formats.commits import CommitMarker

SETTLE_SOUND_S = 0.5
"""Quiet time after a marker that a framework writes when every rank has finished, on a local disk."""
SETTLE_MARKED_S = 2.0
"""Quiet time after a file that is written last, by rules that allow for little more."""
SETTLE_COUNTED_S = 15.0
"""Quiet time where the file of every rank is there and whole, and nothing says that all are of one save."""
SETTLE_RANKS_S = 60.0
"""Quiet time where some rank may still write without any marker saying so."""
SETTLE_UNKNOWN_S = 120.0
"""Quiet time where nothing is known of the writer."""
BESIDE_BYTES_MAX = 4096
"""What is read of a file next to a candidate at most."""

Read = Callable[[str, int, int], bytes]
"""``read(relative path, offset, size)``: fewer bytes only at the end; FileNotFoundError if the file has gone."""

Beside = Callable[[str], bytes | None]
"""``beside(name)``: the beginning of the file of this name next to the candidate, nothing of a directory; None if none is
there."""


class Unfinished(Exception):
    """What is there is what a writer leaves that has not come to its end; more may follow."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a candidate. Size in bytes, time in nanoseconds since the epoch."""

    size: int
    mtime_ns: int
    inode: int = 0


Listing = Mapping[str, Entry]
"""Files by their path relative to the candidate; a single file stands under its own name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a checkpoint.

    Attributes:
        name: Of the directory or file, without a folder.
        is_file: Whether it is a single file.
        listing: Its files at one moment.
        read: Reads their bytes.
        ranks: How many ranks write into it, where that is known, or None.
        beside: Reads trackers and markers next to it.
        node_local: Whether other nodes keep their files of it on disks of their own, markers perhaps among them.
    """

    name: str
    is_file: bool
    listing: Listing
    read: Read
    ranks: int | None = None
    beside: Beside = field(default=lambda name: None)
    node_local: bool = False


@dataclass(frozen=True, slots=True)
class NotMine:
    """Another layout's, or no checkpoint at all."""


@dataclass(frozen=True, slots=True)
class Writing:
    """Of this layout, and not complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Of this layout, and it cannot become complete without being written again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Of this layout, and complete if it stays as it is for ``settle_s`` seconds.

    Attributes:
        layout: The adapter's name.
        step: Training step, or None where neither name nor content tells.
        files: What belongs to it, sorted; leftovers of earlier saves are not among them.
        settle_s: Seconds without a change before it is believed.
        markers: Those of its files that say "complete" to its framework, in the order to make them visible in, last.
        ranks: How many ranks wrote it, where the files tell.
        commit: What the trainer said of it by `stager.commit()`.
    """

    layout: str
    step: int | None
    files: tuple[str, ...]
    settle_s: float
    markers: tuple[str, ...] = ()
    ranks: int | None = None
    commit: CommitMarker | None = None


Verdict = NotMine | Writing | Corrupt | Complete


@dataclass(frozen=True, slots=True)
class CopyOf:
    """The content of a tracker that is that of one of the checkpoint's files, by its path."""

    path: str


Trackers = Mapping[str, bytes | CopyOf]
"""Files next to a checkpoint that point its framework's resume code at it, by name."""


class Layout(Protocol):
    """One way in which a framework lays a checkpoint out."""

    @property
    def name(self) -> str:
        """As in the configuration and in manifests."""
        ...

    def judge(self, candidate: Candidate) -> Complete | NotMine:
        """What ``candidate`` is.

        Raises:
            Unfinished: It is of this layout, and not complete.
            FormatError: It is of this layout, and cannot become complete without being written again.
            FileNotFoundError: A file of the listing has gone meanwhile.
        """
        ...

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        """Those of a checkpoint's files that say "complete" to its framework, in the order to make them visible in."""
        ...

    def trackers(self, name: str, step: int | None, paths: Collection[str]) -> Trackers:
        """What belongs next to a checkpoint of this name, step and files. Empty where the framework would not find a
        checkpoint of this name by them."""
        ...


def judged(layout: Layout, candidate: Candidate) -> Verdict:
    """What ``candidate`` is in the eyes of one layout."""
    try:
        return layout.judge(candidate)
    except Unfinished as reason:
        return Writing(str(reason))
    except FormatError as error:
        return Corrupt(error.message)


def read_whole(candidate: Candidate, path: str, *, bytes_max: int) -> bytes:
    """A small file of the candidate.

    Raises:
        FormatError: It is larger than ``bytes_max``, or shorter than the listing says.
    """
    size = candidate.listing[path].size
    if size > bytes_max:
        raise FormatError(f"`{path}` has {size} bytes; at most {bytes_max} are read", subject=path)
    raw = candidate.read(path, 0, size)
    if len(raw) != size:
        raise FormatError(f"`{path}` gave {len(raw)} bytes where {size} were listed", subject=path)
    return raw


def below(candidate: Candidate, folder: str) -> Candidate:
    """The candidate that a nested directory of ``candidate`` makes."""
    prefix = f"{folder}/"
    nested = {
        path[len(prefix) :]: entry for path, entry in candidate.listing.items() if path.startswith(prefix)
    }

    def read(path: str, offset: int, size: int) -> bytes:
        return candidate.read(prefix + path, offset, size)

    return replace(candidate, name=folder.rsplit("/", 1)[-1], is_file=False, listing=nested, read=read)
