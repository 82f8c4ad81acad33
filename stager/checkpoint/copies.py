"""Files that a tier holds already, under an earlier checkpoint: frozen weights, tokenizers, configurations.

They are copied on the server instead of being sent. Whether a file is one has to be known before it is sent, which costs
reading it once more; so a large file is tried only when it was the same in the two checkpoints before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stager.formats.commits import CheckpointManifest, FileEntry
from stager.formats.names import join_key


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Which files are tried.

    Attributes:
        bytes_min: Smaller ones are sent: a copy takes more requests than a small put.
        trial_bytes_max: Larger ones are tried only once they have stood still over two checkpoints.
    """

    bytes_min: int = 64 << 10
    trial_bytes_max: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Copyable:
    """An object that may hold a file's bytes."""

    key: str
    entry: FileEntry


class Copies:
    """What the newest commits of one tier hold. ``copied_bytes`` counts what was not sent for it."""

    def __init__(self, options: CopyOptions = CopyOptions()) -> None:
        self._options = options
        self._recent: deque[tuple[str, dict[str, FileEntry]]] = deque(maxlen=2)
        self.copied_bytes = 0

    @property
    def known(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._recent)

    def remember(self, manifest: CheckpointManifest) -> None:
        """The newest commit of the tier."""
        self._recent.append((manifest.checkpoint, {entry.path: entry for entry in manifest.files}))

    def find(self, path: str, size: int) -> Copyable | None:
        """What may hold the bytes of this file; whoever asks compares the digests."""
        if not self._recent or size < self._options.bytes_min:
            return None
        checkpoint, files = self._recent[-1]
        entry = files.get(path)
        if entry is None or entry.size != size or not entry.etag:
            return None
        if size > self._options.trial_bytes_max:
            before = self._recent[0][1].get(path)
            if len(self._recent) < 2 or before is None or before.digest != entry.digest:
                return None
        return Copyable(join_key(checkpoint, path), entry)
