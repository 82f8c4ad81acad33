"""`stager index`: a manifest for shards that something else packed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from stager.cli.output import command, console, print_json

if TYPE_CHECKING:
    from stager.cli.session import Session
    from stager.pack.adopt import Adopted
    from stager.store.api import ObjectStore


def register(app: typer.Typer) -> None:
    app.command("index")(index)


@command
def index(
    url: Annotated[str, typer.Argument(metavar="URL|DIR", help="Where the .tar files lie.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a manifest that is there.")] = False,
    config: Annotated[
        str,
        typer.Option("--config", "-c", metavar="FILE", help="How buckets are reached: its store section."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Read WebDataset shards once and write the manifest by which stager stages, reads and verifies them."""
    from stager.cli.byte_progress import byte_progress
    from stager.cli.session import run_in_session
    from stager.pack.adopt import adopt_shards, find_shards

    async def work(session: Session) -> Adopted:
        store = await session.open(url)
        if not overwrite:
            await _refuse_present(store)
        shards, other = await find_shards(store)
        with byte_progress("indexing", sum(info.size for info in shards)) as progress:
            adopted = await adopt_shards(
                store, shards, other=other, offload=session.tools.offload, seen=progress.advance
            )
        await _write(adopted, session, url)
        return adopted

    adopted = run_in_session(work, config=config)
    manifest = adopted.manifest
    if as_json:
        print_json(
            {
                "dataset": url,
                "fingerprint": manifest.fingerprint,
                "shards": len(manifest.shards),
                "samples": manifest.samples,
                "bytes": manifest.size,
                "fields": list(manifest.fields),
                "other_objects": adopted.other,
                "notes": list(adopted.notes),
            }
        )
        return
    out = console()
    for note in adopted.notes:
        out.print(f"note: {note}", markup=False)
    out.print(
        f"{url}: indexed {len(manifest.shards)} shards, {manifest.samples} samples, fingerprint {manifest.fingerprint}",
        markup=False,
    )


async def _refuse_present(store: ObjectStore) -> None:
    from stager.errors import NotFound, UsageError
    from stager.formats.manifest import MANIFEST_NAME

    try:
        await store.head(MANIFEST_NAME)
    except NotFound:
        return
    raise UsageError(
        f"{store.properties.name} has a {MANIFEST_NAME} already",
        subject=store.properties.name,
        hint="`stager verify` checks it; --overwrite replaces it",
    )


async def _write(adopted: Adopted, session: Session, url: str) -> None:
    from stager.formats.manifest import MANIFEST_NAME, encode_dataset_manifest
    from stager.pack.destination import BucketDestination, Destination, LocalDestination
    from stager.store.registry import parse_url

    parsed = parse_url(url, base=os.getcwd())
    offload = session.tools.offload
    destination: Destination
    if parsed.scheme == "file":
        # A plain file, without the side files by which a store in a directory keeps checksums.
        destination = LocalDestination(parsed.bucket, disk=session.tools.disk, offload=offload)
    else:
        destination = BucketDestination(await session.open(url), offload=offload)
    await destination.write(MANIFEST_NAME, encode_dataset_manifest(adopted.manifest))
