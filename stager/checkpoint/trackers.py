"""Trackers: files beside a checkpoint, such as `latest`, by which a framework's resume code finds it."""

from __future__ import annotations

import logging
import os

from stager.disk import Disk
from stager.formats.commits import CheckpointManifest
from stager.formats.layouts.api import CopyOf
from stager.formats.layouts.detection import trackers_of
from stager.logs import event

log = logging.getLogger("stager.restore")


def write_trackers(disk: Disk, manifest: CheckpointManifest, source: str, target: str) -> None:
    """Point the framework's trackers beside ``target`` at it; they are replaced if they are there. Blocking.

    Called before ``target`` appears: after a crash in between, the restore is repeated and all is well, whereas a checkpoint
    without its tracker would be found in place by the next restore, and by no framework.

    Args:
        disk: Where both lie.
        manifest: What is being restored.
        source: Where its files are whole.
        target: Where they will be.
    """
    folder, name = os.path.split(target)
    paths = [entry.path for entry in manifest.files]
    for tracker, content in trackers_of(manifest.layout, name, manifest.step, paths).items():
        if isinstance(content, CopyOf):
            path = f"{source}/{content.path}"
            content = disk.read_at(path, 0, disk.stat(path).size)
        disk.write_file(f"{folder}/{tracker}", content)
        event(log, logging.INFO, "tracker.written", tracker=tracker, checkpoint=manifest.checkpoint)
