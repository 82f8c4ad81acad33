"""What operators touch, checked by the tools that would refuse it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from stager.config import check_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFEST = DEPLOY / "kubernetes" / "stager.yaml"
UNIT = DEPLOY / "systemd" / "stager.service"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def script(name: str) -> str:
    """A console script of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def test_the_image_has_no_findings() -> None:
    """hadolint finds nothing in the Dockerfile."""
    done = run(script("hadolint"), "--failure-threshold", "info", str(DEPLOY / "Dockerfile"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_without_torch_and_without_root() -> None:
    """The base install goes into the image, under a user of its own."""
    text = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(re.match(r"torch\b", name) for name in project["dependencies"])
    assert "[torch" not in text and re.search(r"^USER 10001", text, re.MULTILINE)


def test_the_image_copies_what_the_build_needs() -> None:
    """Every path that the Dockerfile copies exists and is let through by .dockerignore."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY ([^-].*)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists() and name in allowed


def test_kubernetes_takes_the_manifest() -> None:
    """Every object passes the published schemas, strictly: no unknown field."""
    done = run(script("kubernetes-validate"), "--strict", str(MANIFEST))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sidecar_outlives_the_trainer_and_drains_in_time() -> None:
    """A native sidecar, with a drain that ends before the pod's grace period, and a configuration that stager takes."""
    config_map, job = yaml.safe_load_all(MANIFEST.read_text())
    pod = job["spec"]["template"]["spec"]
    [sidecar] = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    config = check_config(tomllib.loads(config_map["data"]["stager.toml"]), of="stager.toml")
    assert config.node.drain_timeout_s + 10 < pod["terminationGracePeriodSeconds"]
    mounts = {mount["mountPath"] for mount in sidecar["volumeMounts"] if not mount.get("readOnly")}
    for path in (config.node.cache, config.node.socket, *(section.watch for section in config.checkpoint)):
        assert any(path.startswith(mount + "/") for mount in mounts)


def systemd_analyze() -> str:
    """The tool's path. In CI a missing tool is a failure."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze is missing: .ci/run installs the package systemd")
        pytest.skip("systemd-analyze is not on this machine")
    return analyze


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd-analyze verifies the unit without a word, its program standing where the unit says."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/stager/bin/stager", "/bin/true"))
    done = run(systemd_analyze(), "verify", "--man=no", str(unit))
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert done.returncode == 0 and not complaints, done.stderr


def test_the_unit_is_hardened() -> None:
    """systemd's own measure of exposure, 0 to 100, stays low."""
    done = run(systemd_analyze(), "security", "--offline=true", "--no-pager", "--threshold=25", str(UNIT))
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_stops_it_as_late_as_it_drains() -> None:
    """The unit waits longer than the default drain, and does not restart what no restart mends."""
    text = UNIT.read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > 25
    assert re.search(r"RestartPreventExitStatus=10 11", text)
