"""A file system in memory that forgets, at a crash, what was not synced.

A file's bytes survive if the file was synced after they were written; a name survives if its directory was synced after
it appeared. What was not synced is decided by the seed, name by name and file by file: kept, lost, or torn. Making
a directory is durable at once, since journalling file systems commit it with the first sync below it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stager.disk import Buffer, FileStat, PinMethod, Usage
from stager.errors import LockHeld, OutOfSpace
from tests.sim.world import World


@dataclass
class Inode:
    number: int
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    mtime_ns: int = 0


class SimulatedDisk:
    """A `stager.disk.Disk` of one `World`."""

    def __init__(self, world: World, *, capacity_bytes: int = 1 << 40) -> None:
        self.world = world
        self.capacity_bytes = capacity_bytes
        self.live: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}
        self.directories: set[str] = {"/"}
        self.locks: set[str] = set()
        self._numbers = 0
        self._ticks = 0

    def crash(self) -> None:
        """Decide what the disk holds after the death of the machine, by the world's seed."""
        chance = self.world.random
        for path in sorted(self.live.keys() | self.durable.keys()):
            if self.live.get(path) is not self.durable.get(path) and chance.random() < 0.5:
                self._set(self.durable, path, self.live.get(path))
        self.live = dict(self.durable)
        for inode in {id(inode): inode for inode in self.live.values()}.values():
            if bytes(inode.live) != inode.durable:
                inode.live = bytearray(self._torn(inode))
            inode.durable = bytes(inode.live)
        self.durable = dict(self.live)
        self.locks.clear()

    def kill(self) -> None:
        """Only the process died: the kernel keeps all that was written."""
        self.locks.clear()

    def make_directory(self, path: str) -> None:
        self.world.step(f"mkdir {path}")
        while path not in self.directories:
            self.directories.add(path)
            path = os.path.dirname(path)

    def create(self, path: str, size: int = 0) -> None:
        self.world.step(f"create {path}")
        self._need_directory(path)
        inode = self.live.get(path)
        if inode is None:
            inode = self._new_inode()
            self.live[path] = inode
        del inode.live[:]
        self._grow(inode, size)
        self._touch(inode)

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        self.world.step(f"write {path}")
        inode = self._inode(path)
        end = offset + len(data)
        if end > len(inode.live):
            self._grow(inode, end)
        inode.live[offset:end] = data
        self._touch(inode)

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        self.world.step(f"read {path}")
        return bytes(self._inode(path).live[offset : offset + size])

    def truncate(self, path: str, size: int) -> None:
        self.world.step(f"truncate {path}")
        inode = self._inode(path)
        del inode.live[size:]
        self._grow(inode, size)
        self._touch(inode)

    def sync(self, path: str) -> None:
        self.world.step(f"sync {path}")
        if path in self.directories:
            for name in self.live.keys() | self.durable.keys():
                if os.path.dirname(name) == path:
                    self._set(self.durable, name, self.live.get(name))
            return
        inode = self._inode(path)
        inode.durable = bytes(inode.live)

    def publish(self, staged: str, final: str, *, durable: bool = True) -> None:
        if durable:
            self.sync(staged)
        self.world.step(f"rename {staged} {final}")
        self._need_directory(final)
        self.live[final] = self._inode(staged)
        del self.live[staged]
        if durable:
            self.sync(os.path.dirname(final))

    def publish_new(self, staged: str, final: str, *, durable: bool = True) -> None:
        if durable:
            self.sync(staged)
        self.world.step(f"link {staged} {final}")
        self._need_directory(final)
        if final in self.live or final in self.directories:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        self.live[final] = self._inode(staged)
        self.world.step(f"unlink {staged}")
        del self.live[staged]
        if durable:
            self.sync(os.path.dirname(final))

    def publish_tree(self, staged: str, final: str) -> None:
        if final in self.live or final in self.directories:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        self._need_directory(final)
        for path in self._below(staged):
            self.sync(path)
        for folder in sorted(self._folders_below(staged)):
            self.sync(folder)
        self.world.step(f"rename {staged} {final}")
        # The tree moves as a whole and at once: names below it are relative to its directory's inode.
        for names in (self.live, self.durable):
            for path in [name for name in names if name.startswith(staged + "/")]:
                names[final + path[len(staged) :]] = names.pop(path)
        moved = self._folders_below(staged)
        self.directories -= moved
        self.directories |= {final + folder[len(staged) :] for folder in moved}

    def write_file(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        staged = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp")
        self.create(staged)
        self.write_at(staged, 0, data)
        self.publish(staged, path, durable=durable)

    def pin(self, source: str, target: str) -> PinMethod:
        self.world.step(f"link {source} {target}")
        self._need_directory(target)
        if target in self.live:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self.live[target] = self._inode(source)
        return "link"

    def remove(self, path: str) -> None:
        self.world.step(f"unlink {path}")
        self.live.pop(path, None)

    def remove_empty_directory(self, path: str) -> bool:
        self.world.step(f"rmdir {path}")
        if self._below(path) or len(self._folders_below(path)) > 1:
            return False
        self.directories.discard(path)
        return True

    def remove_tree(self, path: str) -> None:
        for name in self._below(path):
            self.world.step(f"unlink {name}")
            self.live.pop(name, None)
        self.world.step(f"rmdir {path}")
        self.directories -= self._folders_below(path)

    def stat(self, path: str) -> FileStat:
        self.world.step(f"stat {path}")
        if path in self.directories:
            return FileStat(0, 0, 0, 1, True)
        return self._stat(self._inode(path))

    def list_names(self, path: str) -> list[str]:
        self.world.step(f"list {path}")
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        names = [*self.live, *self.directories]
        return sorted(
            os.path.basename(name) for name in names if name != path and os.path.dirname(name) == path
        )

    def walk(self, root: str) -> list[tuple[str, FileStat]]:
        self.world.step(f"walk {root}")
        if root not in self.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), root)
        return [(name[len(root) + 1 :], self._stat(self.live[name])) for name in self._below(root)]

    def resolve(self, path: str) -> str:
        return path

    def usage(self, path: str) -> Usage:
        self.world.step(f"statvfs {path}")
        return Usage(self.capacity_bytes, self.capacity_bytes - self.used_bytes())

    @contextmanager
    def lock(self, path: str, holder: str) -> Iterator[None]:
        self.world.step(f"lock {path}")
        if path in self.locks:
            raise LockHeld(f"`{path}` is held", subject=path)
        self.locks.add(path)
        try:
            yield
        finally:
            self.locks.discard(path)

    def used_bytes(self) -> int:
        return sum(len(inode.live) for inode in {id(inode): inode for inode in self.live.values()}.values())

    def _torn(self, inode: Inode) -> bytes:
        """What a crash leaves of unsynced bytes: the old, the new, or the new up to some place and zeros after."""
        choice = self.world.random.randrange(3)
        if choice == 0:
            return inode.durable
        if choice == 1:
            return bytes(inode.live)
        cut = self.world.random.randint(0, len(inode.live))
        return bytes(inode.live[:cut]) + bytes(len(inode.live) - cut)

    def _set(self, names: dict[str, Inode], path: str, inode: Inode | None) -> None:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode

    def _new_inode(self) -> Inode:
        self._numbers += 1
        return Inode(self._numbers)

    def _touch(self, inode: Inode) -> None:
        self._ticks += 1
        inode.mtime_ns = 1_800_000_000 * 10**9 + self._ticks

    def _grow(self, inode: Inode, size: int) -> None:
        more = size - len(inode.live)
        if more > 0:
            if self.used_bytes() + more > self.capacity_bytes:
                raise OutOfSpace(f"no space for {more} bytes", subject="simulated disk")
            inode.live.extend(bytes(more))

    def _inode(self, path: str) -> Inode:
        inode = self.live.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def _need_directory(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder not in self.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)

    def _below(self, root: str) -> list[str]:
        return sorted(name for name in self.live if name.startswith(root + "/"))

    def _folders_below(self, root: str) -> set[str]:
        return {name for name in self.directories if name == root or name.startswith(root + "/")}

    def _stat(self, inode: Inode) -> FileStat:
        links = sum(1 for other in self.live.values() if other is inode)
        return FileStat(len(inode.live), inode.mtime_ns, inode.number, links, False, inode.mtime_ns, 1)
