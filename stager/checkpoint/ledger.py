"""What is noted of a run's checkpoints, so that a restart asks little again. Losing it costs requests.

Two topics in the daemon's journal: files of a seal that are in the tier, and states of the watched folder that are
committed. Files are noted in batches, since a note is a synced write. All functions block; they go to the ``database`` lane.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stager.errors import FormatError
from stager.formats.commits import FileEntry
from stager.formats.digests import Digest, check_sha256, decode_crc64nvme, encode_crc64nvme
from stager.formats.fields import take_count, take_text
from stager.transfer.upload import UploadJournal


class CheckpointJournal(UploadJournal, Protocol):
    """`stager.journal.Journal` is one."""

    def keys(self, topic: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """A state of a watched name that is committed in the tier.

    Attributes:
        fingerprint: Of the trainer's files.
        target: The checkpoint's name in the run.
        step: Training step, or None.
        sealed_ns: Wall time of its seal.
    """

    fingerprint: str
    target: str
    step: int | None
    sealed_ns: int


class Ledger:
    """The notes of one watched folder."""

    def __init__(self, journal: CheckpointJournal, watch: str) -> None:
        self._journal = journal
        self._files_topic = f"checkpoint.files {watch}"
        self._committed_topic = f"checkpoint.committed {watch}"

    def note_files(self, seal_id: str, target: str, entries: Mapping[str, FileEntry]) -> None:
        """Files of a seal that are durable in the tier, below the checkpoint name ``target``; at least one."""
        value = {
            path: [entry.size, entry.digest.sha256, encode_crc64nvme(entry.digest.crc64nvme), entry.etag]
            for path, entry in entries.items()
        }
        self._journal.put(self._files_topic, f"{seal_id}/{min(entries)}", {"target": target, "files": value})

    def files(self, seal_id: str) -> tuple[str, dict[str, FileEntry]]:
        """What was noted of a seal: the checkpoint's name in the tier, and the files by path.

        Damaged notes are passed over; notes of several names leave nothing to believe.
        """
        found: dict[str, FileEntry] = {}
        targets: set[str] = set()
        for key in self._keys_of(seal_id):
            note = self._journal.get(self._files_topic, key) or {}
            files = note.get("files")
            targets.add(str(note.get("target", "")))
            for path, fields in files.items() if isinstance(files, dict) else ():
                try:
                    size, sha256, crc, etag = fields
                    digest = Digest(check_sha256(sha256), decode_crc64nvme(crc))
                    found[path] = FileEntry(path, int(size), digest, str(etag))
                except (FormatError, TypeError, ValueError):
                    continue
        return (targets.pop(), found) if len(targets) == 1 else ("", {})

    def forget_files(self, seal_id: str) -> None:
        for key in self._keys_of(seal_id):
            self._journal.forget(self._files_topic, key)

    def forget_other_seals(self, seal_ids: Collection[str]) -> None:
        """Drop what is noted of seals that are no more."""
        for key in self._journal.keys(self._files_topic):
            if key.split("/", 1)[0] not in seal_ids:
                self._journal.forget(self._files_topic, key)

    def note_committed(self, name: str, committed: Committed) -> None:
        value: dict[str, Any] = {
            "fingerprint": committed.fingerprint,
            "target": committed.target,
            "step": committed.step,
            "sealed_ns": committed.sealed_ns,
        }
        self._journal.put(self._committed_topic, name, value)

    def committed(self) -> dict[str, Committed]:
        """Committed states by the trainer's name."""
        found = {}
        for name in self._journal.keys(self._committed_topic):
            value = self._journal.get(self._committed_topic, name)
            if value is None:
                continue
            try:
                found[name] = Committed(
                    take_text(value, "fingerprint", at=name),
                    take_text(value, "target", at=name),
                    None if value.get("step") is None else take_count(value, "step", at=name),
                    take_count(value, "sealed_ns", at=name),
                )
            except FormatError:
                continue
        return found

    def forget_committed(self, name: str) -> None:
        self._journal.forget(self._committed_topic, name)

    def _keys_of(self, seal_id: str) -> list[str]:
        return [key for key in self._journal.keys(self._files_topic) if key.startswith(f"{seal_id}/")]
