"""Our own marker, which `stager.commit()` and ``stager seal`` leave: the trainer itself says that it has finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stager.errors import FormatError
from stager.formats.commits import COMMIT_MARKER_NAME, decode_marker
from stager.formats.layouts.api import Candidate, Complete, Corrupt, NotMine, Verdict, Writing, read_whole
from stager.formats.layouts.steps import is_unfinished_file, is_unfinished_name, step_in

_MARKER_BYTES_MAX = 16 << 20


class CommitMarked:
    """A directory with ``.stager-commit.json``. It must not be older than what it commits."""

    name = "commit"

    def judge(self, candidate: Candidate) -> Verdict:
        listing = candidate.listing
        if candidate.is_file or COMMIT_MARKER_NAME not in listing or is_unfinished_name(candidate.name):
            return NotMine()
        of = f"{candidate.name}/{COMMIT_MARKER_NAME}"
        try:
            commit = decode_marker(
                read_whole(candidate, COMMIT_MARKER_NAME, bytes_max=_MARKER_BYTES_MAX), of=of
            )
        except FormatError as error:
            return Corrupt(error.message)
        files = tuple(sorted(path for path in listing if not is_unfinished_file(path)))
        committed_ns = listing[COMMIT_MARKER_NAME].mtime_ns
        younger = [path for path in files if listing[path].mtime_ns > committed_ns]
        if younger:
            return Writing(
                f"`{younger[0]}` is younger than `{COMMIT_MARKER_NAME}`: commit again after saving"
            )
        if len(files) == 1:
            return Writing("it holds nothing but the commit marker")
        return Complete(
            layout=self.name,
            step=commit.step if commit.step is not None else step_in(candidate.name),
            files=files,
            settle_s=0.0,
            markers=self.markers(files),
            commit=commit,
        )

    def markers(self, paths: Collection[str]) -> tuple[str, ...]:
        return (COMMIT_MARKER_NAME,) if COMMIT_MARKER_NAME in paths else ()

    def trackers(self, checkpoint: str, step: int | None) -> Mapping[str, bytes]:
        return {}
