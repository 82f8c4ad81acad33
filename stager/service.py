"""Services: the long-running parts of a daemon, each a child of one task group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stager.errors import StagerError
from stager.logs import event

log = logging.getLogger("stager.service")

RESTART_MAX_S = 60.0


class Service(Protocol):
    """A part of the daemon that runs until it is cancelled."""

    @property
    def name(self) -> str: ...

    async def run(self, ready: Callable[[], None]) -> None:
        """Work until cancelled; call ``ready`` once when able to serve. Raising ends or restarts the service."""
        ...

    def status(self) -> Mapping[str, Any]:
        """What `stager status` shows; JSON values only."""
        ...


class Supervisor:
    """Runs services side by side. What a retry mends is retried with a visible state; anything else ends the daemon."""

    def __init__(self, services: Sequence[Service] = ()) -> None:
        self.services: tuple[Service, ...] = ()
        self.waiting_for: set[str] = set()
        self.degraded: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()

        for service in services:
            self.add(service)

    def add(self, service: Service) -> None:
        """One more service; before `run`."""
        self.services = (*self.services, service)
        self.waiting_for.add(service.name)

    @property
    def is_ready(self) -> bool:
        """Whether every service has said so."""
        return not self.waiting_for

    async def run(self) -> None:
        """Until cancelled, or until a service ends for good; its error comes out as it is."""
        failures: list[BaseException] = []
        async with asyncio.TaskGroup() as group:
            for service in self.services:
                self._tasks[service.name] = group.create_task(self._supervise(service, failures))
            while running := [task for name, task in self._tasks.items() if name not in self._stopped]:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if failures:
                    break
            for task in self._tasks.values():
                task.cancel()
        if failures:
            raise failures[0]

    def stop(self, name: str) -> None:
        """End one service; the others go on."""
        self._stopped.add(name)
        self.waiting_for.add(name)
        if name in self._tasks:
            self._tasks[name].cancel()

    async def _supervise(self, service: Service, failures: list[BaseException]) -> None:
        attempt = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await service.run(lambda: self._ready(service.name))
            except StagerError as error:
                reason = error
            except BaseExceptionGroup as group:
                found = _only_error(group)
                if found is None:
                    failures.append(group)
                    return
                reason = found
            else:
                failures.append(RuntimeError(f"service {service.name} returned"))
                return
            if not reason.retryable:
                failures.append(reason)
                return
            # A service that ran for long had recovered; its next failure is a first one.
            attempt = 1 if asyncio.get_running_loop().time() - started > 10 * RESTART_MAX_S else attempt + 1
            level = logging.DEBUG if service.name in self.degraded else logging.WARNING
            event(log, level, "service.restarting", service=service.name, reason=reason.message)
            self.degraded[service.name] = reason.message
            await asyncio.sleep(min(RESTART_MAX_S, 2.0**attempt))

    def _ready(self, name: str) -> None:
        self.waiting_for.discard(name)
        if self.degraded.pop(name, None) is not None:
            event(log, logging.INFO, "service.recovered", service=name)


def _only_error(group: BaseExceptionGroup[BaseException]) -> StagerError | None:
    """The one expected error in a group, or None if there is anything else in it."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    first = flat[0]
    return (
        first
        if all(isinstance(error, StagerError) for error in flat) and isinstance(first, StagerError)
        else None
    )
