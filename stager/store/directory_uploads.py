"""Uploads in parts, in a directory store: a folder of parts, put together inside the kernel at the end.

A part's name holds its number, checksum and size, so listing reads no part. Everything here blocks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from stager.checksum import combine_all
from stager.disk import Disk
from stager.errors import IntegrityError, NotFound
from stager.store.api import Buffer, PartTag
from stager.store.directory_objects import ObjectFolder, Side
from stager.store.directory_read import open_file

_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"part-(\d{5})-([0-9a-f]{16})-(\d{1,15})")
_UPLOAD_BYTES_MAX = 16 << 10


class UploadFolder:
    """The unfinished uploads of an `ObjectFolder`."""

    def __init__(self, objects: ObjectFolder, disk: Disk) -> None:
        self._objects = objects
        self._disk = disk

    def begin(self, upload_id: str, key: str, metadata: Mapping[str, str]) -> None:
        folder = self._folder(upload_id)
        self._disk.make_directory(folder)
        text = json.dumps({"key": key, "metadata": dict(metadata)}).encode()
        self._disk.write_file(os.path.join(folder, "upload.json"), text, durable=self._objects.durable)

    def check(self, upload_id: str, key: str) -> dict[str, str]:
        """The metadata of an upload of this key.

        Raises:
            NotFound: There is none.
        """
        described = self._describe(upload_id)
        if described is None or described[0] != key:
            raise NotFound(f"no upload `{upload_id[:64]}` of `{key}` in {self._objects.root}", subject=key)
        return described[1]

    def put_part(self, upload_id: str, key: str, tag: PartTag, body: Buffer, nonce: str) -> None:
        self.check(upload_id, key)
        folder = self._folder(upload_id)
        staged = os.path.join(folder, f"staged-{nonce}")
        final = os.path.join(folder, _part_name(tag))
        try:
            self._disk.create(staged)
            self._disk.write_at(staged, 0, body)
            self._disk.publish(staged, final, durable=self._objects.durable)
        except FileNotFoundError as error:  # aborted meanwhile
            raise NotFound(f"the upload `{upload_id}` of `{key}` is gone", subject=key) from error
        except BaseException:
            self._disk.remove(staged)
            raise
        for name in self._disk.list_names(folder):
            if name.startswith(f"part-{tag.number:05d}-") and name != os.path.basename(final):
                self._disk.remove(os.path.join(folder, name))

    def list_parts(self, upload_id: str, key: str) -> list[PartTag]:
        self.check(upload_id, key)
        newest: dict[int, tuple[int, PartTag]] = {}
        folder = self._folder(upload_id)
        for name in self._disk.list_names(folder):
            match = _PART.fullmatch(name)
            if match is None:
                continue
            tag = PartTag(int(match[1]), f"{match[2]}-{int(match[3])}", int(match[3]), int(match[2], 16))
            # A kill may have left a part beside the one that replaced it.
            mtime_ns = self._disk.stat(os.path.join(folder, name)).mtime_ns
            if tag.number not in newest or newest[tag.number][0] < mtime_ns:
                newest[tag.number] = (mtime_ns, tag)
        return [tag for _, (_, tag) in sorted(newest.items())]

    def assemble(
        self, upload_id: str, key: str, parts: Sequence[PartTag], staged: str, jitter_ns: int
    ) -> Side:
        """Put parts together under ``staged``; returns what the object's side file will say."""
        metadata = self.check(upload_id, key)
        paths = [self._part_path(upload_id, key, tag) for tag in parts]
        if [tag.number for tag in parts] != sorted({tag.number for tag in parts}):
            raise IntegrityError(f"`{key}`: the parts are not in order", subject=key)
        if len(paths) == 1:
            self._objects.stage_link(staged, paths[0])
        else:
            sources = []
            try:
                for path, tag in zip(paths, parts, strict=True):
                    descriptor, _ = open_file(path, key, self._objects.root)
                    sources.append((descriptor, tag.size))
                self._objects.stage_copy(staged, sources, jitter_ns)
            finally:
                for descriptor, _ in sources:
                    os.close(descriptor)
        known = [(tag.crc64nvme, tag.size) for tag in parts if tag.crc64nvme is not None]
        return Side(metadata, combine_all(known) if len(known) == len(parts) else None, upload_id)

    def forget(self, upload_id: str) -> None:
        self._disk.remove_tree(self._folder(upload_id))

    def list_all(self) -> list[tuple[str, str]]:
        """Every (key, upload id), by key."""
        try:
            names = self._disk.list_names(self._objects.hidden_path("uploads"))
        except FileNotFoundError:
            return []
        described = [(self._describe(name), name) for name in names]
        return sorted((found[0], name) for found, name in described if found is not None)

    def _describe(self, upload_id: str) -> tuple[str, dict[str, str]] | None:
        if not _UPLOAD_ID.fullmatch(upload_id):
            return None
        try:
            text = self._disk.read_at(
                os.path.join(self._folder(upload_id), "upload.json"), 0, _UPLOAD_BYTES_MAX
            )
            fields = json.loads(text)
            return str(fields["key"]), {str(name): str(value) for name, value in fields["metadata"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _folder(self, upload_id: str) -> str:
        return self._objects.hidden_path("uploads", upload_id)

    def _part_path(self, upload_id: str, key: str, tag: PartTag) -> str:
        path = os.path.join(self._folder(upload_id), _part_name(tag))
        try:
            held = self._disk.stat(path).size
        except FileNotFoundError:
            held = -1
        if held != tag.size or not _PART.fullmatch(os.path.basename(path)):
            raise IntegrityError(f"`{key}`: part {tag.number} is not what was uploaded", subject=key)
        return path


def _part_name(tag: PartTag) -> str:
    """``etag`` is ``<crc>-<size>``, checked by whoever reads the name back."""
    return f"part-{tag.number:05d}-{tag.etag}"
