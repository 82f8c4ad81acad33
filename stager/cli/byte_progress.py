"""Progress: a bar on a terminal, a plain line every few seconds elsewhere. Always on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from stager.cli.output import talk
from stager.units import format_duration, format_size

LINE_EVERY_S = 5.0


class ByteProgress(Protocol):
    """Bytes done of a total."""

    def advance(self, size: int) -> None:
        """``size`` more bytes are done."""
        ...


class _Bar:
    def __init__(self, progress: Progress, title: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total)

    def advance(self, size: int) -> None:
        self._progress.advance(self._task, size)


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._said = self._started

    def advance(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S:
            self._said = now
            self.say(now)

    def say(self, now: float) -> None:
        rate = self._done / max(now - self._started, 1e-3)
        left = format_duration((self._total - self._done) / rate) if rate else "?"
        talk().print(
            f"{self._title}: {format_size(self._done)} of {format_size(self._total)}, {format_size(rate)}/s, {left} left"
        )


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[ByteProgress]:
    """Show the progress of ``total`` bytes for the time of the block."""
    console = talk()
    if not console.is_terminal:
        yield _Lines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, title, total)
