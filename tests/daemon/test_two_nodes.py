"""Two nodes, one run in a real bucket: a checkpoint is there when both have sent their part of it, and not before."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from s3_server import S3Endpoint
from stager import commit
from tests.daemon.process import DaemonProcess, daemon, json_of, stager
from tests.servers.choice import BUCKET

RUN = f"s3://{BUCKET}/runs/two-nodes"


def listed(running: DaemonProcess) -> list[Any]:
    found: list[Any] = json_of(stager("ls", RUN, "--json", environment=running.environment))["checkpoints"]
    return found


def states(running: DaemonProcess) -> list[str]:
    return [found["state"] for found in running.status()["checkpoints"][0]["checkpoints"]]


def test_the_last_part_makes_the_checkpoint(tmp_path: Path, seaweedfs: S3Endpoint) -> None:
    """Node 1 saves first and waits; with node 0's part the checkpoint is listed, and restores with the files of both."""
    bodies = {f"shard-{node}.bin": random.Random(node).randbytes(300_000) for node in (0, 1)}
    with ExitStack() as stack:
        nodes = []
        for node in (0, 1):
            folder = tmp_path / f"node-{node}"
            folder.mkdir()
            config = (
                f'cache_bytes = "10MB"\nnode_index = {node}\nnode_count = 2\ndrain_timeout_s = 1\n'
                f'[[checkpoint]]\nwatch = "{folder}/saves"\nrun = "{RUN}"\nrescan_s = 0.2\n'
            )
            nodes.append(stack.enter_context(daemon(folder, seaweedfs.environment(), config)))
            nodes[node].start_ready()
        for node in (1, 0):
            checkpoint = tmp_path / f"node-{node}" / "saves" / "step-10"
            checkpoint.mkdir(parents=True)
            (checkpoint / f"shard-{node}.bin").write_bytes(bodies[f"shard-{node}.bin"])
            commit(checkpoint, step=10, socket=nodes[node].socket)
            if node == 1:
                nodes[1].wait_until(lambda: states(nodes[1]) == ["published"], "node 1's part")
                assert listed(nodes[1]) == []
                # It can do no more, and says so.
                assert nodes[1].stop() == 3
                nodes[1].start_ready()
        nodes[0].wait_until(lambda: len(listed(nodes[0])) == 1, "the commit")
        nodes[1].wait_until(lambda: states(nodes[1]) == ["committed"], "node 1 to see it")
        assert [running.stop() for running in nodes] == [0, 0]
        target = tmp_path / "restored"
        done = stager("restore", RUN, str(target), environment=nodes[0].environment)
        assert done.returncode == 0, done.stderr
    for name, body in bodies.items():
        assert (target / name).read_bytes() == body
