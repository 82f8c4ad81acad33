"""Deleting many keys: in batches where the server takes them, one by one where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stager.errors import IntegrityError, NotFound, NotSupported, StagerError, StoreError, Unavailable
from stager.store.s3_errors import translate_answer
from stager.store.s3_pages import Caller

ONE_BY_ONE_WIDTH = 16


async def delete_objects(
    store: Caller, name: str, keys: Sequence[str], *, batch_max: int
) -> Mapping[str, StagerError]:
    """Delete each key; returns those that could not be, with the reason.

    Raises:
        StagerError: Nothing can be deleted, for a reason that is no key's: the credentials, the network.
    """
    failures: dict[str, StagerError] = {}
    step = batch_max if batch_max > 1 else len(keys) or 1
    for start in range(0, len(keys), step):
        batch = keys[start : start + step]
        if batch_max > 1 and len(batch) > 1:
            try:
                failures.update(await _batch(store, name, batch))
                continue
            except StagerError as error:
                if not _refuses_batches(error):
                    raise
        failures.update(await _one_by_one(store, batch))
    return failures


async def _batch(store: Caller, name: str, keys: Sequence[str]) -> dict[str, StagerError]:
    # Not quiet: a key is deleted when the server says so, not when it says nothing.
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": False}
    response = await store.call("delete_objects", keys[0], Delete=wanted)
    settled = {str(deleted.get("Key", "")) for deleted in response.get("Deleted", [])}
    failures: dict[str, StagerError] = {}
    for error in response.get("Errors", []):
        key = str(error.get("Key", ""))
        what = f"cannot delete `{key}` in {name}"
        failure = translate_answer(error, 0, {}, what=what, subject=key, store=name)
        settled.add(key)
        if not isinstance(failure, NotFound):
            failures[key] = failure
    for key in keys:
        if key not in settled:
            failures[key] = Unavailable(f"{name} does not say whether `{key}` was deleted", subject=key)
    return failures


async def _one_by_one(store: Caller, keys: Sequence[str]) -> dict[str, StagerError]:
    failures: dict[str, StagerError] = {}
    width = asyncio.Semaphore(ONE_BY_ONE_WIDTH)

    async def delete(key: str) -> None:
        async with width:
            try:
                await store.call("delete_object", key, Key=key)
            except NotFound as error:
                if error.subject != key or error.hint:  # the bucket is missing, not the key
                    failures[key] = error
            except StagerError as error:
                failures[key] = error

    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(delete(key))
    return failures


def _refuses_batches(error: StagerError) -> bool:
    """Whether a batch was refused for what it is (an unknown verb, a checksum it wants), so that single keys may pass."""
    return isinstance(error, NotSupported | IntegrityError) or type(error) is StoreError
