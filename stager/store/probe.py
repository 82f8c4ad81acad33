"""What a store honours, found by experiment. Headers that a server does not know it ignores in silence, so none is believed.

About 25 small requests below a prefix of its own, all of it removed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from dataclasses import dataclass

from stager.checksum import crc64nvme
from stager.errors import (
    AlreadyExists,
    IntegrityError,
    NotSupported,
    PreconditionFailed,
    StagerError,
    StoreError,
)
from stager.store.api import CREATE, ObjectStore, Replace

RACERS = 12
PROBE_PREFIX = ".stager-probe"
PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What was seen to work.

    Attributes:
        create_only: A create-only put over an object is refused.
        create_only_atomic: Of `RACERS` create-only puts at once exactly one won; on this rests who commits a checkpoint.
        create_only_complete: Completing an upload create-only over an object is refused.
        replace: A conditional put is refused over another version, and accepted over the named one.
        checksum_checked: A body that does not have its checksum is refused.
        checksum_kept: The checksum comes back with `head`.
        race_winners: How many of the racers were told that they won.
    """

    create_only: bool
    create_only_atomic: bool
    create_only_complete: bool
    replace: bool
    checksum_checked: bool
    checksum_kept: bool
    race_winners: int


async def probe(store: ObjectStore, chance: random.Random, *, prefix: str = PROBE_PREFIX) -> Capabilities:
    """Try a store out.

    Raises:
        StagerError: It cannot be used at all: no bucket, no right to write, no network.
        TimeoutError: It took longer than `PROBE_TIMEOUT_S`.
    """
    folder = f"{prefix}/{chance.getrandbits(64):016x}"
    keys = [f"{folder}/{name}" for name in ("plain", "race", "upload", "checksum")]
    plain, race, upload, checksum = keys
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        try:
            await store.put(plain, b"first")
            create_only = await _refused(store.put(plain, b"second", mode=CREATE))
            winners = await _race(store, race)
            return Capabilities(
                create_only=create_only,
                create_only_atomic=create_only and winners == 1,
                create_only_complete=await _complete_is_refused(store, upload),
                replace=await _replaces(store, plain),
                checksum_checked=await _refused(
                    store.put(checksum, b"body", crc64nvme=crc64nvme(b"another"))
                ),
                checksum_kept=await _keeps_checksum(store, checksum),
                race_winners=winners,
            )
        finally:
            with contextlib.suppress(StagerError):  # what went wrong before matters more
                await store.delete(keys)


async def _refused(write: Awaitable[object]) -> bool:
    """Whether a write that must not succeed was refused for the right reason."""
    try:
        await write
    except (AlreadyExists, PreconditionFailed, IntegrityError):
        return True
    except StoreError as error:
        if type(error) is not StoreError and not isinstance(error, NotSupported):
            raise
    return False


async def _race(store: ObjectStore, key: str) -> int:
    async def write(number: int) -> bool:
        try:
            await store.put(key, f"racer {number}".encode(), mode=CREATE)
        except (StoreError, IntegrityError):  # losing is the rule, and a broken answer wins nothing
            return False
        return True

    async with asyncio.TaskGroup() as group:
        racers = [group.create_task(write(number)) for number in range(RACERS)]
    return sum(racer.result() for racer in racers)


async def _complete_is_refused(store: ObjectStore, key: str) -> bool:
    await store.put(key, b"there first")
    upload_id = await store.begin_upload(key)
    try:
        tag = await store.put_part(key, upload_id, 1, b"came later")
        return await _refused(store.complete_upload(key, upload_id, [tag], mode=CREATE))
    finally:
        await store.abort_upload(key, upload_id)


async def _replaces(store: ObjectStore, key: str) -> bool:
    old = (await store.head(key)).version
    try:
        await store.put(key, b"replaced", mode=Replace(old))
    except StagerError as error:
        if not isinstance(error, NotSupported | PreconditionFailed) and type(error) is not StoreError:
            raise
        return False
    return await _refused(store.put(key, b"too late", mode=Replace(old)))


async def _keeps_checksum(store: ObjectStore, key: str) -> bool:
    await store.put(key, b"body", crc64nvme=crc64nvme(b"body"))
    return (await store.head(key)).crc64nvme == crc64nvme(b"body")
