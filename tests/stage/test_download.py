"""Downloads: right bytes or a clear error, whatever the store does, and nothing fetched twice that need not be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.budget import ByteBudget, Priority, RateLimit
from stager.checksum import digest_of
from stager.disk import LocalDisk
from stager.errors import (
    Exhausted,
    IntegrityError,
    NotFound,
    OutOfSpace,
    PermissionDenied,
    StagerError,
    Throttled,
    Unavailable,
)
from stager.offload import InlineOffload, ThreadOffload
from stager.store.memory import MemoryStore
from stager.transfer.download import Downloaded, DownloadOptions, download
from stager.transfer.part_map import PART_MAP_SUFFIX
from stager.transfer.ranges import DOWNLOAD_PARTS_MAX, cut, download_part_bytes
from stager.transfer.tools import Tools
from tests.sim.disk import SimulatedDisk
from tests.sim.world import World, run_process
from tests.stage.kit import Act, Asked, Script, ScriptedStore, random_bytes

KEY = "shard-000000.tar"
STAGED = "/staging/shard"


@dataclass
class Bench:
    """A store with one object, a simulated disk, and downloads of the one onto the other."""

    body: bytes
    script: Script | None = None
    capacity_bytes: int = 1 << 30
    memory_bytes: int = 64 << 20
    download_rate: RateLimit = field(default_factory=RateLimit)

    def __post_init__(self) -> None:
        self.world = World(1)
        self.disk = SimulatedDisk(self.world, capacity_bytes=self.capacity_bytes)
        self.memory_store = MemoryStore()
        self.store = ScriptedStore(self.memory_store, self.script)
        self.tools = Tools(
            self.disk,
            InlineOffload(),
            ByteBudget(self.memory_bytes),
            download_rate=self.download_rate,
            random=random.Random(1),
        )

    async def prepare(self) -> None:
        self.disk.make_directory("/staging")
        await self.memory_store.put(KEY, self.body)

    async def fetch(self, *, expected: bytes | None = None, **changes: Any) -> Downloaded:
        wanted = self.body if expected is None else expected
        options = {"part_bytes": 100, "concurrency": 3, **changes.pop("options", {})}
        arguments: dict[str, Any] = {"size": len(wanted), "digest": digest_of(wanted), **changes}
        return await download(
            self.store, KEY, STAGED, self.tools, options=DownloadOptions(**options), **arguments
        )

    def staged(self) -> bytes:
        return bytes(self.disk.live[STAGED].live)

    def is_clean(self) -> bool:
        return not [path for path in self.disk.live if path.startswith("/staging/")]

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        async def prepared() -> None:
            await self.prepare()
            await main

        assert run_process(self.world, prepared)


def test_one_get_for_each_part_and_nothing_else() -> None:
    """Every byte comes once, by one GET a part, all but the first pinned to the version; no HEAD, no LIST."""
    bench = Bench(random_bytes(1, 1050))

    async def main() -> None:
        got = await bench.fetch()
        assert (got.size, got.fetched_bytes) == (1050, 1050)

    bench.run(main())
    assert bench.staged() == bench.body
    assert set(bench.disk.live) == {STAGED}
    spans = sorted((asked.span.start, asked.span.stop) for asked in bench.store.gets if asked.span)
    assert spans == [
        (part.span.start, part.span.stop) for part in cut(1050, download_part_bytes(1050, wanted=100))
    ]
    assert sum(not asked.pinned for asked in bench.store.gets) == 1
    assert bench.store.other_calls == []
    assert 1 < bench.store.open_bodies_peak <= 3


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101])
def test_small_objects(size: int) -> None:
    """Also an empty object, and sizes around one part, arrive whole."""
    bench = Bench(random_bytes(2, size))

    async def main() -> None:
        await bench.fetch()

    bench.run(main())
    assert bench.staged() == bench.body


@pytest.mark.parametrize("broken_at", range(0, 100, 7))
def test_a_body_that_breaks_goes_on_from_there(broken_at: int) -> None:
    """Whether it fails or ends early, the next range starts at the first byte that did not come."""

    def script(number: int, asked: Asked) -> Act | None:
        if number == 2:
            return Act(break_after=broken_at)
        if number == 3:
            return Act(break_after=broken_at, break_with=lambda: Unavailable("reset", subject=KEY))
        return None

    bench = Bench(random_bytes(3, 1000), script)

    async def main() -> None:
        got = await bench.fetch()
        assert got.fetched_bytes == 1000

    bench.run(main())
    assert bench.staged() == bench.body
    assert bench.store.sent_bytes == 1000


@pytest.mark.parametrize("nth", range(1, 12))
def test_every_failed_call_is_made_up_for(nth: int) -> None:
    """Whichever GET is refused or throttled, the download ends right, with one GET more."""
    for failure in (
        Unavailable("reset", subject=KEY),
        Throttled("slow down", subject=KEY, retry_after_s=3),
        Exhausted("the store's own retries gave up", subject=KEY),
    ):

        def script(number: int, asked: Asked, failure: StagerError = failure) -> Act | None:
            return Act(refuse=lambda: failure) if number == nth else None

        bench = Bench(random_bytes(4, 1000), script)

        async def main(bench: Bench = bench) -> None:
            await bench.fetch()

        bench.run(main())
        assert bench.staged() == bench.body
        assert len(bench.store.gets) == 10 + (nth <= 10)


@pytest.mark.parametrize("nth", range(1, 11))
def test_a_failed_download_goes_on_where_it_stopped(nth: int) -> None:
    """With no attempts left the error comes out; the next download fetches only the parts that are not there."""

    def script(number: int, asked: Asked) -> Act | None:
        return Act(refuse=lambda: Unavailable("reset", subject=KEY)) if number == nth else None

    bench = Bench(random_bytes(5, 1000), script)

    async def main() -> None:
        with pytest.raises(Unavailable):
            await bench.fetch(options={"attempts": 1, "concurrency": 1})
        sent = bench.store.sent_bytes
        assert sent == (nth - 1) * 100
        await bench.fetch()
        assert bench.store.sent_bytes == 1000

    bench.run(main())
    assert bench.staged() == bench.body


def test_attempts_are_counted_anew_after_progress() -> None:
    """A body that breaks after every 64 KiB wears the store out, not the download."""
    bench = Bench(random_bytes(6, 1 << 20), lambda number, asked: Act(break_after=64 << 10))

    async def main() -> None:
        await bench.fetch(options={"part_bytes": 1 << 20, "attempts": 2})

    bench.run(main())
    assert bench.staged() == bench.body
    assert len(bench.store.gets) == 16


@pytest.mark.parametrize("act", [Act(stall_after=0), Act(stall_after=50), Act(drip_s=29.0)])
def test_a_body_that_stands_still_or_drips_is_cut(act: Act) -> None:
    """Within the read deadline, on the virtual clock, the range is asked for again."""
    bench = Bench(random_bytes(7, 200), lambda number, asked: act if number == 1 else None)

    async def main() -> None:
        await bench.fetch(options={"read_timeout_s": 30.0})

    bench.run(main())
    assert bench.staged() == bench.body
    assert len(bench.store.gets) == 3


def test_a_black_hole_ends_in_an_error() -> None:
    """A store that never sends a byte fails after the attempts, each within its deadline, and names the key."""
    bench = Bench(random_bytes(8, 200), lambda number, asked: Act(stall_after=0))

    async def main() -> None:
        with pytest.raises(Unavailable, match=KEY):
            await bench.fetch(options={"attempts": 3, "concurrency": 1})

    bench.run(main())
    assert len(bench.store.gets) == 3


@pytest.mark.parametrize("error", [NotFound, PermissionDenied])
def test_what_no_retry_mends_is_not_retried(error: type[StagerError]) -> None:
    """A missing object and a refusal come out at once."""
    bench = Bench(random_bytes(9, 100), lambda number, asked: Act(refuse=lambda: error("no", subject=KEY)))

    async def main() -> None:
        with pytest.raises(error):
            await bench.fetch()

    bench.run(main())
    assert len(bench.store.gets) == 1


@pytest.mark.parametrize("size_there", [0, 50, 999, 1001, 5000])
def test_another_size_is_found_before_any_byte(size_there: int) -> None:
    """A truncated or grown object is an IntegrityError that names it; no byte was taken and nothing is left."""
    bench = Bench(random_bytes(10, size_there))

    async def main() -> None:
        with pytest.raises(IntegrityError, match=KEY):
            await bench.fetch(expected=random_bytes(10, 1000))

    bench.run(main())
    assert bench.store.sent_bytes == 0
    assert bench.is_clean()


def test_altered_bytes_are_found() -> None:
    """An object of the right size with other bytes is fetched at most twice and leaves nothing."""
    body = random_bytes(11, 1000)
    bench = Bench(body[:500] + b"x" + body[501:])

    async def main() -> None:
        with pytest.raises(IntegrityError, match=rf"{KEY}.*twice"):
            await bench.fetch(expected=body)

    bench.run(main())
    assert len(bench.store.gets) == 20
    assert bench.is_clean()


def test_a_byte_flipped_on_the_way_is_fetched_again() -> None:
    """Damage on the wire, which only our checksum finds, costs a second pass and no error."""
    bench = Bench(random_bytes(12, 1000), lambda number, asked: Act(flip=5) if number == 4 else None)

    async def main() -> None:
        got = await bench.fetch()
        assert got.fetched_bytes == 2000

    bench.run(main())
    assert bench.staged() == bench.body


def test_sha256_is_compared_when_asked() -> None:
    """A digest whose CRC fits and whose SHA-256 does not is refused only with `verify_sha256`."""
    bench = Bench(random_bytes(13, 300))
    right = digest_of(bench.body)
    wrong = type(right)("0" * 64, right.crc64nvme)

    async def main() -> None:
        await bench.fetch(digest=wrong)
        with pytest.raises(IntegrityError, match="SHA-256"):
            await bench.fetch(digest=wrong, options={"verify_sha256": True})

    bench.run(main())


def test_an_object_that_changes_midway_is_begun_anew() -> None:
    """The second version is taken whole when it is what the manifest says."""
    new = random_bytes(15, 1000)

    def script(number: int, asked: Asked) -> Act | None:
        if number == 5:
            bench.memory_store.bucket.objects[KEY] = other.memory_store.bucket.objects[KEY]
        return None

    bench, other = Bench(random_bytes(14, 1000), script), Bench(new)

    async def main() -> None:
        await other.prepare()
        await bench.fetch(expected=new)

    bench.run(main())
    assert bench.staged() == new


def test_an_object_that_keeps_changing_is_an_error() -> None:
    """Two changes midway end in an IntegrityError that says so, and nothing is left."""

    def script(number: int, asked: Asked) -> Act | None:
        found = bench.memory_store.bucket.objects[KEY]
        changed = type(found.info.version)(f"etag-{number}")
        info = type(found.info)(KEY, found.info.size, changed)
        bench.memory_store.bucket.objects[KEY] = type(found)(found.body, info)
        return None

    bench = Bench(random_bytes(16, 1000), script)

    async def main() -> None:
        with pytest.raises(IntegrityError, match=r"written again.*twice"):
            await bench.fetch()

    bench.run(main())
    assert bench.is_clean()


def _killed_at(bench: Bench, part: int) -> None:
    """Leave what a process leaves that dies in its GET number ``part + 1``."""

    async def main() -> None:
        with pytest.raises(Unavailable):
            await bench.fetch(options={"attempts": 1, "concurrency": 1})

    failing = bench.store.script
    bench.store.script = lambda number, asked: (
        Act(refuse=lambda: Unavailable("dead", subject=KEY)) if number == part + 1 else None
    )
    bench.run(main())
    bench.store.script = failing
    bench.store.gets.clear()


def test_a_claimed_part_that_is_torn_is_fetched_again() -> None:
    """Resuming proves every claim by reading it back."""
    bench = Bench(random_bytes(17, 1000))
    _killed_at(bench, 6)
    bench.disk.live[STAGED].live[250] ^= 1

    async def main() -> None:
        got = await bench.fetch()
        assert got.fetched_bytes == 500

    bench.run(main())
    assert bench.staged() == bench.body
    assert all(asked.pinned for asked in bench.store.gets)


def test_parts_of_an_older_version_are_dropped() -> None:
    """What was staged of a version that is gone is no change midway: the new one may still change once."""
    bench = Bench(random_bytes(18, 1000))
    _killed_at(bench, 6)
    bench.body = random_bytes(19, 1000)

    async def main() -> None:
        await bench.fetch()

    bench.run(main())
    assert bench.staged() == bench.body


def test_other_cuts_or_another_key_begin_anew() -> None:
    """A part map that was written with other part sizes claims nothing."""
    bench = Bench(random_bytes(20, 1000))
    _killed_at(bench, 6)

    async def main() -> None:
        got = await bench.fetch(options={"part_bytes": 250})
        assert got.fetched_bytes == 1000

    bench.run(main())
    assert bench.staged() == bench.body


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    raw=st.binary(max_size=60)
    | _JSON.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {
            "key": st.sampled_from([KEY, "other"]),
            "etag": _JSON,
            "bytes": st.just(1000),
            "part_bytes": st.just(100),
            "parts": st.dictionaries(
                st.sampled_from(["0", "3", "9", "10", "-1", "x", "٣"]),
                st.sampled_from(["AAAAAAAAAAA=", "", "!", 5]),
                max_size=3,
            ),
        }
    ).map(lambda value: json.dumps(value).encode())
)
@settings(max_examples=60, deadline=None)
def test_any_part_map_is_survived(raw: bytes) -> None:
    """Whatever lies where the part map should be, the download ends right."""
    bench = Bench(random_bytes(21, 1000))

    async def main() -> None:
        bench.disk.create(STAGED, 1000)
        bench.disk.write_file(STAGED + PART_MAP_SUFFIX, raw)
        await bench.fetch()

    bench.run(main())
    assert bench.staged() == bench.body


def test_memory_stays_within_the_budget() -> None:
    """However many ranges may be in flight, bodies are opened only as the budget admits them."""
    bench = Bench(random_bytes(22, 2000), memory_bytes=2 * ((1 << 20) + 100))

    async def main() -> None:
        await bench.fetch(options={"concurrency": 20})

    bench.run(main())
    assert bench.staged() == bench.body
    assert 1 <= bench.store.open_bodies_peak <= 2
    assert bench.tools.memory.held_bytes == 0


def test_the_rate_limit_holds() -> None:
    """1000 bytes at 100 bytes a second take about ten virtual seconds, and the cap does not count as a stall."""
    bench = Bench(random_bytes(23, 1000), download_rate=RateLimit(100.0))
    elapsed: list[float] = []

    async def main() -> None:
        began = asyncio.get_running_loop().time()
        await bench.fetch(options={"read_timeout_s": 0.5})
        elapsed.append(asyncio.get_running_loop().time() - began)

    bench.run(main())
    assert 8.0 <= elapsed[0] <= 12.0
    assert len(bench.store.gets) == 10


def test_a_full_disk_is_said_and_leaves_nothing() -> None:
    """No room for the file is OutOfSpace before any byte is asked for."""
    bench = Bench(random_bytes(24, 1000), capacity_bytes=900)

    async def main() -> None:
        with pytest.raises(OutOfSpace):
            await bench.fetch()

    bench.run(main())
    assert bench.store.gets == [] and bench.is_clean()


def test_priority_is_asked_for_every_part() -> None:
    """A download that becomes urgent is urgent from its next part on."""
    bench = Bench(random_bytes(25, 1000))
    asked: list[Priority] = []

    def priority() -> Priority:
        asked.append(Priority.DEMAND if len(asked) > 3 else Priority.PREFETCH)
        return asked[-1]

    async def main() -> None:
        await bench.fetch(priority=priority)

    bench.run(main())
    assert len(asked) == 10 and asked[-1] is Priority.DEMAND


async def test_real_files(tmp_path: Any) -> None:
    """The same onto a real disk with real threads, several writes to a part."""
    body = random_bytes(26, 9_000_001)
    store = MemoryStore()
    await store.put(KEY, body)
    offload = ThreadOffload()
    staged = str(tmp_path / "shard")
    try:
        seen: list[int] = []
        got = await download(
            store,
            KEY,
            staged,
            Tools(LocalDisk(), offload),
            size=len(body),
            digest=digest_of(body),
            options=DownloadOptions(part_bytes=5 << 20, verify_sha256=True),
            progress=seen.append,
        )
    finally:
        offload.close()
    assert got.crc64nvme == digest_of(body).crc64nvme
    assert sum(seen) == len(body)
    assert (tmp_path / "shard").read_bytes() == body
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


@given(size=st.integers(0, 1 << 44), wanted=st.integers(1, 64).map(lambda mebibytes: mebibytes << 20))
def test_parts_cover_the_object(size: int, wanted: int) -> None:
    """Cuts are even, few enough for the part map, and about as large as wanted."""
    part_bytes = download_part_bytes(size, wanted=wanted)
    parts = -(-size // part_bytes)
    assert parts <= DOWNLOAD_PARTS_MAX
    assert part_bytes % (1 << 20) == 0
    if size <= wanted * DOWNLOAD_PARTS_MAX:
        assert part_bytes <= wanted and parts <= -(-size // wanted)
    if parts <= 100:
        spans = [part.span for part in cut(size, part_bytes)]
        assert sum(span.size for span in spans) == size
        assert all(left.stop == right.start for left, right in pairwise(spans))
