"""Listing a directory store in the order of keys, one folder at a time."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from stager.errors import FormatError
from stager.formats.names import check_relative_path
from stager.logs import event
from stager.store.api import ObjectInfo
from stager.store.directory_objects import HIDDEN_FOLDER, version_of
from stager.store.directory_read import read_failure

_logger = logging.getLogger("stager.store")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder still to be looked into; its path relative to the root ends in ``/``, and the root's is empty."""

    path: str


def plan_folders(prefix: str) -> list[Folder | ObjectInfo]:
    """Where to start: the folder that holds every key with this prefix; nowhere if no key can have it."""
    folder = prefix[: prefix.rfind("/") + 1]
    if folder:
        try:
            check_relative_path(folder[:-1], of="prefix")
        except FormatError:
            return []
    return [Folder(folder)]


def list_folder(root: str, folder: Folder, *, prefix: str, after: str) -> Sequence[Folder | ObjectInfo]:
    """What a folder holds that can matter to this listing, in the order of UTF-8 keys."""
    try:
        with os.scandir(os.path.join(root, folder.path)) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_failure(error, folder.path or "/", root) from error
    names = sorted((_sort_key(name, is_folder), name, is_folder) for name, is_folder in found)
    listed: list[Folder | ObjectInfo] = []
    for _, name, is_folder in names:
        key = folder.path + name
        if name == HIDDEN_FOLDER or not _is_usable(key):
            continue
        if is_folder:
            if _may_hold(key + "/", prefix, after):
                listed.append(Folder(key + "/"))
        elif key.startswith(prefix) and key.encode() > after.encode():
            info = _describe(root, key)
            if info is not None:
                listed.append(info)
    return listed


def _sort_key(name: str, is_folder: bool) -> bytes:
    return os.fsencode(name) + (b"/" if is_folder else b"")


def _may_hold(folder: str, prefix: str, after: str) -> bool:
    if not (folder.startswith(prefix) or prefix.startswith(folder)):
        return False
    # Every key below sorts before `after` if the folder does, unless `after` itself lies below it.
    return folder.encode() > after.encode() or after.startswith(folder)


def _describe(root: str, key: str) -> ObjectInfo | None:
    try:
        status = os.stat(os.path.join(root, key))
    except OSError:  # it vanished, or is a link that leads nowhere
        return None
    return ObjectInfo(key, status.st_size, version_of(status)) if stat.S_ISREG(status.st_mode) else None


def _is_usable(key: str) -> bool:
    try:
        check_relative_path(key, of="key")
    except FormatError as error:
        event(_logger, logging.WARNING, "store.key_left_out", key=repr(key[:120]), reason=error.message)
        return False
    return True
