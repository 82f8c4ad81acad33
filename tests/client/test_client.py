"""The blocking client and commit()."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from stager import commit
from stager.client import Client, find_socket
from stager.errors import ConfigError, DeadlineExceeded, StagerError, Unavailable, UsageError
from stager.formats.commits import COMMIT_MARKER_NAME, CommitMarker, decode_marker
from tests.dataset.daemon import ThreadDaemon
from tests.dataset.shards import write_with_manifest


@pytest.fixture
def daemon(tmp_path: Path) -> ThreadDaemon:
    return ThreadDaemon(
        tmp_path / "socket", write_with_manifest(tmp_path / "origin", [2, 1]), tmp_path / "cache"
    )


def test_calls_and_errors_come_back(daemon: ThreadDaemon) -> None:
    """Replies are typed, and the daemon's errors keep their class, message and hint."""
    client = Client(str(daemon.socket))
    assert not client.live()
    with daemon:
        assert client.live()
        opened = client.open("s3://bucket/data", 5)
        assert opened.dataset == "data"
        assert Path(client.want("data", "shard-000000.tar", 5).path).exists()
        daemon.released.clear()
        with pytest.raises(DeadlineExceeded, match="did not come"):
            client.want("data", "shard-000001.tar", 0.1)
        with pytest.raises(StagerError):
            client.want("data", "../escape", 5)


def test_a_forked_child_calls_by_itself(daemon: ThreadDaemon) -> None:
    """A client made before fork works on both sides at once."""
    with daemon:
        client = Client(str(daemon.socket))
        assert client.live()
        child = os.fork()
        if child == 0:
            os._exit(0 if client.open("s3://bucket/data", 5).dataset == "data" else 1)
        assert client.open("s3://bucket/data", 5).dataset == "data"
        assert os.waitpid(child, 0)[1] == 0


def test_threads_share_a_client(daemon: ThreadDaemon) -> None:
    """Calls of several threads do not mix."""
    with daemon:
        client = Client(str(daemon.socket))
        found: list[str] = []
        shards = [f"shard-{number % 2:06d}.tar" for number in range(8)]
        threads = [
            threading.Thread(
                target=lambda shard=shard: found.append(Path(client.want("data", shard, 5).path).name)
            )
            for shard in shards
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(found) == sorted(shards)


def test_a_silent_daemon_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who listens and says nothing is an error that names socket and wait."""
    monkeypatch.setattr("stager.client.api.REPLY_MARGIN_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen()
        with pytest.raises(DeadlineExceeded, match=r"data/x\.tar.*socket"):
            Client(str(tmp_path / "socket")).want("data", "x.tar", 0.1)


def test_nobody_there_is_named(tmp_path: Path) -> None:
    """A missing socket, one without listener and one too long say what to do."""
    with pytest.raises(Unavailable, match="stager run"):
        Client(str(tmp_path / "none"), patience_s=0.05).status()
    with pytest.raises(ConfigError, match="too long"):
        Client("/" + "x" * 120).status()


def test_which_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given comes before the environment."""
    monkeypatch.setenv("STAGER_SOCKET", "/run/b")
    assert find_socket("/run/a") == "/run/a"
    assert find_socket(None) == "/run/b"
    monkeypatch.delenv("STAGER_SOCKET")
    assert find_socket(None) in (None, "/run/stager/stager.sock")


class Loader:
    def state_dict(self) -> dict[str, object]:
        return {"position": 64}


def test_commit_leaves_a_marker_and_tells_the_daemon(daemon: ThreadDaemon, tmp_path: Path) -> None:
    """Step, metrics and cursor are in the marker, and the daemon is asked to seal."""
    directory = tmp_path / "step-100"
    directory.mkdir()
    with daemon:
        commit(
            directory,
            step=100,
            metrics={"loss": 2.1, "broken": float("nan")},
            loader=Loader(),
            socket=str(daemon.socket),
        )
    marker = decode_marker((directory / COMMIT_MARKER_NAME).read_bytes())
    assert marker == CommitMarker(100, {"loss": 2.1}, {"position": 64})
    assert [request.directory for path, request in daemon.calls if path == "/v1/seal"] == [str(directory)]
    assert sorted(os.listdir(directory)) == [COMMIT_MARKER_NAME]


def test_commit_without_a_daemon_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The marker is what counts; a daemon that is away is said and ignored."""
    commit(tmp_path, socket=str(tmp_path / "none"))
    assert json.loads((tmp_path / COMMIT_MARKER_NAME).read_bytes())["step"] is None
    assert [record.msg for record in caplog.records] == ["commit.ping_failed"]


def test_commit_refuses_what_cannot_be_meant(tmp_path: Path) -> None:
    """A missing directory, a step or metric that is no number, a state that is no JSON: named, and no marker."""
    with pytest.raises(UsageError, match="not a directory"):
        commit(tmp_path / "missing")
    with pytest.raises(UsageError, match="step"):
        commit(tmp_path, step=-1)
    with pytest.raises(UsageError, match="metric `loss`"):
        commit(tmp_path, metrics={"loss": "low"})  # type: ignore[dict-item]
    loader = Loader()
    loader.state_dict = lambda: {"tensor": object()}  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="JSON"):
        commit(tmp_path, loader=loader)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_daemon_is_asked_again(tmp_path: Path) -> None:
    """A full backlog refuses at once on a unix socket; that is no daemon lost, even without patience."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(path)
        server.listen(0)
        first.connect(path)
        found: list[bool] = []
        asking = threading.Thread(target=lambda: found.append(Client(path).ready()[0]))
        asking.start()
        server.accept()[0].close()
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        asking.join(30)
    assert found == [True]


def test_a_long_wait_for_nobody_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that waits for a daemon says so once, and where it looks."""
    monkeypatch.setattr("stager.client.api.AWAY_TOLD_S", 0.05)
    missing = str(tmp_path / "s")
    with pytest.raises(Unavailable):
        Client(missing, patience_s=0.6).open("s3://bucket/data", 5)
    told = [record.getMessage() for record in caplog.records if record.msg == "daemon.awaited"]
    assert len(told) == 1 and missing in told[0] and "stager run" in told[0]
