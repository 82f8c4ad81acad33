"""One seed's world: its randomness, its deaths, and the virtual loop it runs on.

A crash is a countdown over elementary steps of disk and store. When it is reached the world is dead: every further
step raises `Crashed`, also from `finally` blocks, so that nothing happens after the instant of death.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class Crashed(BaseException):
    """The process was killed. Not an Exception: no handler of the engine may survive it."""


class Stuck(Exception):
    """Nothing is runnable and nothing is scheduled: in the real world this would hang for ever."""


class World:
    """Randomness and deaths of one simulated run; replayed by its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.dead = False
        self.steps = 0
        self.crash_at: int | None = None
        self.trace: list[str] = []

    def step(self, name: str) -> None:
        """One elementary thing happens, unless the process dies first."""
        if self.dead:
            raise Crashed(f"seed {self.seed}: dead before {name}")
        self.steps += 1
        self.trace.append(name)
        if self.crash_at is not None and self.steps >= self.crash_at:
            self.dead = True
            raise Crashed(f"seed {self.seed}: killed at step {self.steps}, {name}")

    def revive(self, *, crash_within: int | None) -> None:
        """A new process starts; it dies at a random step within ``crash_within``, or never."""
        self.dead = False
        self.crash_at = None if crash_within is None else self.steps + self.random.randint(1, crash_within)


class VirtualSelector(selectors.DefaultSelector):
    """Waiting takes no time: it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck("no task can run and no timer is set")
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a counter. Days of sleeping pass in milliseconds."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)
        # A timer counts as due a resolution early; with a counter for time that would spin.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now


class VirtualClock:
    """Wall time that follows the virtual loop."""

    START_NS = 1_800_000_000 * 10**9

    def wall_ns(self) -> int:
        return self.START_NS + int(asyncio.get_running_loop().time() * 1e9)


def run_process(world: World, main: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
    """Run one life of a process to its end. True if it ended by itself, False if it was killed.

    Errors of the engine other than the crash come out as they are.
    """
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())
    except BaseException as error:
        if not world.dead or not _only_crashes(error):
            raise
        return False
    return not world.dead


def _only_crashes(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_only_crashes(inner) for inner in error.exceptions)
    return isinstance(error, Crashed | asyncio.CancelledError)
