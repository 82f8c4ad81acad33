"""Which file systems may be mapped into memory: a page that a network file system cannot bring kills the process."""

from __future__ import annotations

import os
import re
from functools import cache

_LOCAL = frozenset(
    [
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "nilfs2",
        "overlay",
        "ramfs",
        "reiserfs",
        "squashfs",
        "erofs",
        "tmpfs",
        "xfs",
        "zfs",
        "iso9660",
    ]
)

_OCTAL = re.compile(r"\\([0-7]{3})")


def may_map(path: str) -> bool:
    """Whether ``path`` lies on a file system of this machine's own disks or memory; False where that is unclear."""
    return _kind_of(os.path.dirname(os.path.realpath(path))) in _LOCAL


@cache
def _kind_of(directory: str) -> str:
    """The type of the file system that holds ``directory``, as the kernel names it, or an empty string."""
    best, kind = "", ""
    for mount_point, mounted in _mounts():
        below = directory == mount_point or directory.startswith(mount_point.rstrip("/") + "/")
        # Of two mounts on one point the later one is seen.
        if below and len(mount_point) >= len(best):
            best, kind = mount_point, mounted
    return kind


def _mounts() -> list[tuple[str, str]]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # Source: proc_pid_mountinfo(5). Optional fields end at a lone hyphen; blanks in paths are octal escapes.
        left, _, right = line.partition(" - ")
        if len(left.split(" ")) > 4 and right:
            point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), left.split(" ")[4])
            found.append((point, right.split(" ")[0]))
    return found
