"""Which servers the tests run against, and how they are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import botocore.session
from botocore.config import Config

from s3_server import S3Endpoint, SeaweedServer
from tests.servers.ceph import CephServer, missing_programs
from tests.servers.moto import MotoServer


class Server(Protocol):
    """A running server."""

    endpoint: S3Endpoint

    def kill(self) -> None: ...


STARTERS: dict[str, Callable[[Path], Server]] = {
    "moto": MotoServer,
    "seaweedfs": SeaweedServer,
    "ceph": lambda _folder: CephServer(),
}
BUCKET = "stager-tests"


def ceph_is_required() -> bool:
    """In CI a missing server is a failure."""
    return os.environ.get("CI") == "true" or os.environ.get("STAGER_TEST_REQUIRE_CEPH") == "1"


def server_names() -> list[str]:
    """The servers that tests are parametrised over: Ceph only where it is installed or demanded."""
    return [name for name in STARTERS if name != "ceph" or ceph_is_required() or not missing_programs()]


def left_out() -> str:
    """What is not tested here and how to change that, or nothing."""
    if "ceph" in server_names():
        return ""
    return f"NOT TESTED against Ceph: {', '.join(missing_programs())} not installed (.ci/run installs them)"


def make_bucket(endpoint: S3Endpoint, name: str) -> None:
    """Create a bucket; one that exists is fine."""
    session = botocore.session.Session()
    client = session.create_client(
        "s3",
        endpoint_url=endpoint.endpoint,
        region_name=endpoint.region,
        aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5, "mode": "standard"}),
    )
    try:
        client.create_bucket(Bucket=name)
    except client.exceptions.BucketAlreadyOwnedByYou:
        pass
    finally:
        client.close()
