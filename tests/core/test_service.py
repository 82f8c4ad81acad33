"""Supervision: what is retried, what ends the daemon, who is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stager.errors import ConfigError, Unavailable
from stager.service import Supervisor
from tests.sim.world import World, run_process


class Scripted:
    """A service that does what its script says, run by run: an error to raise, or None to work until cancelled."""

    def __init__(self, name: str, *script: Exception | None) -> None:
        self.name = name
        self.script = list(script)
        self.runs = 0

    async def run(self, ready: Callable[[], None]) -> None:
        self.runs += 1
        act = self.script.pop(0) if self.script else None
        if act is not None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail(act))
        ready()
        await asyncio.get_running_loop().create_future()

    async def _fail(self, act: Exception) -> None:
        await asyncio.sleep(1)
        raise act

    def status(self) -> Mapping[str, Any]:
        return {}


def test_a_passing_failure_is_retried_and_seen() -> None:
    """A retryable error restarts the service alone; its state is degraded until it is ready again."""
    shaky, steady = Scripted("shaky", Unavailable("away"), Unavailable("away")), Scripted("steady")

    async def main() -> None:
        supervisor = Supervisor([shaky, steady])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await asyncio.sleep(1.5)
            assert supervisor.degraded == {"shaky": "away"} and supervisor.waiting_for == {"shaky"}
            await asyncio.sleep(60)
            assert supervisor.is_ready and not supervisor.degraded
            task.cancel()

    assert run_process(World(1), main)
    assert (shaky.runs, steady.runs) == (3, 1)


@pytest.mark.parametrize("error", [ConfigError("wrong"), ZeroDivisionError("bug")])
def test_what_no_retry_mends_ends_the_daemon(error: Exception) -> None:
    """The error comes out, and the other services are cancelled."""

    async def main() -> None:
        with pytest.raises((ConfigError, ExceptionGroup)):
            await Supervisor([Scripted("broken", error), Scripted("steady")]).run()

    assert run_process(World(1), main)


def test_one_service_is_stopped_and_the_others_go_on() -> None:
    """Draining ends staging; the rest still serves."""
    first, second = Scripted("first"), Scripted("second")

    async def main() -> None:
        supervisor = Supervisor([first, second])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.run())
            await asyncio.sleep(1)
            supervisor.stop("first")
            await asyncio.sleep(100)
            assert not task.done() and supervisor.waiting_for == {"first"}
            task.cancel()

    assert run_process(World(1), main)
