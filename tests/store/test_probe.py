"""The probe finds what each store honours, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import pytest

from stager.errors import StagerError, Unavailable
from stager.store.api import OVERWRITE, Buffer, ObjectStore, ObjectVersion, PutMode
from stager.store.memory import MemoryStore
from stager.store.probe import Capabilities, probe

ALL = Capabilities(True, True, True, True, True, True, race_winners=1)
EXPECTED = {
    "memory": ALL,
    # Of a body whose checksum was not given, a directory keeps none; what it is given it checks and keeps.
    "directory": ALL,
    # Takes any checksum; its profile sends none.
    "moto": dataclasses.replace(ALL, checksum_checked=False, checksum_kept=False),
    "seaweedfs": ALL,
    # Ceph 16 ignores the condition of a completion, and neither checks nor keeps checksums.
    "ceph": dataclasses.replace(ALL, create_only_complete=False, checksum_checked=False, checksum_kept=False),
}


async def test_what_is_found(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    """By experiment, as known of each server; afterwards there is nothing."""
    await store.put("neighbour", b"x")
    found = await probe(store, random.Random(1))
    name = request.node.callspec.id
    if name in EXPECTED:
        assert found == EXPECTED[name]
    assert [info.key async for info in store.list_objects()] == ["neighbour"]
    assert [upload async for upload in store.list_uploads()] == []


class Careless(MemoryStore):
    """Ignores conditions, as some servers do in silence."""

    async def put(
        self,
        key: str,
        body: Buffer,
        *,
        mode: PutMode = OVERWRITE,
        metadata: Mapping[str, str] | None = None,
        crc64nvme: int | None = None,
    ) -> ObjectVersion:
        return await super().put(key, body, metadata=metadata)


async def test_ignored_conditions_are_seen() -> None:
    """A server that says yes to everything is found out."""
    found = await probe(Careless(), random.Random(1))
    assert not found.create_only and not found.create_only_atomic and not found.replace
    assert not found.checksum_checked
    assert found.race_winners == 12


async def test_a_store_that_cannot_be_used() -> None:
    """The probe fails with the store's own reason, rather than with a verdict about capabilities."""

    class Down(MemoryStore):
        async def put(self, *_: object, **__: object) -> ObjectVersion:
            raise Unavailable("no route to the store")

    with pytest.raises(StagerError, match="no route"):
        await probe(Down(), random.Random(1))
