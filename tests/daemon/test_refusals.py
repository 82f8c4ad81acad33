"""What the daemon does not start with: it ends soon, with the exit code of its kind, the thing named, and a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3_server import S3Endpoint
from tests.daemon.process import daemon, stager
from tests.servers.choice import BUCKET


def config_of(source: str, folder: Path, run: str = "") -> str:
    checkpoint = f'[[checkpoint]]\nwatch = "{folder}/saves"\nrun = "{run}"\n' if run else ""
    return f'cache_bytes = "100MB"\n[[dataset]]\nsource = "{source}"\n{checkpoint}'


@pytest.mark.parametrize("wrong", ["secret", "buckets"])
def test_stores_that_no_wait_mends(tmp_path: Path, seaweedfs: S3Endpoint, wrong: str) -> None:
    """Wrong credentials and unknown buckets, of datasets and of runs: exit code 12."""
    environment = seaweedfs.environment()
    if wrong == "secret":
        environment["AWS_SECRET_ACCESS_KEY"] = "another-secret"
        config = config_of(f"s3://{BUCKET}/none", tmp_path)
    else:
        config = config_of("s3://no-such-bucket/dataset", tmp_path, "s3://nor-this-one/run")
    with daemon(tmp_path, environment, config) as made:
        done = stager("run", "--config", str(made.config), environment=environment)
    assert done.returncode == 12, done.stderr
    told = done.stderr[done.stderr.index("error:") :]
    assert "hint:" in told and "Traceback" not in done.stderr
    assert environment["AWS_SECRET_ACCESS_KEY"] not in done.stderr
    for name in (BUCKET,) if wrong == "secret" else ("no-such-bucket", "nor-this-one"):
        assert name in told


def test_a_dataset_that_is_not_there_yet(tmp_path: Path, seaweedfs: S3Endpoint) -> None:
    """A bucket without the manifest is waited for, visibly: somebody may be packing it."""
    environment = seaweedfs.environment()
    with daemon(tmp_path, environment, config_of(f"s3://{BUCKET}/later", tmp_path)) as running:
        running.start()
        running.wait_until(
            lambda: "no manifest.json" in str(running.status()["staging"]["problems"]), "the problem"
        )
        assert running.client.ready() == (False, ("staging",))
        assert running.stop() == 0


def test_every_problem_of_a_configuration(tmp_path: Path) -> None:
    """All at once, with their places, by `run` and by `config check` alike: exit code 10."""
    config = tmp_path / "stager.toml"
    config.write_text(
        '[node]\ncache = "relative"\ncache_bytes = "much"\nsocket = "/s"\ncolour = "red"\n[limits]\nupload = "fast"\n'
    )
    for command in (["run"], ["config", "check"], ["config", "show"]):
        done = stager(*command, "--config", str(config), environment={})
        assert done.returncode == 10
        for place in ("node.cache:", "node.cache_bytes:", "node.colour:", "limits.upload:"):
            assert place in done.stderr
    told = stager("config", "check", "--config", str(config), "--json", environment={})
    assert json.loads(told.stdout)["error"]["kind"] == "ConfigError" and told.returncode == 10


def test_every_url_of_a_configuration(tmp_path: Path) -> None:
    """Stores of no kind that stager speaks are told together: exit code 10."""
    config = tmp_path / "stager.toml"
    config.write_text(
        f'[node]\ncache = "{tmp_path}/c"\ncache_bytes = "1MB"\nsocket = "{tmp_path}/s"\n'
        '[[dataset]]\nsource = "gs://bucket/x"\n[[dataset]]\nsource = "relative/path"\n'
        f'[[checkpoint]]\nwatch = "{tmp_path}/w"\nrun = "ftp://x"\n'
    )
    for command in ("run", "config"):
        arguments = [command] if command == "run" else ["config", "check"]
        done = stager(*arguments, "--config", str(config), environment={})
        assert done.returncode == 10, done.stderr
        for place in ("dataset[0].source", "dataset[1].source", "checkpoint[0].run"):
            assert place in done.stderr
    assert not (tmp_path / "c").exists()


def test_a_missing_configuration() -> None:
    """Its name, and what to do."""
    done = stager("run", "--config", "/nowhere/stager.toml", environment={})
    assert done.returncode == 10 and "/nowhere/stager.toml" in done.stderr and "hint:" in done.stderr


@pytest.mark.parametrize("place", ["node.cache", "checkpoint[0].watch"])
def test_directories_that_cannot_be(tmp_path: Path, place: str) -> None:
    """A file where a directory should be: exit code 10, naming key and path."""
    (tmp_path / "file").write_text("x")
    paths = {"node.cache": tmp_path / "c", "checkpoint[0].watch": tmp_path / "w", place: tmp_path / "file"}
    config = tmp_path / "stager.toml"
    config.write_text(
        f'[node]\ncache = "{paths["node.cache"]}"\ncache_bytes = "1MB"\nsocket = "{tmp_path}/s"\n'
        f'[[checkpoint]]\nwatch = "{paths["checkpoint[0].watch"]}"\nrun = "{tmp_path}/run"\n'
    )
    done = stager("run", "--config", str(config), environment={})
    assert done.returncode == 10 and f"{place}: `{tmp_path}/file`" in done.stderr and "hint:" in done.stderr
