"""How a daemon ends, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stager.errors import NotFound, Unavailable
from stager.formats.wire import SealReply, SealRequest
from stager.service import Supervisor
from stager.sidecar.daemon import Daemon, Sealing
from stager.sidecar.signals import Stop
from tests.sim.world import World, run_process


class Run:
    """A watched folder with ``names`` to publish, one every ``each_s`` once it drains, after a look of ``look_s``."""

    def __init__(
        self, watch: str = "/w", names: tuple[str, ...] = (), *, each_s: float = 1.0, look_s: float = 0.1
    ) -> None:
        self.watch, self.name = watch, f"checkpoints of {watch}"
        self.names, self.each_s, self.look_s = list(names), each_s, look_s
        self.found: list[str] = []
        self.fails_with: Exception | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        ready()
        if self.fails_with is not None:
            await asyncio.sleep(5)
            raise self.fails_with
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        await asyncio.sleep(self.look_s)
        self.found, self.names = self.names, []
        while self.found:
            await asyncio.sleep(self.each_s)
            self.found.pop(0)

    def unpublished(self) -> list[str]:
        return list(self.found)

    async def seal(self, request: SealRequest) -> SealReply:
        return SealReply(self.watch, "sealed")

    def status(self) -> Mapping[str, Any]:
        return {}


class Other(Run):
    def __init__(self) -> None:
        super().__init__("staging")
        self.name = "staging"


def outcome(*runs: Run, timeout_s: float = 25.0, signals: tuple[float, ...] = (10.0,)) -> tuple[int, float]:
    """The exit code and how long draining took, with signals after these many seconds."""
    seen: list[tuple[int, float]] = []

    async def main() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for after_s in signals:
            loop.call_later(after_s, stop.ask, "test")
        supervisor = Supervisor([Other(), *runs])
        made = Daemon(supervisor, runs, stop, ends_with_draining=("staging",), drain_timeout_s=timeout_s)
        began = loop.time()
        seen.append((await made.run(), loop.time() - began - signals[0]))

    assert run_process(World(1), main)
    return seen[0]


def test_nothing_to_do() -> None:
    """Without runs, or with nothing left to publish, it ends at once with 0."""
    assert outcome()[0] == 0
    code, took_s = outcome(Run())
    assert code == 0 and took_s < 1


def test_all_that_is_complete_is_waited_for() -> None:
    """Runs drain side by side."""
    code, took_s = outcome(Run("/a", ("step-1", "step-2")), Run("/b", ("step-1",), each_s=3.0))
    assert code == 0 and 3 <= took_s < 4


def test_time_is_up() -> None:
    """What is left after the timeout is left: 3."""
    code, took_s = outcome(Run("/a", ("step-1", "step-2"), each_s=15.0))
    assert code == 3 and 25 <= took_s < 26


def test_a_look_that_did_not_end() -> None:
    """Who was cut off before having looked cannot say that all is published."""
    code, took_s = outcome(Run("/a", ("step-1",), look_s=100.0), timeout_s=5.0)
    assert code == 3 and 5 <= took_s < 6


def test_a_second_signal() -> None:
    """It ends at once, whatever is left."""
    code, took_s = outcome(Run("/a", ("step-1",), each_s=1000.0), timeout_s=600.0, signals=(10.0, 12.0))
    assert code == 3 and 2 <= took_s < 3


def test_a_failure_while_draining_comes_out() -> None:
    """A service that fails for good ends the daemon, draining or not."""
    run = Run("/a", ("step-1",), each_s=100.0)
    run.fails_with = ZeroDivisionError("bug")
    for at_s in (1.0, 10.0):
        with pytest.raises(BaseExceptionGroup):
            outcome(run, signals=(at_s,))


def test_a_service_that_restarts_does_not_keep_it_from_ending() -> None:
    """An outage while draining costs no more than the drain's time."""
    run = Run("/a", ("step-1",), each_s=1.0)
    run.fails_with = Unavailable("away")
    assert outcome(run)[0] == 0


async def test_seals_go_to_who_watches() -> None:
    """By folder, not by a common beginning of names; nobody watching is an error that names what is watched."""
    sealing = Sealing([Run("/mnt/a"), Run("/mnt/ab")])
    assert (await sealing.seal(SealRequest("/mnt/ab/step-1"))).checkpoint == "/mnt/ab"
    assert (await sealing.seal(SealRequest("/mnt/a/../a/step-1/"))).checkpoint == "/mnt/a"
    for directory in ("/mnt/a", "/mnt/abc/step-1", "/mnt/a/../x/step-1"):
        with pytest.raises(NotFound, match="/mnt/a, /mnt/ab"):
            await sealing.seal(SealRequest(directory))
