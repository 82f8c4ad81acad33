"""What an S3 endpoint may answer that no S3 endpoint should, and what becomes of it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from s3_server import S3Endpoint
from stager.errors import (
    BucketNotFound,
    ConfigError,
    IntegrityError,
    NotFound,
    NotSupported,
    OutOfSpace,
    PermissionDenied,
    PreconditionFailed,
    StagerError,
    Throttled,
    Unauthenticated,
    Unavailable,
)
from stager.offload import ThreadOffload
from stager.store.api import ObjectVersion, PartTag, Span, read_all
from stager.store.retrying import RetryingStore
from stager.store.s3 import S3Store, open_s3
from stager.store.s3_settings import S3Settings
from tests.servers.choice import BUCKET, server_names
from tests.store.conftest import settings_of
from tests.store.raw_server import HANG, RESET, RawServer, answer, error, raw_server

SECRET = "the-secret-that-no-message-shows"
ETAG = '"0123456789abcdef"'
GOOD = answer("200 OK", b"0123456789", ETag=ETAG)
HTML = answer("200 OK", b"<html><body>Log in to continue</body></html>", Content_Type="text/html")
XML_ERROR = error("200 OK", "InternalError")


@asynccontextmanager
async def against(*answers: bytes, **changes: Any) -> AsyncIterator[tuple[S3Store, RawServer]]:
    async with raw_server(*answers) as server:
        settings = S3Settings(
            endpoint=server.endpoint,
            region="r",
            access_key="AK",
            secret_key=SECRET,
            read_timeout_s=0.3,
            **changes,
        )
        offload = ThreadOffload()
        store = await open_s3("bucket", settings, offload)
        try:
            yield store, server
        finally:
            await store.aclose()
            offload.close()


async def content(store: S3Store, span: Span | None = None, version: ObjectVersion | None = None) -> bytes:
    async with store.get("k", span=span, if_match=version) as reader:
        pieces = []
        while piece := await reader.read(4):
            pieces.append(piece)
        return b"".join(pieces)


async def test_the_server_itself() -> None:
    """A well-behaved answer is read as it is, so that what fails below fails for its own reason."""
    async with against(GOOD) as (store, _):
        assert await content(store) == b"0123456789"


@pytest.mark.parametrize(
    "broken",
    [
        answer("200 OK", b"01234", length=10, ETag=ETAG, Connection="close"),
        answer("200 OK", b"01234", length=10, ETag=ETAG) + RESET,
        answer("200 OK", b"", length=10, ETag=ETAG, Connection="close"),
        answer("200 OK", b"01234", length=10, ETag=ETAG),
    ],
    ids=["short", "reset", "empty", "stalled"],
)
async def test_a_body_that_ends_early(broken: bytes) -> None:
    """Bytes that were announced and did not come are Unavailable; the retrying store fetches the rest."""
    async with against(broken) as (store, _):
        with pytest.raises(Unavailable, match="k"):
            await content(store)
    rest = answer("206 Partial Content", b"56789", ETag=ETAG, Content_Range="bytes 5-9/10")
    whole = answer("206 Partial Content", b"0123456789", ETag=ETAG, Content_Range="bytes 0-9/10")
    async with against(broken, rest if b"\r\n\r\n01234" in broken else whole) as (store, server):
        body, _ = await read_all(RetryingStore(store, chance=random.Random(1)), "k", bytes_max=10)
        assert body == b"0123456789"
        assert b'if-match: "0123456789abcdef"' in server.requests[1].lower()


async def test_a_body_that_goes_on_too_long() -> None:
    """More bytes than the range that was asked for are an integrity error, not a longer object."""
    long = answer("206 Partial Content", b"0123456789", ETag=ETAG, Content_Range="bytes 0-4/20")
    async with against(long) as (store, _):
        with pytest.raises(IntegrityError, match="0 to 5"):
            await content(store, Span(0, 5))


@pytest.mark.parametrize(
    "wrong",
    [
        answer("206 Partial Content", b"01234", ETag=ETAG, Content_Range="bytes 5-9/10"),
        answer("206 Partial Content", b"012", ETag=ETAG, Content_Range="bytes 0-2/3"),
        answer("206 Partial Content", b"01234", ETag=ETAG, Content_Range="bytes */10"),
        answer("206 Partial Content", b"01234", ETag=ETAG, Content_Range="lines 0-4/10"),
        answer("200 OK", b"0123456789", ETag=ETAG),
        answer("200 OK", b"01234567890123456789", ETag=ETAG),
    ],
    ids=["shifted", "cut", "unsatisfied", "unit", "whole", "longer"],
)
async def test_another_range_than_was_asked_for(wrong: bytes) -> None:
    """It is never taken for the bytes that were wanted."""
    async with against(wrong) as (store, _):
        with pytest.raises(IntegrityError):
            await content(store, Span(0, 5))


async def test_whole_object_for_a_range_of_the_whole() -> None:
    """Some servers answer 200 to a range that covers everything; the bytes are right."""
    async with against(GOOD) as (store, _):
        assert await content(store, Span(0, 10)) == b"0123456789"


async def test_another_version_than_was_pinned() -> None:
    """A server that ignores If-Match is caught by the etag of its answer."""
    async with against(GOOD) as (store, _):
        assert await content(store, version=ObjectVersion("0123456789abcdef")) == b"0123456789"
        with pytest.raises(PreconditionFailed):
            await content(store, version=ObjectVersion("another"))


VERBS: dict[str, Callable[[S3Store], Any]] = {
    "put": lambda store: store.put("k", b"x"),
    "get": content,
    "head": lambda store: store.head("k"),
    "begin": lambda store: store.begin_upload("k"),
    "part": lambda store: store.put_part("k", "u", 1, b"x"),
    "complete": lambda store: store.complete_upload("k", "u", [PartTag(1, "e", 1)]),
    "parts": lambda store: store.list_parts("k", "u"),
    "copy": lambda store: store.copy("k", "t"),
    "list": lambda store: anext(store.list_objects(), None),
    "uploads": lambda store: anext(store.list_uploads(), None),
    "delete": lambda store: delete(store, ["a", "b"]),
}


async def delete(store: S3Store, keys: list[str]) -> None:
    for failure in (await store.delete(keys)).values():
        raise failure


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("page", [HTML, XML_ERROR], ids=["html", "error"])
async def test_status_200_with_an_error_page(verb: str, page: bytes) -> None:
    """No verb takes a proxy's page, or an error in the clothes of a success, for an answer of S3."""
    async with against(page) as (store, _):
        with pytest.raises(Unavailable):
            await VERBS[verb](store)


REFUSALS = [
    (error("403 Forbidden", "AccessDenied"), PermissionDenied),
    (error("403 Forbidden", "SignatureDoesNotMatch"), Unauthenticated),
    (error("403 Forbidden", "InvalidAccessKeyId"), Unauthenticated),
    (error("403 Forbidden", "RequestTimeTooSkewed"), Unauthenticated),
    (error("400 Bad Request", "ExpiredToken"), Unauthenticated),
    (error("404 Not Found", "NoSuchBucket"), BucketNotFound),
    (error("503 Slow Down", "SlowDown"), Throttled),
    (error("429 Too Many Requests", "TooManyRequests"), Throttled),
    (error("500 Internal Server Error", "InternalError"), Unavailable),
    (error("409 Conflict", "OperationAborted"), Unavailable),
    (error("400 Bad Request", "BadDigest"), IntegrityError),
    (error("501 Not Implemented", "NotImplemented"), NotSupported),
    (error("403 Forbidden", "QuotaExceeded"), OutOfSpace),
    (error("403 Forbidden", "InvalidObjectState"), NotSupported),
    (error("400 Bad Request", "AuthorizationHeaderMalformed", Region="eu"), ConfigError),
    (answer("502 Bad Gateway", b"<html>bad gateway</html>", Content_Type="text/html"), Unavailable),
    (answer("200 OK", b"", length=10) + RESET, Unavailable),
    (HANG, Unavailable),
]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    REFUSALS,
    ids=[f"{kind.__name__}-{number}" for number, (_, kind) in enumerate(REFUSALS)],
)
async def test_refusals_are_translated(refusal: bytes, kind: type[StagerError]) -> None:
    """Each refusal of a put becomes the error that tells what to do, and shows no secret."""
    async with against(refusal) as (store, _):
        with pytest.raises(kind) as caught:
            await store.put("k", b"x")
        assert type(caught.value) is kind
        assert SECRET not in str(caught.value)
        assert "bucket" in str(caught.value)


async def test_a_redirect_names_the_region() -> None:
    """A bucket elsewhere is a matter of configuration, and the answer says where it is."""
    moved = error("301 Moved Permanently", "PermanentRedirect", x_amz_bucket_region="eu-west-3")
    async with against(moved) as (store, _):
        with pytest.raises(ConfigError, match="eu-west-3") as caught:
            await store.put("k", b"x")
        assert "region" in caught.value.hint


async def test_retry_after_is_passed_on() -> None:
    """The store's own wish, within reason."""
    for said, meant in [("7", 7.0), ("-3", 0.0), ("1e9", 300.0), ("Tue, 1 Dec 2026", None), ("nan", None)]:
        async with against(error("503 Slow Down", "SlowDown", Retry_After=said)) as (store, _):
            with pytest.raises(Throttled) as caught:
                await store.put("k", b"x")
            assert caught.value.retry_after_s == meant


async def test_control_characters_in_messages() -> None:
    """What a server says is shown on one line, and not at length."""
    async with against(error("500 Oops", "InternalError", "a&#10;b" + "x" * 5000)) as (store, _):
        with pytest.raises(Unavailable) as caught:
            await store.put("k", b"x")
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 400


async def test_unavailable_then_well() -> None:
    """503 and then success: the retrying store succeeds, having sent the body twice."""
    async with against(error("503 Slow Down", "SlowDown", Retry_After="0"), answer("200 OK", ETag=ETAG)) as (
        store,
        server,
    ):
        version = await RetryingStore(store, chance=random.Random(1)).put("k", b"the body")
        assert version.etag == "0123456789abcdef"
        assert [request.endswith(b"the body") for request in server.requests] == [True, True]


async def test_a_put_costs_one_round_trip() -> None:
    """No Expect header, and no checksum trailer, on the way to a server of which nothing is known."""
    async with against(answer("200 OK", ETag=ETAG)) as (store, server):
        await store.put("k", b"x" * 100_000)
        (request,) = server.requests
        head = request.split(b"\r\n\r\n")[0].lower()
        assert b"expect:" not in head
        assert b"aws-chunked" not in head
        assert b"x-amz-checksum" not in head
        assert b"content-length: 100000" in head


async def test_an_endless_listing() -> None:
    """A listing whose token repeats ends with an error instead of never."""
    page = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><KeyCount>1</KeyCount>"
        b"<NextContinuationToken>same</NextContinuationToken>"
        b"<Contents><Key>a</Key><Size>1</Size><ETag>e</ETag></Contents></ListBucketResult>"
    )
    async with against(answer("200 OK", page)) as (store, _):
        with pytest.raises(IntegrityError, match="listing"):
            [info async for info in store.list_objects()]


async def test_keys_that_stager_cannot_name() -> None:
    """Folder markers and names that could leave a cache are left out of listings."""
    keys = ["ok", "folder/", "../up", "a//b", "/abs"]
    entries = "".join(f"<Contents><Key>{key}</Key><Size>0</Size><ETag>e</ETag></Contents>" for key in keys)
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
    async with against(answer("200 OK", page)) as (store, _):
        assert [info.key async for info in store.list_objects()] == ["ok"]


async def test_deletes_one_by_one_where_batches_are_refused() -> None:
    """An old server that wants Content-MD5, and one without the verb."""
    for refusal in [
        error("400 Bad Request", "MissingContentMD5"),
        error("501 Not Implemented", "NotImplemented"),
    ]:
        async with against(refusal, answer("204 No Content")) as (store, server):
            assert await store.delete(["a", "b"]) == {}
            assert [request.split(b" ")[0] for request in server.requests] == [b"POST", b"DELETE", b"DELETE"]


async def test_a_batch_reports_each_key() -> None:
    """What could not be deleted comes back by key, with its reason; what was missing does not."""
    body = (
        b"<DeleteResult><Deleted><Key>c</Key></Deleted><Error><Key>a</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        b"<Error><Key>b</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    async with against(answer("200 OK", body)) as (store, _):
        failures = await store.delete(["a", "b", "c"])
    assert list(failures) == ["a"]
    assert isinstance(failures["a"], StagerError)


async def test_unreachable_endpoint() -> None:
    """Nobody listens: the message says what was tried, the hint where to look."""
    async with raw_server(GOOD) as server:
        port = server.port
    settings = S3Settings(endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key=SECRET)
    async with opened("bucket", settings) as store:
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}") as caught:
            await store.put("k", b"x")
        assert "endpoint" in caught.value.hint


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:80", "ftp://host", "http://", "http://user:pw@host", "http://[::1", "not a url"]
)
async def test_endpoints_that_cannot_be_meant(endpoint: str) -> None:
    """A wrong endpoint is a configuration error, before any request, and its credentials are not repeated."""
    with pytest.raises(ConfigError, match="endpoint") as caught:
        await open_s3("bucket", S3Settings(endpoint=endpoint, access_key="a", secret_key="b"))
    assert "pw" not in str(caught.value)


@asynccontextmanager
async def opened(bucket: str, settings: S3Settings) -> AsyncIterator[S3Store]:
    store = await open_s3(bucket, settings)
    try:
        yield store
    finally:
        await store.aclose()


async def test_unknown_bucket(s3_server: S3Endpoint) -> None:
    """Every real server's word for it becomes NotFound, which names the bucket and the remedy."""
    # SeaweedFS makes a missing bucket at the first put of an administrator, so it is asked for a listing.
    async with opened("no-such-bucket-here", settings_of(s3_server)) as store:
        with pytest.raises(NotFound, match="no-such-bucket-here") as caught:
            [info async for info in store.list_objects()]
        assert "bucket" in caught.value.hint


@pytest.mark.parametrize(
    "changes", [{"secret_key": "wrong"}, {"access_key": "nobody"}], ids=["secret", "access"]
)
@pytest.mark.parametrize("name", [name for name in server_names() if name != "moto"])  # moto checks none
async def test_wrong_credentials(
    name: str, start_server: Callable[[str], S3Endpoint], changes: dict[str, str]
) -> None:
    """Every real server's word for it becomes Unauthenticated, with a hint where credentials come from."""
    async with opened(BUCKET, settings_of(start_server(name), **changes)) as store:
        with pytest.raises(Unauthenticated) as caught:
            await store.put("k", b"x")
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint


async def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing found anywhere is Unauthenticated too."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    async with raw_server(GOOD) as server, opened("bucket", S3Settings(endpoint=server.endpoint)) as store:
        with pytest.raises(Unauthenticated, match="credentials"):
            await store.put("k", b"x")
