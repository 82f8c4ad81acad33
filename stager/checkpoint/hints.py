"""Hints that something changed below the watched folder: names, gathered until somebody asks.

inotify says nothing about other nodes' writes on network file systems and drops events when it overflows, so a hint only
shortens the wait for the next rescan; without any, everything works, later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from stager.logs import event

log = logging.getLogger("stager.watch")


class Hints:
    """Names that may have changed. Adding and waiting happen on the loop."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._any = asyncio.Event()

    def add(self, name: str) -> None:
        """Something below this name changed; an empty name only wakes the waiter."""
        if name:
            self._names.add(name)
        self._any.set()

    async def wait(self, timeout_s: float) -> None:
        """Until there is a hint, or ``timeout_s`` have passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._any.wait()
        except TimeoutError:
            pass

    def collect(self) -> set[str]:
        """The names since the last call."""
        self._any.clear()
        found, self._names = self._names, set()
        return found


@contextmanager
def watching(folder: str, hints: Hints) -> Iterator[None]:
    """Events below ``folder`` become hints for the time of the block. Where none can be had, that is logged."""
    loop = asyncio.get_running_loop()
    # watchdog 7.1 warns, on its thread, when a directory appears while it walks there; it then does the right thing.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"watchdog\.observers\.inotify")
    observer = Observer()
    observer.daemon = True
    try:
        observer.schedule(_Handler(folder, hints, loop), folder, recursive=True)
        observer.start()
    except OSError as error:
        # Too many watches, or a file system without events.
        event(log, logging.WARNING, "watch.rescan_only", watch=folder, reason=str(error))
        yield
        return
    try:
        yield
    finally:
        observer.stop()
        observer.join(timeout=5.0)


class _Handler(FileSystemEventHandler):
    """Runs on the observer's thread; all it does is to hand a name over."""

    def __init__(self, folder: str, hints: Hints, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        self._hints = hints
        self._loop = loop

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Opening and reading, ours among it, change nothing.
        if event.event_type in ("opened", "closed_no_write"):
            return
        for path in (event.src_path, event.dest_path):
            name = _top_name(self._folder, os.fsdecode(path)) if path else ""
            if name and not name.startswith("."):
                try:
                    self._loop.call_soon_threadsafe(self._hints.add, name)
                except RuntimeError:
                    return  # the loop has ended


def _top_name(folder: str, path: str) -> str:
    prefix = folder.rstrip("/") + "/"
    return path[len(prefix) :].split("/", 1)[0] if path.startswith(prefix) else ""
