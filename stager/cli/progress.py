"""Progress on standard error: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stager.cli.output import talk

if TYPE_CHECKING:
    from stager.pack.run import PackProgress

LINE_INTERVAL_S = 5.0

Report = Callable[["PackProgress"], None]


@contextmanager
def pack_progress(now: Callable[[], float]) -> Iterator[Report]:
    """What to call with each `PackProgress`; ``now`` gives seconds."""
    if talk().is_terminal:
        with _bar(now) as report:
            yield report
    else:
        yield _PlainLines(now)


@contextmanager
def _bar(now: Callable[[], float]) -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=talk(), transient=True) as bar:
        task = bar.add_task("looking at the input", total=None, speed="")
        pace = Pace(now)

        def report(progress: PackProgress) -> None:
            packing = progress.phase == "pack"
            bar.update(
                task,
                description="packing" if packing else "looking at the input",
                total=progress.samples_total if packing else None,
                completed=progress.samples if packing else progress.samples_total,
                speed=pace.describe(progress) if packing else "samples found",
            )

        yield report


class _PlainLines:
    """A line now and then, for logs."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next = now() + LINE_INTERVAL_S
        self._pace = Pace(now)

    def __call__(self, progress: PackProgress) -> None:
        if progress.phase == "pack":
            said = (
                f"packing: {progress.samples} of {progress.samples_total} samples,"
                f" {progress.shards} of {progress.shards_total} shards"
            )
            pace = self._pace.describe(progress)
            said += f", {pace}" if pace else ""
        else:
            said = f"looking at the input: {progress.samples_total} samples found"
        if self._now() >= self._next:
            self._next = self._now() + LINE_INTERVAL_S
            talk().print(said, markup=False)


class Pace:
    """Samples and bytes a second since the packing began, and the time left at that pace."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began: float | None = None
        self._samples_before = 0

    def describe(self, progress: PackProgress) -> str:
        """``1234 samples/s, 56.7 MB/s, 42 s left``."""
        from stager.units import format_duration, format_size

        if self._began is None:
            self._began, self._samples_before = self._now(), progress.samples
        seconds = self._now() - self._began
        written = progress.bytes - progress.kept_bytes
        if seconds <= 0 or written <= 0:
            return ""
        left = (progress.bytes_total - progress.bytes) * seconds / written
        rate = max(0, progress.samples - self._samples_before) / seconds
        return f"{rate:.0f} samples/s, {format_size(written / seconds)}/s, {format_duration(left)} left"
