"""Shared bounds: bytes in flight by priority, rates, waits that end."""

from __future__ import annotations

import asyncio

import pytest

from stager.budget import ByteBudget, Priority, RateLimit
from stager.errors import DeadlineExceeded
from tests.sim.world import World, run_process


def test_the_bound_holds_and_everybody_is_served() -> None:
    """Whatever the sizes and priorities, never more than the total is held, and in the end nothing."""
    world = World(5)
    budget = ByteBudget(100)
    served = 0

    async def user() -> None:
        nonlocal served
        await asyncio.sleep(world.random.random())
        async with budget.reserve(world.random.randint(0, 130), world.random.choice(list(Priority))):
            assert budget.held_bytes <= 100
            await asyncio.sleep(world.random.random())
        served += 1

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(user())

    assert run_process(world, main)
    assert served == 200 and budget.held_bytes == 0


def test_a_restore_goes_before_prefetching_and_prefetching_is_not_starved() -> None:
    """Priority decides; who has waited long enough rises."""
    order: list[str] = []

    async def user(budget: ByteBudget, name: str, priority: Priority, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with budget.reserve(10, priority):
            order.append(name)
            await asyncio.sleep(5)

    async def main() -> None:
        budget = ByteBudget(10)
        async with asyncio.TaskGroup() as group:
            group.create_task(user(budget, "first", Priority.PREFETCH, 0))
            group.create_task(user(budget, "scrub", Priority.SCRUB, 0.5))
            for number in range(30):
                group.create_task(user(budget, f"restore-{number}", Priority.RESTORE, 1 + number))
            group.create_task(user(budget, "prefetch", Priority.PREFETCH, 1))

    assert run_process(World(1), main)
    assert order[:2] == ["first", "restore-0"]
    assert order.index("prefetch") < 15 and order.index("scrub") < 20


def test_a_wait_ends_with_what_it_waited_for() -> None:
    """No bytes in time is an error that names the purpose; a cancelled wait holds nothing."""

    async def main() -> None:
        budget = ByteBudget(10)
        async with budget.reserve(10, Priority.DEMAND):
            with pytest.raises(DeadlineExceeded, match="download memory"):
                async with budget.reserve(1, Priority.DEMAND, deadline_s=3, purpose="download memory"):
                    pass
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), budget.reserve(1, Priority.DEMAND):
                    pass
        async with budget.reserve(10, Priority.SCRUB, deadline_s=1):
            pass
        assert budget.held_bytes == 0

    assert run_process(World(1), main)


def test_a_rate_is_kept_and_can_be_lifted() -> None:
    """Bytes pass at the rate, by all users together; None lets everything pass."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rate = RateLimit(1000.0)
        began = loop.time()

        async def user() -> None:
            for _ in range(10):
                await rate.take(100)

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(user())
        assert 4.5 <= loop.time() - began <= 5.0
        rate.bytes_per_s = None
        began = loop.time()
        await rate.take(10**12)
        assert loop.time() == began

    assert run_process(World(1), main)
