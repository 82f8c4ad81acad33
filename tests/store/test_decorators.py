"""The decorators: each passes every verb on, and adds exactly what it is for. Time is virtual."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from stager.budget import RateLimit
from stager.checksum import crc64nvme
from stager.errors import (
    AlreadyExists,
    Exhausted,
    NotFound,
    PreconditionFailed,
    StagerError,
    Throttled,
    Unavailable,
)
from stager.store.api import CREATE, ObjectStore, Replace, Span, read_all
from stager.store.limited import LimitedStore
from stager.store.memory import MemoryBucket, MemoryStore
from stager.store.metered import MeteredStore, StoreMeter
from stager.store.prefixed import PrefixedStore
from stager.store.retrying import RetryingStore, RetryPolicy
from tests.sim.store import FaultyStore
from tests.sim.world import World, run_process

DECORATORS = [RetryingStore, LimitedStore, MeteredStore, PrefixedStore]
VERBS = [name for name, _ in inspect.getmembers(ObjectStore, inspect.isfunction) if not name.startswith("_")]


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    assert run_process(World(1), main)


def retrying(inner: ObjectStore, **policy: Any) -> RetryingStore:
    return RetryingStore(inner, chance=random.Random(1), policy=RetryPolicy(**policy))


@pytest.mark.parametrize("decorator", DECORATORS)
def test_every_verb_is_there(decorator: type) -> None:
    """A verb that a decorator forgets would bypass it; each is defined by the class itself, with the same parameters."""
    for verb in VERBS:
        assert verb in vars(decorator), verb
        expected = inspect.signature(getattr(ObjectStore, verb)).parameters
        assert list(inspect.signature(getattr(decorator, verb)).parameters) == list(expected), verb
    assert isinstance(vars(decorator)["properties"], property)


Operation = Callable[[ObjectStore, MemoryBucket], Awaitable[None]]


async def put_overwrite(store: ObjectStore, bucket: MemoryBucket) -> None:
    await store.put("k", b"new", crc64nvme=crc64nvme(b"new"))
    assert bucket.objects["k"].body == b"new"


async def put_create(store: ObjectStore, bucket: MemoryBucket) -> None:
    version = await store.put("fresh", b"mine", mode=CREATE)
    assert bucket.objects["fresh"].info.version.etag == version.etag
    with pytest.raises(AlreadyExists):
        await store.put("there", b"mine", mode=CREATE)


async def put_replace(store: ObjectStore, bucket: MemoryBucket) -> None:
    old = bucket.objects["there"].info.version
    version = await store.put("there", b"newer", mode=Replace(old))
    assert bucket.objects["there"].info.version.etag == version.etag
    with pytest.raises(PreconditionFailed):
        await store.put("there", b"late", mode=Replace(old))


async def read(store: ObjectStore, bucket: MemoryBucket) -> None:
    body, info = await read_all(store, "there", bytes_max=100)
    assert (body, info.size) == (b"0123456789", 10)
    async with store.get("there", span=Span(2, 9)) as reader:
        pieces = []
        while piece := await reader.read(3):
            pieces.append(piece)
        assert b"".join(pieces) == b"2345678"
    with pytest.raises(NotFound):
        await store.head("missing")


async def listing(store: ObjectStore, bucket: MemoryBucket) -> None:
    assert [info.key async for info in store.list_objects()] == sorted(bucket.objects)


async def deletion(store: ObjectStore, bucket: MemoryBucket) -> None:
    assert await store.delete(["there", "missing"]) == {}
    assert "there" not in bucket.objects


async def copying(store: ObjectStore, bucket: MemoryBucket) -> None:
    await store.copy("there", "copy", if_match=bucket.objects["there"].info.version)
    assert bucket.objects["copy"].body == b"0123456789"


async def uploading(store: ObjectStore, bucket: MemoryBucket) -> None:
    for key, mode in [("u", CREATE), ("v", None)]:
        upload_id = await store.begin_upload(key, metadata={"a": "b"})
        tags = [await store.put_part(key, upload_id, number, b"part") for number in (1, 2)]
        assert [tag.etag for tag in await store.list_parts(key, upload_id)] == [tag.etag for tag in tags]
        if mode is None:
            version = await store.complete_upload(key, upload_id, tags)
        else:
            version = await store.complete_upload(key, upload_id, tags, mode=mode)
        assert bucket.objects[key].info.version.etag == version.etag
        assert bucket.objects[key].body == b"partpart"
    upload_id = await store.begin_upload("there")
    tag = await store.put_part("there", upload_id, 1, b"other")
    with pytest.raises(AlreadyExists):
        await store.complete_upload("there", upload_id, [tag], mode=CREATE)
    await store.abort_upload("there", upload_id)
    assert upload_id not in bucket.uploads
    # Lost answers to `begin_upload` leave uploads without parts; the listing shows them, each once.
    assert sorted([found async for found in store.list_uploads()]) == sorted(
        (upload.key, upload_id) for upload_id, upload in bucket.uploads.items()
    )


OPERATIONS: list[Operation] = [
    put_overwrite,
    put_create,
    put_replace,
    read,
    listing,
    deletion,
    copying,
    uploading,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost"])
def test_any_one_failing_call_changes_nothing(operation: Operation, lost: bool) -> None:
    """Fail the Nth call for every N, before its effect or after it: the outcome is the same."""
    calls = 0
    number = 0
    while number <= calls:
        world = World(number)
        bucket = MemoryBucket()

        async def main(number: int = number, world: World = world, bucket: MemoryBucket = bucket) -> None:
            nonlocal calls
            seed = MemoryStore(bucket)
            for key in ("there", "z/1", "z/2"):
                await seed.put(key, b"0123456789")
            faulty = FaultyStore(seed, world, fail_call=number, lost=lost)
            await operation(retrying(faulty), bucket)
            calls = max(calls, faulty.calls if number == 0 else calls)

        assert run_process(world, main)
        number += 1
    assert calls > 0


@pytest.mark.parametrize("seed", range(30))
def test_many_failing_calls(seed: int) -> None:
    """A third of all calls fail, in every way; with enough tries each verb still does what it says."""
    world = World(seed)

    async def main() -> None:
        for operation in OPERATIONS:
            bucket = MemoryBucket()
            for key in ("there", "z/1", "z/2"):
                await MemoryStore(bucket).put(key, b"0123456789")
            faulty = FaultyStore(MemoryStore(bucket), world, fault_ratio=0.3)
            await operation(retrying(faulty, attempts_max=40, total_s_max=3600.0), bucket)

    assert run_process(world, main)


class Failing(MemoryStore):
    """Fails every head with one error, and notes when."""

    def __init__(self, error: StagerError) -> None:
        super().__init__()
        self.error = error
        self.times: list[float] = []

    async def head(self, key: str) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        raise self.error


def test_gives_up_after_the_last_try() -> None:
    """Then it is Exhausted, which names key, tries and the last reason, and is not retryable itself."""

    async def main() -> None:
        inner = Failing(Unavailable("no route", subject="k", hint="plug it in"))
        with pytest.raises(Exhausted, match=r"`k`.*4 tries.*no route") as caught:
            await retrying(inner, attempts_max=4).head("k")
        assert len(inner.times) == 4
        assert caught.value.hint == "plug it in"
        assert not caught.value.retryable
        assert isinstance(caught.value.__cause__, Unavailable)

    virtually(main)


def test_gives_up_when_time_is_up() -> None:
    """No try begins after the total time, however many tries are left."""

    async def main() -> None:
        inner = Failing(Unavailable("no route"))
        with pytest.raises(Exhausted):
            await retrying(inner, attempts_max=10_000, total_s_max=300.0).head("k")
        assert inner.times[-1] <= 300.0

    virtually(main)


def test_waits_as_long_as_it_is_told() -> None:
    """Retry-After is obeyed."""

    async def main() -> None:
        inner = Failing(Throttled("slow down", retry_after_s=7.0))
        with pytest.raises(Exhausted):
            await retrying(inner, attempts_max=3).head("k")
        assert inner.times == [0.0, 7.0, 14.0]

    virtually(main)


def test_other_errors_are_not_tried_again() -> None:
    """What nobody's waiting mends comes out at once, as it is."""

    async def main() -> None:
        inner = Failing(NotFound("nothing"))
        with pytest.raises(NotFound):
            await retrying(inner).head("k")
        assert len(inner.times) == 1

    virtually(main)


def test_an_outage_empties_the_budget() -> None:
    """Many callers in an outage make few retries together, not each its own number."""

    async def main() -> None:
        inner = Failing(Unavailable("down"))
        store = retrying(inner, attempts_max=6, retries_banked_max=20.0)
        for _ in range(50):
            with pytest.raises(Exhausted):
                await store.head("k")
        assert len(inner.times) == 50 + 20

    virtually(main)


def test_at_most_so_many_calls_at_once() -> None:
    """Calls and open bodies count; everybody gets a turn."""

    class Slow(MemoryStore):
        running = highest = 0

        async def head(self, key: str) -> Any:
            self.running += 1
            self.highest = max(self.highest, self.running)
            await asyncio.sleep(1)
            self.running -= 1
            return await super().head(key)

    async def main() -> None:
        inner = Slow()
        await inner.put("k", b"x")
        store = LimitedStore(inner, calls_max=3)
        async with store.get("k"), asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(store.head("k"))
        assert inner.highest == 2

    virtually(main)


def test_bytes_a_second() -> None:
    """Rates hold in both directions, and may change while they run."""

    async def main() -> None:
        upload, download = RateLimit(1 << 20), RateLimit()
        store = LimitedStore(MemoryStore(), upload=upload, download=download)
        loop = asyncio.get_running_loop()
        for number in range(10):
            await store.put(f"k{number}", bytes(1 << 20))
        assert 8.5 <= loop.time() <= 10.5
        download.bytes_per_s = 2 << 20
        begin = loop.time()
        for number in range(10):
            await read_all(store, f"k{number}", bytes_max=1 << 20)
        assert 4.0 <= loop.time() - begin <= 5.5

    virtually(main)


def test_meter_counts() -> None:
    """Requests, failures and bytes; nothing stays in flight."""

    async def main() -> None:
        meter = StoreMeter()
        store = MeteredStore(MemoryStore(), meter)
        await store.put("k", b"12345")
        await read_all(store, "k", bytes_max=10)
        upload_id = await store.begin_upload("u")
        await store.put_part("u", upload_id, 1, b"123")
        with pytest.raises(NotFound):
            await store.head("missing")
        with pytest.raises(NotFound):
            async with store.get("missing"):
                pass
        assert dict(meter.requests) == {"put": 1, "get": 2, "begin_upload": 1, "put_part": 1, "head": 1}
        assert dict(meter.failures) == {("head", "NotFound"): 1, ("get", "NotFound"): 1}
        assert (meter.bytes_up, meter.bytes_down, meter.in_flight) == (8, 5, 0)

    virtually(main)


def test_prefix_keeps_to_itself() -> None:
    """Neighbours with a longer name are not below the prefix, and errors name the whole key."""

    async def main() -> None:
        whole = MemoryStore()
        store = PrefixedStore(whole, "run/a")
        await whole.put("run/ab", b"neighbour")
        await store.put("k", b"mine")
        assert [info.key async for info in store.list_objects()] == ["k"]
        assert [info.key async for info in whole.list_objects()] == ["run/a/k", "run/ab"]
        with pytest.raises(NotFound, match="run/a/missing"):
            await store.head("missing")
        assert store.properties.name == "memory/run/a"

    virtually(main)
