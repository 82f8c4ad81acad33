"""The configuration: every problem at once, secrets masked, origins known."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.config import (
    BestSection,
    CheckpointSection,
    DatasetSection,
    KeepSection,
    LimitsSection,
    LogSection,
    NodeSection,
    StoreSection,
    TierSection,
    load_config,
    load_store_section,
)
from stager.errors import ConfigError
from stager.units import format_duration, format_size, parse_rate, parse_size

GOOD = """
[node]
cache = "/mnt/nvme/stager"
cache_bytes = "2TB"
socket = "/run/stager/stager.sock"
[store]
provider = "aws"
region = "us-east-1"
access_key = "AKIAEXAMPLE"
secret_key = "very-secret"
[[dataset]]
source = "s3://bucket/dataset"
[[checkpoint]]
watch = "/mnt/nvme/checkpoints"
run = "s3://bucket/runs/llama-7b"
tiers = [{url = "s3://bucket/runs/llama-7b", keep = {every_steps = 1000, last = 3}}]
[limits]
upload = "500MB/s"
download = "off"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "stager.toml"
    path.write_text(text)
    return str(path)


def test_a_good_file(tmp_path: Path) -> None:
    """Sizes and rates become bytes, and what was left out has its default."""
    loaded = load_config(write(tmp_path, GOOD), {})
    config = loaded.config
    assert config.node.cache_bytes == 2 * 10**12 and config.limits.upload == 500_000_000
    assert config.limits.download is None and config.node.node_count == 1
    keep = config.checkpoint[0].all_tiers[0].keep
    assert keep.last == 3 and keep.every_steps == 1000
    assert loaded.origins["node.cache"].endswith("stager.toml") and "node.node_index" not in loaded.origins


def test_secrets_do_not_show(tmp_path: Path) -> None:
    """Neither the representation nor the dump of a configuration holds a secret."""
    config = load_config(write(tmp_path, GOOD), {}).config
    assert "very-secret" not in repr(config) + config.model_dump_json() + str(config.model_dump(mode="json"))
    assert config.store.secret_key.get_secret_value() == "very-secret"


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong types, missing keys and contradictions come in one error, each with its place."""
    text = """
[node]
cache = "relative/path"
cache_bytes = "two terabytes"
sockt = "/run/x"
node_index = "many"
[store]
access_key = "only one"
[[dataset]]
[[checkpoint]]
watch = "/c"
run = "s3://b/r"
layout = "unknown"
[limits]
upload = "0MB/s"
[extra]
"""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {})
    said = str(caught.value)
    for place in (
        "node.cache: `relative/path` is not an absolute path",
        "node.cache_bytes: `two terabytes` is not a size",
        "node.sockt: there is no such key",
        "node.socket: is missing",
        "node.node_index:",
        "store: access_key and secret_key come together",
        "dataset[0].source: is missing",
        "checkpoint[0].layout:",
        "limits.upload: a rate of 0",
        "extra: there is no such key",
    ):
        assert place in said, place
    assert said.startswith(f"`{tmp_path}/stager.toml` has 10 problems") and "hint:" in said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("[stor]\nregion = 'x'", "stor: there is no such key; did you mean `store`?"),
        ("[log]\nlevle = 'info'", "log.levle: there is no such key; did you mean `level`?"),
        ("[log]\nbright = 1", "log.bright: there is no such key; there are level, format"),
        (
            "[[dataset]]\nsource = 's3://b/d'\nsurce = 1",
            "dataset[0].surce: there is no such key; did you mean `source`?",
        ),
        (
            "[[checkpoint]]\nwatch='/c'\nrun='s3://b/r'\ntiers=[{url='s3://b/r', keep={las=1}}]",
            "checkpoint[0].tiers[0].keep.las: there is no such key; did you mean `last`?",
        ),
        ("[checkpoint]\nwatch = '/c'", "checkpoint: there may be several: write [[checkpoint]]"),
        (
            "[[checkpoint]]\nwatch='/c'\nrun='s3://b/r'\ntiers={url='s3://b/r'}",
            "checkpoint[0].tiers: is a list",
        ),
    ],
)
def test_slips_of_the_pen(tmp_path: Path, change: str, told: str) -> None:
    """A wrong key names the right one, and a section that must be a list is shown as one."""
    node = "[node]\ncache = '/c'\ncache_bytes = '1GB'\nsocket = '/s'\n"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, node + change), {})
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('watch = "/mnt/nvme/stager/inside"', "lies in the cache"),
        (
            'watch = "/mnt/nvme/checkpoints"\n[[checkpoint]]\nrun = "x"\nwatch = "/mnt/nvme/checkpoints/"',
            "watched twice",
        ),
        ('watch = "/c"\n[[checkpoint]]\nrun = "s3://b/r/"\nwatch = "/d"', "go into the run"),
    ],
)
def test_folders_that_cannot_be_watched(tmp_path: Path, change: str, told: str) -> None:
    """A folder is watched once, and never the cache."""
    text = GOOD.split("[[checkpoint]]")[0] + "[[checkpoint]]\nrun = 's3://b/r'\n" + change
    with pytest.raises(ConfigError, match=told):
        load_config(write(tmp_path, text), {})


def test_a_socket_path_that_no_kernel_takes(tmp_path: Path) -> None:
    """A path longer than a socket's is told before it is bound."""
    long = "/run/" + "x" * 110
    with pytest.raises(ConfigError, match="a socket's may have 107"):
        load_config(write(tmp_path, GOOD.replace("/run/stager/stager.sock", long)), {})


def test_files_that_are_not_configurations(tmp_path: Path) -> None:
    """Missing, unreadable and malformed files are errors of their own, naming the file."""
    for path in (str(tmp_path / "none.toml"), str(tmp_path), write(tmp_path, "[node")):
        with pytest.raises(ConfigError, match=path):
            load_config(path, {})


def test_the_environment_overrides(tmp_path: Path) -> None:
    """``STAGER_SECTION__KEY`` wins over the file, is checked as it is, and shows as the origin."""
    environment = {
        "STAGER_NODE__CACHE": "/other",
        "STAGER_STORE__ENDPOINT": "http://127.0.0.1:1",
        "STAGER_SOCKET": "/x",
    }
    loaded = load_config(write(tmp_path, GOOD), environment)
    assert loaded.config.node.cache == "/other" and loaded.config.store.endpoint == "http://127.0.0.1:1"
    assert loaded.origins["node.cache"] == "environment STAGER_NODE__CACHE"
    with pytest.raises(ConfigError, match=r"node\.colour: there is no such key"):
        load_config(write(tmp_path, GOOD), {"STAGER_NODE__COLOUR": "red"})
    for name in ("STAGER_NODES__CACHE", "STAGER_DATASET__SOURCE"):
        with pytest.raises(ConfigError, match=f"{name}: there is no such key"):
            load_config(write(tmp_path, GOOD), {name: "x"})


def test_several_tiers(tmp_path: Path) -> None:
    """Tiers stand in order, each with its rule and its class; without any the run is the only one."""
    text = GOOD.replace(
        "tiers = [{url",
        'tiers = [{path = "/lustre/ckpt/", keep = {every_hours = 2, best = {metric = "loss"}, names = ["a*"]}},'
        ' {url = "s3://cold/runs", storage_class = "GLACIER_IR"}, {url',
    )
    section = load_config(write(tmp_path, text), {}).config.checkpoint[0]
    assert [tier.location for tier in section.all_tiers] == [
        "/lustre/ckpt",
        "s3://cold/runs",
        "s3://bucket/runs/llama-7b",
    ]
    keep = section.all_tiers[0].keep
    assert keep.best is not None and (keep.every_hours, keep.best.mode, keep.names) == (2, "min", ("a*",))
    alone = GOOD.replace("tiers = ", "# tiers = ")
    assert load_config(write(tmp_path, alone), {}).config.checkpoint[0].all_tiers[0].location == section.run


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ('{path = "/lustre"}', "one of them has to be the run"),
        ('{path = "/l", url = "s3://b/r"}', "either a `path`"),
        ("{}", "either a `path`"),
        ('{path = "l"}', "not an absolute path"),
        ('{path = "/l", storage_class = "GLACIER"}', "storage_class is for buckets"),
        ('{url = "s3://b/r"}, {url = "s3://b/r/"}', "two of them are one place"),
        ('{path = "/c/sub"}, {url = "s3://b/r"}', "one lies in the other"),
        ('{url = "s3://b/r", keep = {best = {}}}', "metric: is missing"),
        ('{url = "s3://b/r", keep = {best = {metric = "x", mode = "most"}}}', "'min' or 'max'"),
    ],
)
def test_tiers_that_make_no_sense(tmp_path: Path, tiers: str, said: str) -> None:
    """Each is refused with its place and the reason."""
    cut = GOOD[: GOOD.index("[[checkpoint]]")]
    text = f"{cut}[[checkpoint]]\nwatch = '/c'\nrun = 's3://b/r'\ntiers = [{tiers}]\n"
    with pytest.raises(ConfigError, match=r"checkpoint\[0\]\.?.*" + said):
        load_config(write(tmp_path, text), {})


def test_commands_without_a_daemon_need_only_the_store(tmp_path: Path) -> None:
    """The store's section is enough, from a file, from the environment, or from neither."""
    assert load_store_section(None, {}).endpoint == ""
    assert load_store_section(None, {"STAGER_STORE__REGION": "eu"}).region == "eu"
    assert load_store_section(write(tmp_path, "[store]\nregion = 'us'\n"), {}).region == "us"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("7", 7),
        (7, 7),
        ("1kB", 1000),
        ("256MB", 256 * 10**6),
        ("1.5GiB", 3 << 29),
        ("2 TB", 2 * 10**12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    """Decimal and binary units, in any case."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e9", "12 parsecs", "1.2.3MB", "9" * 40, True, None, 1.5])
def test_what_is_no_size(text: object) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError):
        parse_size(text)  # type: ignore[arg-type]  # that is the point


def test_rates() -> None:
    """A rate is a size a second, or off."""
    assert parse_rate("500MB/s") == 500_000_000 and parse_rate("off") is None and parse_rate(8) == 8


def test_for_people() -> None:
    """Sizes and durations as they are told."""
    assert [format_size(size) for size in (0, 999, 1500, 2_500_000, 10**13)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "2.5 MB",
        "10.0 TB",
    ]
    assert [format_duration(s) for s in (0, 59.4, 65, 7260)] == ["0 s", "59 s", "1 min 05 s", "2 h 01 min"]


def test_every_key_does_something() -> None:
    """No key is accepted that nothing reads."""
    sources = "".join(
        path.read_text()
        for path in (Path(__file__).parents[2] / "stager").rglob("*.py")
        if path.name != "config.py"
    )
    sections = [
        NodeSection,
        StoreSection,
        DatasetSection,
        CheckpointSection,
        TierSection,
        KeepSection,
        BestSection,
        LimitsSection,
        LogSection,
    ]
    # `all_tiers` stands for it, in config.py.
    unread = {name for section in sections for name in section.model_fields if f".{name}" not in sources} - {
        "tiers"
    }
    assert not unread
