"""Signals: the first SIGTERM, SIGINT or SIGHUP drains, the second aborts; SIGUSR2 turns debug logging on and off."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from stager.logs import event

log = logging.getLogger("stager.signals")


class Stop:
    """What the daemon waits on: a first request to stop, and a second one to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.abort = asyncio.Event()

    def ask(self, by: str) -> None:
        """Ask to stop; asking again asks to abort."""
        if self.asked.is_set():
            event(log, logging.WARNING, "stop.abort", by=by)
            self.abort.set()
        else:
            event(log, logging.INFO, "stop.asked", by=by)
            self.asked.set()


def install(stop: Stop) -> None:
    """Route the process's signals to ``stop``, for the life of the running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Who started us with a signal ignored (nohup, a shell's `&`) meant it.
        if number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, stop.ask, signal.Signals(number).name)
    loop.add_signal_handler(signal.SIGUSR2, _toggle_debug)


def _toggle_debug() -> None:
    logger = logging.getLogger("stager")
    logger.setLevel(logging.INFO if logger.level == logging.DEBUG else logging.DEBUG)
    event(log, logging.INFO, "log.level", level=logging.getLevelName(logger.level), process=os.getpid())
