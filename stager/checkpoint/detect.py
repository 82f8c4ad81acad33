"""When is a checkpoint to be sealed? A state machine over looks. Pure: looks and times go in, decisions come out.

    seen -> writing -> settling -> taken          side exits: gone before it was taken, corrupt, abandoned

Transitions are decided here, in one synchronous step each; the service acts on them afterwards. Any change of a file
opens the verdict again, also after the checkpoint was taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stager.checkpoint.look import Look
from stager.formats.layouts.api import Complete, Corrupt, Entry, NotMine, Writing

ABANDONED_AFTER_S = 3600.0
CORRUPT_AFTER_S = 2.0


class Phase(StrEnum):
    """Where a name in the watched folder stands."""

    IGNORED = "ignored"
    WRITING = "writing"
    SETTLING = "settling"
    CORRUPT = "corrupt"
    ABANDONED = "abandoned"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Take:
    """Seal it now."""

    look: Look
    complete: Complete
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Gone:
    """It vanished before it was taken."""

    name: str
    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class Bad:
    """It is corrupt, or has not moved for long without being complete; told once for each of its states."""

    name: str
    phase: Phase
    reason: str


Decision = Take | Gone | Bad


@dataclass(slots=True)
class _Tracked:
    phase: Phase
    files: Mapping[str, Entry]
    quiet_since: float
    settle_s: float = 0.0
    reason: str = ""
    told: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """What the status shows of a name."""

    name: str
    phase: Phase
    size: int
    reason: str


class Detector:
    """The watched folder's names. Times are the loop's, in seconds."""

    def __init__(self, taken: Mapping[str, str] | None = None) -> None:
        """``taken``: fingerprints by name of what was taken by an earlier life."""
        self._taken = dict(taken or {})
        self._tracked: dict[str, _Tracked] = {}

    def observe(self, name: str, found: Look | None, now: float) -> Decision | None:
        """Take a look into account; what is to be done about it, if anything."""
        before = self._tracked.get(name)
        if found is None:
            return self._vanished(name)
        if before is None or before.files != found.files:
            tracked = _Tracked(Phase.WRITING, found.files, now)
        else:
            tracked = before
        self._tracked[name] = tracked
        return self._judge(name, tracked, found, now)

    def take(self, name: str, fingerprint: str) -> None:
        """The state with this fingerprint was sealed."""
        self._taken[name] = fingerprint
        if name in self._tracked:
            self._tracked[name].phase = Phase.TAKEN

    def reopen(self, name: str, now: float) -> None:
        """Forget that a name was taken; it has to be quiet again first."""
        self._taken.pop(name, None)
        tracked = self._tracked.get(name)
        if tracked is not None:
            tracked.phase, tracked.quiet_since, tracked.told = Phase.WRITING, now, False

    def is_taken(self, name: str, fingerprint: str) -> bool:
        return self._taken.get(name) == fingerprint

    def next_due(self) -> float | None:
        """When a settling name may be complete."""
        dues = [
            tracked.quiet_since + tracked.settle_s
            for tracked in self._tracked.values()
            if tracked.phase is Phase.SETTLING
        ]
        return min(dues, default=None)

    def names(self) -> frozenset[str]:
        """Everything that was there at the last look."""
        return frozenset(self._tracked)

    def standings(self) -> list[Standing]:
        """For the status, by name; what is no checkpoint is left out."""
        return [
            Standing(
                printable(name),
                tracked.phase,
                sum(entry.size for entry in tracked.files.values()),
                tracked.reason,
            )
            for name, tracked in sorted(self._tracked.items())
            if tracked.phase is not Phase.IGNORED
        ]

    def _judge(self, name: str, tracked: _Tracked, found: Look, now: float) -> Decision | None:
        verdict = found.verdict
        quiet_s = now - tracked.quiet_since
        if isinstance(verdict, NotMine):
            tracked.phase, tracked.reason = Phase.IGNORED, ""
            return None
        if isinstance(verdict, Complete):
            fingerprint = fingerprint_of(found.files, verdict.files)
            tracked.settle_s, tracked.reason = verdict.settle_s, ""
            if self._taken.get(name) == fingerprint:
                tracked.phase = Phase.TAKEN
                return None
            tracked.phase = Phase.SETTLING
            return Take(found, verdict, fingerprint) if quiet_s >= verdict.settle_s else None
        tracked.reason = verdict.reason
        if isinstance(verdict, Corrupt):
            return self._bad(name, tracked, Phase.CORRUPT, quiet_s >= CORRUPT_AFTER_S)
        return self._waiting(name, tracked, verdict, quiet_s)

    def _waiting(self, name: str, tracked: _Tracked, verdict: Writing, quiet_s: float) -> Decision | None:
        if quiet_s < ABANDONED_AFTER_S:
            tracked.phase = Phase.WRITING
            return None
        return self._bad(name, tracked, Phase.ABANDONED, True)

    def _bad(self, name: str, tracked: _Tracked, phase: Phase, certain: bool) -> Decision | None:
        tracked.phase = phase
        if tracked.told or not certain:
            return None
        tracked.told = True
        return Bad(name, phase, tracked.reason)

    def _vanished(self, name: str) -> Decision | None:
        tracked = self._tracked.pop(name, None)
        was_taken = self._taken.pop(name, None) is not None
        if tracked is None or tracked.phase in (Phase.IGNORED, Phase.TAKEN):
            return None
        if was_taken and tracked.phase is not Phase.SETTLING:
            # The trainer removes what was taken, file by file: nothing is lost.
            return None
        return Gone(name, tracked.phase, tracked.reason or "it was complete and had not settled")


def printable(name: str) -> str:
    """A file's name as text that can be encoded: what is not Unicode in it becomes escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def fingerprint_of(files: Mapping[str, Entry], paths: Collection[str]) -> str:
    """32 hexadecimal digits that change with any file's name, size, time or inode."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        entry = files[path]
        whole.update(f"{path}\0{entry.size} {entry.mtime_ns} {entry.inode}\n".encode())
    return whole.hexdigest()[:32]
