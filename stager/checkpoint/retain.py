"""Retention carried out: manifests go first. What goes, `stager.checkpoint.keep` has planned. Pins are objects as well."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from stager.checkpoint.commit import delete_all, read_manifest
from stager.checkpoint.keep import Retention
from stager.errors import FormatError, NotFound
from stager.formats.commits import (
    COMMIT_BYTES_MAX,
    CheckpointManifest,
    decode_checkpoint_manifest,
    encode_checkpoint_manifest,
)
from stager.formats.names import STAGER_FOLDER, join_key, manifest_key, node_part_key
from stager.logs import event
from stager.store.api import ObjectStore, read_all
from stager.transfer.retry import retried
from stager.transfer.tools import Tools

log = logging.getLogger("stager.retain")

DELETE_BATCH = 1000
RETIRED_NAME = "retired.json"
PINNED_NAME = "pinned.json"


async def carry_out(store: ObjectStore, plan: Sequence[Retention], tools: Tools) -> int:
    """Delete what the plan drops, oldest first; returns how many.

    A tombstone with the list of files stands while a checkpoint's objects are deleted, so that `finish_retirements` of a
    later life removes what a death left.
    """
    dropped = [retention for retention in plan if not retention.keep]
    for retention in dropped:
        manifest = retention.manifest
        key, raw = retired_key(manifest.checkpoint), encode_checkpoint_manifest(manifest)
        await retried(partial(store.put, key, raw), tools, doing=f"write {key}")
        await delete_all(store, [manifest_key(manifest.checkpoint)], tools)
        await _clear(store, manifest, tools)
        event(
            log, logging.INFO, "checkpoint.retired", checkpoint=manifest.checkpoint, reason=retention.reason
        )
    return len(dropped)


async def finish_retirements(store: ObjectStore, tools: Tools) -> int:
    """Remove what deaths during `carry_out` left; returns of how many checkpoints."""
    end = f"/{RETIRED_NAME}"
    keys = [info.key async for info in store.list_objects(f"{STAGER_FOLDER}/") if info.key.endswith(end)]
    finished = 0
    for key in keys:
        try:
            raw, _ = await read_all(store, key, bytes_max=COMMIT_BYTES_MAX)
            manifest = decode_checkpoint_manifest(raw, of=key)
        except NotFound:
            continue
        except FormatError as error:
            event(log, logging.WARNING, "tombstone.damaged", key=key, reason=error.message)
            continue
        if retired_key(manifest.checkpoint) != key:
            event(log, logging.WARNING, "tombstone.damaged", key=key, reason="it is of another checkpoint")
        elif await read_manifest(store, manifest.checkpoint) is not None:
            # It died before the checkpoint had ceased to exist: the next plan decides anew.
            await delete_all(store, [key], tools)
        else:
            await _clear(store, manifest, tools)
            finished += 1
    return finished


async def read_pins(store: ObjectStore) -> frozenset[str]:
    """Names of checkpoints that somebody has pinned in this tier."""
    start, end = f"{STAGER_FOLDER}/", f"/{PINNED_NAME}"
    return frozenset(
        [
            info.key.removeprefix(start).removesuffix(end)
            async for info in store.list_objects(start)
            if info.key.endswith(end)
        ]
    )


async def pin(store: ObjectStore, checkpoint: str, tools: Tools) -> None:
    """Keep a committed checkpoint whatever the rules say.

    Raises:
        NotFound: It is not committed here.
    """
    if await read_manifest(store, checkpoint) is None:
        raise NotFound(
            f"{store.properties.name} has no committed checkpoint `{checkpoint}`",
            subject=checkpoint,
            hint="`stager ls` lists what is committed",
        )
    key = pinned_key(checkpoint)
    await retried(lambda: store.put(key, b"{}"), tools, doing=f"write {key}")


async def unpin(store: ObjectStore, checkpoint: str, tools: Tools) -> None:
    """Leave a checkpoint to the rules again; one that is not pinned is fine."""
    await delete_all(store, [pinned_key(checkpoint)], tools)


def pinned_key(checkpoint: str) -> str:
    """Where a run keeps the pin of a checkpoint, relative to the run."""
    return join_key(STAGER_FOLDER, checkpoint, PINNED_NAME)


def retired_key(checkpoint: str) -> str:
    """Where a run keeps the tombstone of a checkpoint that is being deleted, relative to the run."""
    return join_key(STAGER_FOLDER, checkpoint, RETIRED_NAME)


async def _clear(store: ObjectStore, manifest: CheckpointManifest, tools: Tools) -> None:
    """Files, then parts, then the tombstone."""
    keys = [join_key(manifest.checkpoint, entry.path) for entry in manifest.files]
    for start in range(0, len(keys), DELETE_BATCH):
        await delete_all(store, keys[start : start + DELETE_BATCH], tools)
    parts = [node_part_key(manifest.checkpoint, node) for node in range(manifest.nodes)]
    await delete_all(store, parts, tools)
    await delete_all(store, [retired_key(manifest.checkpoint)], tools)
