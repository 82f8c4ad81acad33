"""Fixtures for every test: real S3 servers, started once a session and only if a test asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from s3_server import S3Endpoint, ServerFailed
from tests.servers.choice import BUCKET, STARTERS, left_out, make_bucket, server_names


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Endpoint]]:
    """``start_server("moto")`` gives the endpoint of that server, with the bucket `BUCKET`; started on first use."""
    endpoints: dict[str, S3Endpoint] = {}
    failures: dict[str, ServerFailed] = {}
    with contextlib.ExitStack() as running:

        def endpoint(name: str) -> S3Endpoint:
            if name in failures:  # one slow failure is enough
                raise failures[name]
            if name not in endpoints:
                try:
                    server = STARTERS[name](tmp_path_factory.mktemp(name))
                except ServerFailed as error:
                    failures[name] = error
                    raise
                running.callback(server.kill)
                make_bucket(server.endpoint, BUCKET)
                endpoints[name] = server.endpoint
            return endpoints[name]

        yield endpoint


@pytest.fixture(scope="session", params=server_names())
def s3_server(request: pytest.FixtureRequest, start_server: Callable[[str], S3Endpoint]) -> S3Endpoint:
    """Each S3 server in turn; a test that uses it runs against all of them."""
    return start_server(request.param)


@pytest.fixture(scope="session")
def seaweedfs(start_server: Callable[[str], S3Endpoint]) -> S3Endpoint:
    """The real S3 server that is always there."""
    return start_server("seaweedfs")


@pytest.fixture(scope="session")
def moto(start_server: Callable[[str], S3Endpoint]) -> S3Endpoint:
    """The emulated S3 server: fast, and it checks nothing."""
    return start_server("moto")


def pytest_report_header() -> list[str]:
    return [f"S3 servers: {', '.join(server_names())}", *filter(None, [left_out()])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left_out():
        terminalreporter.write_line(left_out(), yellow=True)
