"""What every store does, whatever it is made of. What stores are known to differ in is asked of a probe."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import uvloop

from stager.checksum import combine_all, crc64nvme
from stager.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    NotFound,
    NotSupported,
    PreconditionFailed,
    StagerError,
    Unavailable,
    UsageError,
)
from stager.store.api import (
    CREATE,
    ObjectInfo,
    ObjectStore,
    ObjectVersion,
    PartTag,
    Replace,
    Span,
    read_all,
)

PART = 5 << 20
ODD_KEYS = [
    "odd/sp ace+plus",
    "odd/ünïcode-漢",
    "odd/pct%25",
    "odd/.hidden",
    "odd/q?x=1&y#z",
    "odd/quote'\"<>",
    "odd/" + "n" * 200,
    "odd/~tilde*star(paren)!",
]


async def content(store: ObjectStore, key: str, span: Span | None = None) -> bytes:
    async with store.get(key, span=span) as reader:
        pieces = []
        while piece := await reader.read(1 << 20):
            pieces.append(piece)
        return b"".join(pieces)


async def keys(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    return [info.key async for info in store.list_objects(prefix, after=after)]


async def upload(store: ObjectStore, key: str, bodies: Sequence[bytes]) -> tuple[str, list[PartTag]]:
    upload_id = await store.begin_upload(key)
    tags = [
        await store.put_part(key, upload_id, number, body, crc64nvme=crc64nvme(body))
        for number, body in enumerate(bodies, 1)
    ]
    return upload_id, tags


async def test_put_then_get(store: ObjectStore) -> None:
    """Bytes, size, version and metadata come back."""
    version = await store.put("a/b.bin", b"hello", metadata={"Write-Id": "w1"})
    assert await content(store, "a/b.bin") == b"hello"
    info = await store.head("a/b.bin")
    assert (info.key, info.size, info.version.etag) == ("a/b.bin", 5, version.etag)
    assert info.metadata == {"write-id": "w1"}
    body, read = await read_all(store, "a/b.bin", bytes_max=10)
    assert (body, read.version.etag, read.metadata) == (b"hello", version.etag, {"write-id": "w1"})


@pytest.mark.parametrize(
    "body", [b"", b"x", bytearray(b"yy"), memoryview(b"zzz")], ids=lambda body: type(body).__name__
)
async def test_bodies_of_every_kind(store: ObjectStore, body: bytes | bytearray | memoryview) -> None:
    """Any buffer may be put, the empty one too."""
    await store.put("k", body, crc64nvme=crc64nvme(body))
    assert await content(store, "k") == bytes(body)
    assert (await store.head("k")).size == len(body)


async def test_overwrite_changes_the_version(store: ObjectStore) -> None:
    """A new body has a new etag, and the same key."""
    first = await store.put("k", b"one")
    second = await store.put("k", b"two")
    assert first.etag != second.etag
    assert await content(store, "k") == b"two"
    assert (await store.head("k")).version.etag == second.etag


async def test_spans(store: ObjectStore) -> None:
    """First, middle and last bytes; the info is of the whole."""
    body = random.Random(1).randbytes(300_000)
    await store.put("k", body)
    for start, stop in [(0, 1), (0, len(body)), (100_000, 200_001), (len(body) - 1, len(body))]:
        assert await content(store, "k", Span(start, stop)) == body[start:stop]
    async with store.get("k", span=Span(10, 20)) as reader:
        assert reader.info.size == len(body)


@pytest.mark.parametrize("span", [Span(5, 11), Span(10, 11), Span(100, 200)], ids=str)
async def test_span_beyond_the_end(store: ObjectStore, span: Span) -> None:
    """Bytes that are not there are an integrity error that says how many there are, never a short answer."""
    await store.put("k", b"0123456789")
    with pytest.raises(IntegrityError, match="10"):
        await content(store, "k", span)


async def test_missing_objects(store: ObjectStore) -> None:
    """Reading what is not there is NotFound, and names it; deleting it is fine."""
    await store.put("present/x", b"1")
    for key in ["missing", "present", "present/x/y"]:
        with pytest.raises(NotFound, match=key):
            await store.head(key)
        with pytest.raises(NotFound, match=key):
            await content(store, key)
        with pytest.raises(NotFound):
            await store.copy(key, "target")
    assert await store.delete(["missing", "present"]) == {}
    assert await keys(store) == ["present/x"]


async def test_get_of_another_version(store: ObjectStore) -> None:
    """A pinned read refuses a replaced object, and accepts the named one."""
    old = await store.put("k", b"one")
    async with store.get("k", if_match=old) as reader:
        assert await reader.read(10) == b"one"
    await store.put("k", b"two")
    with pytest.raises(PreconditionFailed, match="k"):
        async with store.get("k", if_match=old):
            pass


async def test_leaving_a_body_early(store: ObjectStore) -> None:
    """A reader may stop in the middle, and the store goes on working."""
    await store.put("k", bytes(2 << 20))
    for _ in range(3):
        async with store.get("k") as reader:
            assert await reader.read(10)
    assert (await store.head("k")).size == 2 << 20


async def test_wrong_checksum_never_stays(store: ObjectStore) -> None:
    """A body with another's checksum is refused or, where the store checks nothing, kept as it was sent."""
    try:
        await store.put("k", b"body", crc64nvme=crc64nvme(b"other"))
    except IntegrityError:
        with pytest.raises(NotFound):
            await store.head("k")
    else:
        assert (await store.head("k")).crc64nvme in (None, crc64nvme(b"body"))


async def test_kept_checksum_is_right(store: ObjectStore) -> None:
    """A checksum that the store gives back is the body's."""
    await store.put("k", b"body", crc64nvme=crc64nvme(b"body"))
    assert (await store.head("k")).crc64nvme in (None, crc64nvme(b"body"))


async def test_create_only(store: ObjectStore) -> None:
    """The second of two create-only writes is refused and changes nothing."""
    first = await store.put("k", b"one", mode=CREATE)
    with pytest.raises(AlreadyExists, match="k"):
        await store.put("k", b"two", mode=CREATE)
    assert await content(store, "k") == b"one"
    assert (await store.head("k")).version.etag == first.etag


async def test_create_only_race(store: ObjectStore) -> None:
    """Of twelve create-only writers at once, exactly one wins, and its bytes are there."""
    bodies = [f"writer {number}".encode() for number in range(12)]

    async def write(body: bytes) -> bytes | None:
        try:
            await store.put("race", body, mode=CREATE)
        except AlreadyExists:
            return None
        return body

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(write(body)) for body in bodies]
    winners = [task.result() for task in tasks if task.result() is not None]
    assert winners == [await content(store, "race")]


async def test_replace(store: ObjectStore) -> None:
    """A replacement happens only over the version that it names."""
    old = await store.put("k", b"one")
    new = await store.put("k", b"two", mode=Replace(old))
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"three", mode=Replace(old))
    assert await content(store, "k") == b"two"
    await store.put("k", b"four", mode=Replace(new))
    await store.delete(["k"])
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"five", mode=Replace(new))


async def test_list_in_order_of_keys(store: ObjectStore) -> None:
    """All keys below a prefix in the order of their UTF-8 bytes, from after a given one."""
    names = ["b", "a/1", "a/10", "a/2", "a-x", "a.y", "a0", "z/deep/er/k", "é", "zz"]
    for name in names:
        await store.put(name, name.encode())
    ordered = sorted(names, key=lambda name: name.encode())
    assert await keys(store) == ordered
    assert await keys(store, "a") == [name for name in ordered if name.startswith("a")]
    assert await keys(store, "a/") == ["a/1", "a/10", "a/2"]
    assert await keys(store, "a/1") == ["a/1", "a/10"]
    assert await keys(store, "nothing/") == []
    for start in [*ordered, "a", "a/", "a/11", "zzz"]:
        later = [name for name in ordered if name.encode() > start.encode()]
        assert await keys(store, after=start) == later
        assert await keys(store, "a", after=start) == [name for name in later if name.startswith("a")]


async def test_listed_facts(store: ObjectStore) -> None:
    """A listing gives size and etag as `head` does."""
    version = await store.put("x/k", b"12345", metadata={"a": "b"})
    listed = [info async for info in store.list_objects("x/")]
    assert [(info.key, info.size, info.version.etag) for info in listed] == [("x/k", 5, version.etag)]


async def test_odd_keys(store: ObjectStore) -> None:
    """Keys that need quoting somewhere on the way."""
    for key in ODD_KEYS:
        await store.put(key, key.encode())
        assert await content(store, key) == key.encode()
    assert await keys(store, "odd/") == sorted(ODD_KEYS, key=lambda key: key.encode())
    assert await store.delete(ODD_KEYS) == {}
    assert await keys(store) == []


@pytest.mark.parametrize(
    "key", ["", "/a", "a//b", "a/", "../a", "a/../b", "./a", "a\0b", "a\nb", "\udcff", "k" * 2000]
)
async def test_hostile_keys(store: ObjectStore, key: str) -> None:
    """A key that could leave the store or split a line is refused by every verb, before anything happens."""
    await store.put("present", b"1")
    for attempt in [
        lambda: store.put(key, b"x"),
        lambda: store.head(key),
        lambda: content(store, key),
        lambda: store.delete([key]),
        lambda: store.copy("present", key),
        lambda: store.copy(key, "target"),
        lambda: store.begin_upload(key),
    ]:
        with pytest.raises(FormatError):
            await attempt()
    assert await keys(store) == ["present"]


@pytest.mark.parametrize(
    "metadata", [{"sp ace": "v"}, {"k": "ü"}, {"k": "a\nb"}, {"k": " v"}, {"k": "v" * 3000}]
)
async def test_metadata_that_no_header_can_carry(store: ObjectStore, metadata: dict[str, str]) -> None:
    """It is refused by name before anything is written."""
    with pytest.raises(UsageError, match="metadata"):
        await store.put("k", b"x", metadata=metadata)
    with pytest.raises(NotFound):
        await store.head("k")


async def test_key_that_is_also_a_prefix(store: ObjectStore) -> None:
    """Both exist, or the second is refused with a reason and nothing changes."""
    await store.put("fd/x", b"1")
    try:
        await store.put("fd/x/y", b"2")
        await store.put("fd", b"3")
    except NotSupported as error:
        assert error.hint
        assert await keys(store) == ["fd/x"]
    else:
        assert await keys(store) == ["fd", "fd/x", "fd/x/y"]
    assert await content(store, "fd/x") == b"1"


async def test_prefix_is_free_once_it_is_empty(store: ObjectStore) -> None:
    """Deleting the last key below a prefix leaves nothing of the prefix."""
    await store.put("p/q/r", b"1")
    assert await store.delete(["p/q/r"]) == {}
    await store.put("p", b"2")
    assert await keys(store) == ["p"]


async def test_delete_many(store: ObjectStore) -> None:
    """Present, missing and repeated keys in one call."""
    names = [f"d/{number:03d}" for number in range(30)]
    for name in names[:25]:
        await store.put(name, b"")
    assert await store.delete([*names, names[0]]) == {}
    assert await keys(store) == []
    assert await store.delete([]) == {}


async def test_copy(store: ObjectStore) -> None:
    """Bytes and metadata are copied, over what is there; a pinned copy refuses another version."""
    old = await store.put("s", b"body", metadata={"m": "1"}, crc64nvme=crc64nvme(b"body"))
    await store.put("t", b"older")
    version = await store.copy("s", "t", if_match=old)
    info = await store.head("t")
    assert (info.size, info.metadata, info.version.etag) == (4, {"m": "1"}, version.etag)
    assert await content(store, "t") == b"body"
    await store.put("s", b"changed")
    with pytest.raises(PreconditionFailed):
        await store.copy("s", "t", if_match=old)
    assert await content(store, "t") == b"body"


async def test_upload_in_parts(store: ObjectStore) -> None:
    """Parts in any order make one object, with the metadata of its beginning."""
    rng = random.Random(2)
    bodies = [rng.randbytes(PART), rng.randbytes(PART), rng.randbytes(1234)]
    upload_id = await store.begin_upload("u/k", metadata={"write-id": "w"})
    tags = {}
    for number in (3, 1, 2):
        body = bodies[number - 1]
        tags[number] = await store.put_part("u/k", upload_id, number, body, crc64nvme=crc64nvme(body))
        assert tags[number].crc64nvme in (None, crc64nvme(body))
    with pytest.raises(NotFound):
        await store.head("u/k")
    assert await keys(store) == []
    ordered = [tags[number] for number in (1, 2, 3)]
    version = await store.complete_upload("u/k", upload_id, ordered)
    info = await store.head("u/k")
    assert (info.size, info.version.etag, info.metadata) == (2 * PART + 1234, version.etag, {"write-id": "w"})
    assert info.crc64nvme in (None, combine_all((crc64nvme(body), len(body)) for body in bodies))
    assert await content(store, "u/k", Span(PART - 5, PART + 5)) == bodies[0][-5:] + bodies[1][:5]
    assert crc64nvme(await content(store, "u/k")) == crc64nvme(b"".join(bodies))


async def test_upload_is_found_again(store: ObjectStore) -> None:
    """After a kill: the uploads, their parts by number, and a part written twice counts once."""
    upload_id, tags = await upload(store, "u/k", [bytes(PART), b"last"])
    again = await store.put_part("u/k", upload_id, 2, b"newer", crc64nvme=crc64nvme(b"newer"))
    assert [found async for found in store.list_uploads("u/")] == [("u/k", upload_id)]
    assert [found async for found in store.list_uploads("v/")] == []
    parts = await store.list_parts("u/k", upload_id)
    assert [part.number for part in parts] == [1, 2]
    assert (parts[0].etag, parts[0].size) == (tags[0].etag, PART)
    # SeaweedFS lists both and tells their times in seconds, so that either may come out; the etag tells them apart.
    assert parts[1].etag in (tags[1].etag, again.etag)
    await store.complete_upload("u/k", upload_id, [parts[0], again])
    assert (await store.head("u/k")).size == PART + 5
    assert [found async for found in store.list_uploads("u/")] == []


async def test_one_small_part(store: ObjectStore) -> None:
    """The last part may be small, also when it is the only one."""
    upload_id, tags = await upload(store, "u", [b"tiny"])
    await store.complete_upload("u", upload_id, tags)
    assert await content(store, "u") == b"tiny"


async def test_abort(store: ObjectStore) -> None:
    """An aborted upload is gone for every verb; aborting again is fine."""
    upload_id, tags = await upload(store, "u", [b"tiny"])
    await store.abort_upload("u", upload_id)
    await store.abort_upload("u", upload_id)
    with pytest.raises((NotFound, Unavailable)):  # moto answers 500
        await store.put_part("u", upload_id, 1, b"tiny")
    with pytest.raises(NotFound):
        await store.list_parts("u", upload_id)
    with pytest.raises(NotFound):
        await store.complete_upload("u", upload_id, tags)
    assert [found async for found in store.list_uploads()] == []
    assert await keys(store) == []


async def test_completed_upload_is_gone(store: ObjectStore) -> None:
    """A second completion finds no upload, or the object as it is, and never other bytes."""
    upload_id, tags = await upload(store, "u", [b"tiny"])
    version = await store.complete_upload("u", upload_id, tags)
    try:
        assert (await store.complete_upload("u", upload_id, tags)).etag == version.etag
    except NotFound:
        pass
    assert await content(store, "u") == b"tiny"


async def test_complete_with_a_part_that_was_not_sent(store: ObjectStore) -> None:
    """It is refused, and no object appears."""
    upload_id, tags = await upload(store, "u", [b"tiny"])
    wrong = PartTag(1, "0" * 32, 4)
    with pytest.raises(IntegrityError):
        await store.complete_upload("u", upload_id, [wrong])
    with pytest.raises(NotFound):
        await store.head("u")
    await store.complete_upload("u", upload_id, tags)


@pytest.mark.parametrize("number", [0, -1, 10_001])
async def test_part_numbers(store: ObjectStore, number: int) -> None:
    """From 1 to 10,000."""
    upload_id = await store.begin_upload("u")
    with pytest.raises(UsageError, match="part"):
        await store.put_part("u", upload_id, number, b"x")
    await store.abort_upload("u", upload_id)


async def test_complete_without_parts(store: ObjectStore) -> None:
    """An upload of nothing is refused alike everywhere."""
    upload_id = await store.begin_upload("u")
    with pytest.raises(UsageError):
        await store.complete_upload("u", upload_id, [])
    await store.abort_upload("u", upload_id)


async def test_copy_of_an_upload(store: ObjectStore) -> None:
    """An object that came in parts is copied like any other."""
    bodies = [random.Random(3).randbytes(PART), b"tail"]
    upload_id, tags = await upload(store, "u", bodies)
    await store.complete_upload("u", upload_id, tags)
    await store.copy("u", "v")
    assert await content(store, "v") == b"".join(bodies)


async def test_many_readers_and_writers(store: ObjectStore) -> None:
    """Forty objects written and read at once, each with its own bytes."""

    async def there_and_back(number: int) -> ObjectVersion:
        body = f"object {number}".encode() * number
        version = await store.put(f"m/{number}", body)
        assert await content(store, f"m/{number}") == body
        return version

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(there_and_back(number))
    assert len(await keys(store, "m/")) == 40


async def test_errors_name_their_subject(store: ObjectStore) -> None:
    """Whoever shows an error can say what it is about."""
    with pytest.raises(StagerError) as caught:
        await store.head("not/there")
    assert "not/there" in caught.value.subject
    assert isinstance(caught.value, NotFound)


def test_on_uvloop(make_store: Callable[[], AsyncIterator[ObjectStore]]) -> None:
    """The same on the loop that the daemon uses: whole, in spans, in parts, listed, left early, refused."""

    async def tour() -> None:
        async for store in make_store():
            body = random.Random(4).randbytes(PART)
            await store.put("k", body, crc64nvme=crc64nvme(body))
            assert await content(store, "k") == body
            assert await content(store, "k", Span(7, 4711)) == body[7:4711]
            async with store.get("k") as reader:
                await reader.read(1)
            upload_id, tags = await upload(store, "u", [body, b"tail"])
            await store.complete_upload("u", upload_id, tags)
            assert await content(store, "u") == body + b"tail"
            assert await keys(store) == ["k", "u"]
            with pytest.raises(NotFound):
                await store.head("missing")
            assert await store.delete(["k", "u"]) == {}

    uvloop.run(tour())


def test_info_is_a_value() -> None:
    """Facts about objects cannot be changed under the one who holds them."""
    info = ObjectInfo("k", 1, ObjectVersion("e"))
    with pytest.raises(AttributeError):
        info.size = 2  # type: ignore[misc]  # the point of the test
