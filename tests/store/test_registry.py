"""From a URL to a store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3_server import S3Endpoint
from stager.disk import LocalDisk
from stager.errors import ConfigError, NotSupported, StagerError, UsageError
from stager.offload import ThreadOffload
from stager.store.api import read_all
from stager.store.providers import PROFILES, find_profile
from stager.store.registry import StoreTools, StoreUrl, open_store, parse_url
from stager.store.s3_client import endpoint_of_the_sdk
from stager.store.s3_settings import S3Settings
from tests.servers.choice import BUCKET
from tests.store.conftest import settings_of


@pytest.fixture
async def tools() -> AsyncIterator[StoreTools]:
    offload = ThreadOffload(disk_threads=2, hash_threads=1)
    yield StoreTools(LocalDisk(), offload, random.Random(1), durable=False)
    offload.close()


@pytest.mark.parametrize(
    ("url", "base", "expected"),
    [
        ("s3://bucket", "", StoreUrl("s3", "bucket")),
        ("s3://bucket/", "", StoreUrl("s3", "bucket")),
        ("s3://bucket/a/b/", "", StoreUrl("s3", "bucket", "a/b")),
        ("S3://bucket/x", "", StoreUrl("s3", "bucket", "x")),
        ("s3://my.bucket-1/ünï code", "", StoreUrl("s3", "my.bucket-1", "ünï code")),
        ("memory://m/p", "", StoreUrl("memory", "m", "p")),
        ("file:///data/x", "", StoreUrl("file", "/data/x")),
        ("file://localhost/data/x%20y", "", StoreUrl("file", "/data/x y")),
        ("file:///data/a#b?c", "", StoreUrl("file", "/data/a#b?c")),
        ("/data/x/../y/", "", StoreUrl("file", "/data/y")),
        ("out", "/home/me", StoreUrl("file", "/home/me/out")),
        ("./out", "/home/me", StoreUrl("file", "/home/me/out")),
    ],
)
def test_urls(url: str, base: str, expected: StoreUrl) -> None:
    """What each form means."""
    assert parse_url(url, base=base) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "s3:///key",
        "s3://b/../x",
        "s3://b/a//b",
        "s3://user@b/x",
        "http://b/x",
        "file://host/x",
        "out",
        "a\0b",
        "s3:/b/x",
        "S3:b/x",
    ],
)
def test_urls_that_name_no_store(url: str) -> None:
    """They are refused by name, and the hint shows what is meant."""
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    assert caught.value.hint


@pytest.mark.parametrize("url", ["az://container/x", "gs://bucket/x"])
def test_clouds_that_are_not_spoken_yet(url: str) -> None:
    """The message says what is missing and what can be done today."""
    with pytest.raises(NotSupported, match="yet") as caught:
        parse_url(url)
    assert caught.value.hint


@given(st.text(max_size=60), st.sampled_from(["", "s3://", "file://", "s3://b/", "memory://"]))
def test_any_text_is_a_store_or_an_error_of_ours(text: str, start: str) -> None:
    """No URL raises anything but the taxonomy's errors, and what is accepted is written down and read the same."""
    try:
        url = parse_url(start + text, base="/base")
    except StagerError:
        return
    assert parse_url(str(url)) == url


async def test_directory(tools: StoreTools, tmp_path: Path) -> None:
    """A path is a store, whose tools are those that were given."""
    store = await open_store("bucket", S3Settings(), tools, base=str(tmp_path))
    await store.put("a/k", b"12345")
    assert (tmp_path / "bucket/a/k").read_bytes() == b"12345"
    assert (await read_all(store, "a/k", bytes_max=10))[0] == b"12345"
    assert (tools.meter.bytes_up, tools.meter.bytes_down) == (5, 5)
    await store.aclose()


async def test_memory_is_shared_by_name(tools: StoreTools) -> None:
    """Two stores of one name see the same bucket; the prefix is part of the URL."""
    one = await open_store("memory://shared/p", S3Settings(), tools)
    other = await open_store("memory://shared", S3Settings(), tools)
    await one.put("k", b"x")
    assert [info.key async for info in other.list_objects()] == ["p/k"]


async def test_s3_below_a_prefix(tools: StoreTools, seaweedfs: S3Endpoint) -> None:
    """The whole stack over a real server."""
    store = await open_store(f"s3://{BUCKET}/registry/p", settings_of(seaweedfs), tools)
    await store.put("k", b"12345")
    assert [info.key async for info in store.list_objects()] == ["k"]
    assert store.properties.name == f"s3://{BUCKET}/registry/p"
    assert await store.delete(["k"]) == {}
    await store.aclose()


async def test_settings_of_the_environment(
    tools: StoreTools, seaweedfs: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing configured, the SDK's own variables lead to the server."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    store = await open_store(f"s3://{BUCKET}/registry/env", S3Settings(addressing="path"), tools)
    await store.put("k", b"12345")
    assert (await read_all(store, "k", bytes_max=10))[0] == b"12345"
    await store.aclose()


async def test_another_server_by_the_environment_is_not_taken_for_aws(
    tools: StoreTools, seaweedfs: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS lists ``a/1`` before ``a.2/1``; named by AWS_ENDPOINT_URL it is sorted as if named by store.endpoint."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    store = await open_store(f"s3://{BUCKET}/registry/order", S3Settings(), tools)
    for key in ("a/1", "a.2/1"):
        await store.put(key, b"")
    assert [info.key async for info in store.list_objects()] == ["a.2/1", "a/1"]
    await store.aclose()


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("https://s3.eu-west-1.amazonaws.com", ""),
        ("https://s3.cn-north-1.amazonaws.com.cn", ""),
        ("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com", ""),
        ("https://amazonaws.com.example.org", "https://amazonaws.com.example.org"),
        ("http://minio:9000", "http://minio:9000"),
    ],
)
def test_endpoints_of_the_sdk(endpoint: str, found: str) -> None:
    """AWS's own hosts are AWS; any other is a server to assume little about, unless the provider is named."""
    client = SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint))
    assert endpoint_of_the_sdk(client, S3Settings()) == found
    assert endpoint_of_the_sdk(client, S3Settings(provider="minio")) == ""


def test_profiles() -> None:
    """The default follows the endpoint, and a wrong name lists the right ones."""
    assert find_profile("").name == "aws"
    assert find_profile("", endpoint="http://x").name == "generic"
    with pytest.raises(ConfigError, match="awz") as caught:
        find_profile("awz")
    assert "aws" in caught.value.hint
    for name, profile in PROFILES.items():
        assert name == profile.name
        assert profile.part_bytes_min <= profile.part_bytes_max <= profile.put_bytes_max * 2


async def test_region_that_a_template_needs(monkeypatch: pytest.MonkeyPatch, tools: StoreTools) -> None:
    """A provider whose address holds the region says so when there is none."""
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(ConfigError, match="region"):
        await open_store("s3://b", S3Settings(provider="wasabi"), tools)


def test_settings_show_no_secrets() -> None:
    """Printing settings, as a log or a traceback may, shows no key."""
    settings = S3Settings(access_key="AKIA", secret_key="hush", session_token="token")
    assert not {"AKIA", "hush", "token'"} & set(repr(settings).replace("=", " ").split())
    assert "hush" not in repr(settings)


async def test_a_bucket_that_is_a_file(tools: StoreTools, tmp_path: Path) -> None:
    """What is no directory is refused when it is opened, not when the first checkpoint is to be written."""
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/below"):
        with pytest.raises(UsageError, match="is no directory"):
            await open_store(path, S3Settings(), tools, base=str(tmp_path))
