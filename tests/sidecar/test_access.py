"""Asking stores at the start: what ends the daemon, what is waited for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stager.errors import (
    BucketNotFound,
    ConfigError,
    NotFound,
    PermissionDenied,
    StagerError,
    Throttled,
    Unauthenticated,
    Unavailable,
)
from stager.sidecar.access import AccessService, Entrance
from tests.sim.world import World, run_process


class Doors:
    """Stores that answer a read by a script: an error each time, then the object."""

    def __init__(self, **scripts: list[StagerError]) -> None:
        self.scripts = scripts
        self.asked: list[str] = []
        self.delay_s = 0.1

    async def open(self, url: str) -> Any:
        return Door(self, url)


class Door:
    def __init__(self, doors: Doors, url: str) -> None:
        self.doors, self.url = doors, url

    @asynccontextmanager
    async def get(self, key: str) -> AsyncIterator[None]:
        self.doors.asked.append(f"{self.url}/{key}")
        await asyncio.sleep(self.doors.delay_s)
        script = self.doors.scripts[self.url]
        if script:
            raise script.pop(0)
        yield None


def service_of(doors: Doors) -> AccessService:
    sought = [Entrance(url, "key", must_read=url == "dataset") for url in doors.scripts]
    return AccessService(sought, doors.open, random.Random(1))


async def run_for(service: AccessService, seconds: float) -> bool:
    """Whether it became ready in that time; its error comes out as it is."""
    ready = asyncio.Event()
    try:
        async with asyncio.timeout(seconds):
            await service.run(ready.set)
    except TimeoutError:
        pass
    return ready.is_set()


@pytest.mark.parametrize("error", [BucketNotFound, Unauthenticated, ConfigError])
@pytest.mark.parametrize("url", ["dataset", "run"])
def test_what_no_wait_mends_comes_out(error: type[StagerError], url: str) -> None:
    """As an error of its own kind, with its hint."""

    async def main() -> None:
        doors = Doors(**{"dataset": [], "run": [], url: [error("is wrong", hint="mend it")]})
        with pytest.raises(error, match=r"is wrong\nhint: mend it"):
            await run_for(service_of(doors), 10)

    assert run_process(World(1), main)


def test_all_that_is_wrong_is_told() -> None:
    """Two stores, two messages, one error; the same message only once."""

    async def main() -> None:
        doors = Doors(dataset=[PermissionDenied("no reading")], run=[BucketNotFound("no bucket")], more=[])
        doors.scripts["more"] = [BucketNotFound("no bucket")]
        with pytest.raises(PermissionDenied) as caught:
            await run_for(service_of(doors), 10)
        assert caught.value.message == "no reading\nno bucket"

    assert run_process(World(1), main)


def test_a_run_that_may_not_be_read_is_given_the_benefit_of_the_doubt() -> None:
    """Where listing is forbidden, a missing object is refused instead of missed."""

    async def main() -> None:
        doors = Doors(run=[PermissionDenied("no")], dataset=[NotFound("no manifest yet")])
        assert await run_for(service_of(doors), 10)
        assert sorted(doors.asked) == ["dataset/key", "run/key"]

    assert run_process(World(1), main)


def test_a_store_that_is_away_is_asked_until_it_is_back() -> None:
    """Ready at once, its absence in the status, and no more questions once it has answered."""

    async def main() -> None:
        doors = Doors(dataset=[Unavailable("away"), Throttled("slow down"), Unavailable("away")], run=[])
        service = service_of(doors)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run_for(service, 1000))
            await asyncio.sleep(0.15)
            assert service.status() == {"dataset": "away"}
            await asyncio.sleep(100)
            assert service.status() == {} and len(doors.asked) == 5
            task.cancel()

    assert run_process(World(1), main)


def test_a_store_that_comes_back_with_a_refusal() -> None:
    """An outage first, wrong credentials afterwards: still told."""

    async def main() -> None:
        doors = Doors(dataset=[Unavailable("away"), Unauthenticated("who are you")])
        with pytest.raises(Unauthenticated):
            await run_for(service_of(doors), 1000)

    assert run_process(World(1), main)


def test_a_store_that_says_nothing() -> None:
    """A black hole is away, and does not keep the daemon from being ready."""

    async def main() -> None:
        doors = Doors(dataset=[])
        doors.delay_s = 1e6
        service = service_of(doors)
        assert await run_for(service, 20)
        assert service.status() == {"dataset": "dataset did not answer in 15 s"}

    assert run_process(World(1), main)
