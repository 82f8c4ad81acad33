"""A service that watches while a framework trains, and what must hold of what it committed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from stager.checkpoint.commit import list_manifests
from stager.checkpoint.restore import restore
from stager.clock import SystemClock
from stager.disk import LocalDisk
from stager.formats.commits import CheckpointManifest
from stager.journal import Journal
from stager.offload import InlineOffload, Offload, ThreadOffload
from stager.store.directory import DirectoryStore
from stager.transfer.tools import Tools
from tests.checkpoint.material import make_service, running

TRAINERS = Path(__file__).with_name("trainers.py")
RUN_S = 150
DRAIN_S = 100
DISK = LocalDisk()
GENERATION = re.compile(r"\.r[0-9]+$")


async def run_ranks(
    command: str,
    folder: Path,
    *,
    world: int = 1,
    arguments: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """A command of `trainers.py` in as many processes as there are ranks; the first failure fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    logs = folder.parent / f"{folder.name}-{command}"
    logs.mkdir()
    processes = []
    try:
        for rank in range(world):
            variables = {
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": str(TRAINERS.parents[2]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "DS_ACCELERATOR": "cpu",
                "JAX_PLATFORMS": "cpu",
                "CUDA_VISIBLE_DEVICES": "",
            }
            with open(logs / f"{command}-{rank}.log", "wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-W",
                    "ignore",
                    str(TRAINERS),
                    command,
                    str(folder),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                )
            processes.append(process)
        async with asyncio.timeout(RUN_S):
            codes = [await process.wait() for process in processes]
        told = "\n".join(log.read_text(errors="replace")[-5000:] for log in sorted(logs.iterdir()))
        assert not any(codes), f"{command}: {codes}\n{told}"
    finally:
        for process in processes:
            # Writers that a framework forked may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class Watched:
    """What came of it.

    Attributes:
        root: The test's folder; the trainer saved into ``root/watch``.
        manifests: Committed checkpoints by name.
    """

    def __init__(
        self, root: Path, store: DirectoryStore, manifests: Mapping[str, CheckpointManifest]
    ) -> None:
        self.root = root
        self.manifests = manifests
        self._store = store

    async def restored(self, name: str, *, target: Path | None = None) -> Path:
        """The checkpoint in a new directory, under its own name unless ``target`` says otherwise."""
        place = self.root / "restored" / name if target is None else target
        await restore(self._store, self.manifests[name], str(place), Tools(DISK, InlineOffload()))
        return place


async def watched(
    root: Path,
    command: str,
    *,
    world: int = 1,
    arguments: tuple[str, ...] = (),
    ranks: int | None = None,
    below: str = "",
    saved_over: int = 0,
) -> Watched:
    """Train by a command of `trainers.py` into ``root/watch`` (or ``below`` it) while a service watches.

    ``saved_over`` names are complete, and then saved into again in place, which may break the seal of what stood there.

    Nothing was accepted half-written: every checkpoint was committed once, no seal was found changed, and what is in the
    bucket is, byte for byte, what stands in the trainer's directory after its end, as far as that was not rotated away.
    """
    top = root / "watch"
    watch = top / below
    watch.mkdir(parents=True)
    threads = ThreadOffload(disk_threads=4, hash_threads=1)
    journal = Journal(":memory:", DISK)
    store = _bucket(root, threads)
    try:
        service = make_service(
            store, DISK, journal, SystemClock(), watch=str(watch), rescan_s=0.2, offload=threads, ranks=ranks,
            part_bytes=8 << 20, hints=True,
        )  # fmt: skip
        async with running(service):
            await run_ranks(command, top, world=world, arguments=arguments)
            async with asyncio.timeout(DRAIN_S):
                await service.drain()
        assert service.status()["discarded"] <= saved_over, (
            "a seal was taken while the trainer was still writing"
        )
        found = await list_manifests(store)
        manifests = {one.checkpoint: one for one in found if isinstance(one, CheckpointManifest)}
        assert len(found) == len(manifests)
        # Saved over, a name has several commits, and its newest is what stands there.
        newest = {GENERATION.sub("", name): name for name in manifests}
        for saved, name in newest.items():
            _compare(watch / saved, root / "bucket" / name, manifests[name])
        return Watched(root, _bucket(root, InlineOffload()), manifests)
    finally:
        threads.close()
        journal.close()


def _bucket(root: Path, offload: Offload) -> DirectoryStore:
    return DirectoryStore(str(root / "bucket"), disk=DISK, offload=offload, chance=random.Random(1))


def _compare(saved: Path, committed: Path, manifest: CheckpointManifest) -> None:
    if not saved.exists():
        return
    for entry in manifest.files:
        original = saved / entry.path if saved.is_dir() else saved
        assert original.read_bytes() == (committed / entry.path).read_bytes(), (
            f"{manifest.checkpoint}: {entry.path}"
        )
