"""The dataset through a daemon: hits ask nobody, misses wait, damage is reported, loss ends at a deadline."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from stager import StagedDataset, StagedLoader
from stager.errors import ConfigError, DeadlineExceeded, FormatError, Unavailable
from stager.formats.batches import decode_order
from tests.dataset.daemon import ThreadDaemon
from tests.dataset.shards import write_with_manifest

SOURCE = "s3://bucket/data"


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    return write_with_manifest(tmp_path / "origin", [6, 6, 6, 6])


def daemon_at(tmp_path: Path, origin: Path) -> ThreadDaemon:
    return ThreadDaemon(tmp_path / "socket", origin, tmp_path / "cache")


def numbers(dataset: StagedDataset) -> list[int]:
    return [sample["cls"] for sample in dataset]


def test_misses_are_fetched_once_and_hits_ask_nobody(tmp_path: Path, origin: Path) -> None:
    """The first epoch wants every shard once; the second none. The URL is the bucket's, the stream that of the origin."""
    with daemon_at(tmp_path, origin) as daemon:
        dataset = StagedDataset(SOURCE, socket=str(daemon.socket), seed=2)
        assert numbers(dataset) == numbers(StagedDataset(origin, seed=2))
        assert sorted(daemon.wanted()) == [f"shard-{shard:06d}.tar" for shard in range(4)]
        samples = list(dataset)
        assert len(daemon.wanted()) == 4
        assert samples[0]["__url__"].startswith(f"{SOURCE}/shard-00000")


def test_workers_resume_through_the_daemon(tmp_path: Path, origin: Path) -> None:
    """Workers wait for shards by themselves, and a resumed loader gives the rest."""
    with daemon_at(tmp_path, origin) as daemon:
        loader = StagedLoader(
            StagedDataset(SOURCE, socket=str(daemon.socket), batch_size=4), num_workers=2, timeout=60
        )
        whole, states = [], []
        for batch in loader:
            whole.append(batch["__key__"])
            states.append(loader.state_dict())
        resumed = StagedLoader(
            StagedDataset(SOURCE, socket=str(daemon.socket), batch_size=4), num_workers=1, timeout=60
        )
        resumed.load_state_dict(states[1])
        assert [batch["__key__"] for batch in resumed] == whole[2:]


def test_the_order_is_announced(tmp_path: Path, origin: Path) -> None:
    """At the beginning of an epoch the daemon hears what it needs to compute the order, and from where."""
    with daemon_at(tmp_path, origin) as daemon:
        dataset = StagedDataset(SOURCE, socket=str(daemon.socket), batch_size=4, seed=9, rank=1, world_size=2)
        items = iter(dataset)
        next(items)
        state = dataset.state_dict()
        dataset.load_state_dict(state)
        next(iter(dataset))
        announced = [request for path, request in daemon.calls if path == "/v1/announce"]
        assert [request.position for request in announced] == [0, 8]
        assert {(request.rank, request.world, request.dataset) for request in announced} == {(1, 2, "data")}
        plan, geometry = decode_order(announced[0].order, world=2)
        assert (plan.seed, plan.fingerprint, geometry.global_batch) == (9, dataset.fingerprint, 8)


def test_a_small_cache_is_said(tmp_path: Path, origin: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache smaller than the window is a warning with both sizes."""
    with daemon_at(tmp_path, origin) as daemon:
        daemon.cache_bytes = 10
        numbers(StagedDataset(SOURCE, socket=str(daemon.socket)))
    records = [record for record in caplog.records if record.msg == "cache.smaller_than_window"]
    assert len(records) == 1
    assert records[0].fields["cache_bytes_needed"] == 1000


def test_reading_waits_for_a_shard_that_comes_later(tmp_path: Path, origin: Path) -> None:
    """A miss blocks until the shard is published, then goes on."""
    with daemon_at(tmp_path, origin) as daemon:
        daemon.released.clear()
        found: list[int] = []
        dataset = StagedDataset(SOURCE, socket=str(daemon.socket))
        reading = threading.Thread(target=lambda: found.extend(numbers(dataset)))
        reading.start()
        end = time.monotonic() + 30
        while not daemon.wanted() and time.monotonic() < end:
            time.sleep(0.001)
        assert daemon.wanted()
        assert not found
        daemon.released.set()
        reading.join(30)
        assert sorted(found) == list(range(24))


def test_a_shard_that_never_comes_ends_at_the_deadline(tmp_path: Path, origin: Path) -> None:
    """The error names the shard, not only the wait."""
    with daemon_at(tmp_path, origin) as daemon:
        daemon.released.clear()
        dataset = StagedDataset(SOURCE, socket=str(daemon.socket), wait_timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"shard-00000\d\.tar"):
            numbers(dataset)


def test_a_daemon_that_restarts_is_waited_for(tmp_path: Path, origin: Path) -> None:
    """on_daemon_loss="wait": a miss while it is away succeeds when it is back; open shards need nobody."""
    with daemon_at(tmp_path, origin) as daemon:
        items = iter(StagedDataset(SOURCE, socket=str(daemon.socket), window=1, wait_timeout_s=60))
        found = [next(items)["cls"] for _ in range(6)]
    back = daemon_at(tmp_path, origin)
    timer = threading.Timer(0.2, back.__enter__)
    timer.start()
    found += [sample["cls"] for sample in items]
    timer.join()
    back.__exit__(None, None, None)
    assert sorted(found) == list(range(24))


def test_a_lost_daemon_is_named(tmp_path: Path, origin: Path) -> None:
    """on_daemon_loss="fail" at once, "wait" at the deadline: both name the socket; what is cached is read without it."""
    with daemon_at(tmp_path, origin) as daemon:
        failing = StagedDataset(SOURCE, socket=str(daemon.socket), on_daemon_loss="fail")
        waiting = StagedDataset(SOURCE, socket=str(daemon.socket), wait_timeout_s=0.2)
    with pytest.raises(Unavailable, match=f"{daemon.socket}"):
        numbers(failing)
    with pytest.raises(Unavailable, match=f"{daemon.socket}"):
        numbers(waiting)
    for shard in origin.glob("*.tar"):
        (daemon.cache / shard.name).write_bytes(shard.read_bytes())
    assert sorted(numbers(failing)) == list(range(24))


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, origin: Path) -> None:
    """A cached shard that turns out damaged is reported and replaced; if the origin is damaged too, it is an error."""
    with daemon_at(tmp_path, origin) as daemon:
        good = (origin / "shard-000001.tar").read_bytes()
        (daemon.cache / "shard-000001.tar").write_bytes(good[:700])
        dataset = StagedDataset(SOURCE, socket=str(daemon.socket))
        assert sorted(numbers(dataset)) == list(range(24))
        reports = [request for path, request in daemon.calls if path == "/v1/want" and request.damaged]
        assert [request.shard for request in reports] == ["shard-000001.tar"]
        for copy in (origin, daemon.cache):
            (copy / "shard-000001.tar").write_bytes(good[:700])
        with pytest.raises(FormatError, match=r"shard-000001\.tar"):
            numbers(dataset)


def test_a_bucket_without_a_daemon_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hint says what to start."""
    monkeypatch.delenv("STAGER_SOCKET", raising=False)
    with pytest.raises(ConfigError, match="stager run"):
        StagedDataset(SOURCE)
    monkeypatch.setenv("STAGER_SOCKET", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="stager run"):
        StagedDataset(SOURCE, on_daemon_loss="fail")
