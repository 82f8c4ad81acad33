"""A daemon of one's own: started for the node by whoever needs it first, and ended with its last client.

The first trainer starts a *keeper*, a process of its own session that runs ``stager run`` as its child. Every trainer
holds a connection to the keeper for as long as it lives, forked DataLoader workers included; the kernel closes it however
the trainer ends. When nobody has been connected for a few seconds the keeper stops the daemon and ends. Trainers that start
at the same moment agree by a lock on a file that the keeper holds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

from stager.client.api import Client
from stager.disk import LocalDisk
from stager.errors import ConfigError, Unavailable, UsageError

LINGER_S = 5.0
FIRST_CLIENT_S = 60.0
STOP_S = 40.0
POLL_S = 0.05
RESTARTS_MAX = 5
RESTART_PAUSE_S = 1.0
CACHE_SHARE = 0.8
LOG_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1
_HOPELESS = (UsageError.exit_code, ConfigError.exit_code)

# The connections of this process, by directory: held until it ends, and over fork.
_held: dict[str, socket.socket] = {}


@dataclass(frozen=True, slots=True)
class PrivateFiles:
    """Where the keeper of one cache, of one user, has its sockets; short, for a socket's path has 107 bytes."""

    directory: str

    @property
    def socket(self) -> str:
        return os.path.join(self.directory, "stager.sock")

    @property
    def keeper(self) -> str:
        return os.path.join(self.directory, "keeper.sock")

    @property
    def lock(self) -> str:
        return os.path.join(self.directory, "keeper.lock")

    @property
    def config(self) -> str:
        return os.path.join(self.directory, "stager.toml")

    @property
    def log(self) -> str:
        return os.path.join(self.directory, "daemon.log")


def private_files(cache: str) -> PrivateFiles:
    """Those of the cache at ``cache``."""
    name = hashlib.sha256(os.path.realpath(cache).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return PrivateFiles(os.path.join(tempfile.gettempdir(), f"stager-{os.geteuid()}-{name}"))


def start_private_daemon(cache: str, cache_bytes: int | str | None, wait_s: float) -> str:
    """The socket of a private daemon over ``cache``, started if nobody has; it lives at least as long as this process.

    Args:
        cache: Directory of the node's cache; made if missing.
        cache_bytes: Its bound, as in the configuration; None takes four fifths of what is free there. What the first trainer
            on the node says holds for all.
        wait_s: How long to wait for the daemon.

    Raises:
        Unavailable: It did not start in time; the end of its log is in the message.
        ConfigError: Somebody else's files are in the way.
    """
    cache = os.path.abspath(cache)
    files = private_files(cache)
    _make_private_directory(files.directory)
    end = time.monotonic() + wait_s
    if files.directory not in _held:
        LocalDisk().make_directory(cache)
        _held[files.directory] = _connect(files, cache, cache_bytes, end, wait_s)
    while not Client(files.socket).live():
        if _is_closed(_held[files.directory]):
            _held.pop(files.directory).close()
            raise _not_started(files, "ended at once")
        if time.monotonic() > end:
            raise _not_started(files, f"did not answer within {wait_s:.0f} s")
        time.sleep(POLL_S)
    return files.socket


def release_private_daemons() -> None:
    """Give up this process's connections; the daemons end if nobody else holds one."""
    while _held:
        _held.popitem()[1].close()


def _connect(
    files: PrivateFiles, cache: str, cache_bytes: int | str | None, end: float, wait_s: float
) -> socket.socket:
    started_s: float | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(files.keeper)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return connection
        now = time.monotonic()
        if now > end:
            raise _not_started(files, f"could not be started within {wait_s:.0f} s")
        # A keeper that ends, by what another one left behind, is started again after a while.
        if started_s is None or now - started_s > LINGER_S:
            started_s = now
            _start_keeper(files, cache, cache_bytes)
        time.sleep(POLL_S)


def _start_keeper(files: PrivateFiles, cache: str, cache_bytes: int | str | None) -> None:
    bound = _default_bytes(cache) if cache_bytes is None else cache_bytes
    settings = {"cache": cache, "cache_bytes": bound, "socket": files.socket}
    # The process that is started forks the keeper off and ends, so that no trainer has a child to wait for.
    with open(files.log, "ab") as log:
        subprocess.run(
            [sys.executable, "-m", "stager.client.private", files.directory, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
            timeout=FIRST_CLIENT_S,
        )


def _default_bytes(cache: str) -> int:
    status = os.statvfs(cache)
    used = sum(
        entry.stat(follow_symlinks=False).st_size
        for folder, _, _ in os.walk(cache)
        for entry in os.scandir(folder)
        if entry.is_file(follow_symlinks=False)
    )
    return int((status.f_bavail * status.f_frsize + used) * CACHE_SHARE)


def _make_private_directory(path: str) -> None:
    """A directory that only this user may enter; one of somebody else's, or a link, is refused."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"`{path}` is not a directory of this user alone",
            subject=path,
            hint="remove it, or set TMPDIR to a directory of your own",
        )


def _is_closed(connection: socket.socket) -> bool:
    """Whether the keeper is gone: it never sends anything."""
    return bool(select.select([connection], [], [], 0)[0])


def _not_started(files: PrivateFiles, what: str) -> Unavailable:
    try:
        with open(files.log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES, 0))
            tail = file.read().decode("utf-8", "replace").strip()
    except OSError:
        tail = "it left no log"
    return Unavailable(
        f"the private daemon {what}; its log `{files.log}` ends with:\n{tail}",
        subject=files.log,
        hint="the configuration comes from AWS_* and STAGER_* variables; `stager run` by hand shows more",
    )


class Keeper:
    """Runs one daemon while clients are connected."""

    def __init__(self, files: PrivateFiles) -> None:
        self._files = files
        self._clients: list[socket.socket] = []
        self._daemon: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Until the last client has gone, or the daemon cannot be kept."""
        LocalDisk().remove(self._files.keeper)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self._files.keeper)
            listener.listen(128)
            try:
                self._keep(listener)
            finally:
                # Before the daemon is gone: whoever comes now starts a keeper, which waits for the lock.
                LocalDisk().remove(self._files.keeper)
                self._stop()

    def _keep(self, listener: socket.socket) -> None:
        restarts = 0
        lonely_at = time.monotonic() + FIRST_CLIENT_S
        while self._clients or time.monotonic() < lonely_at:
            if self._daemon is None or self._daemon.poll() is not None:
                if self._daemon is not None:
                    if restarts == RESTARTS_MAX or self._daemon.returncode in _HOPELESS:
                        return
                    restarts += 1
                    time.sleep(RESTART_PAUSE_S)
                self._daemon = self._start()
            readable, _, _ = select.select([listener, *self._clients], [], [], 0.2)
            for ready in readable:
                if ready is listener:
                    self._clients.append(listener.accept()[0])
                else:
                    # Clients send nothing: what can be read is the end.
                    ready.close()
                    self._clients.remove(ready)
                    lonely_at = time.monotonic() + LINGER_S

    def _start(self) -> subprocess.Popen[bytes]:
        # What the environment says of a node's cache and socket is meant for another daemon than this one.
        inherited = os.environ  # noqa: TID251  # the daemon gets what its trainer has: endpoints and credentials
        environment = {
            name: value for name, value in inherited.items() if not name.startswith("STAGER_NODE__")
        }
        return subprocess.Popen(
            [sys.executable, "-m", "stager", "run", "--config", self._files.config],
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=_die_with_keeper,
        )

    def _stop(self) -> None:
        if self._daemon is None or self._daemon.poll() is not None:
            return
        self._daemon.send_signal(signal.SIGTERM)
        try:
            self._daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()


def _die_with_keeper() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _write_config(files: PrivateFiles, settings: dict[str, int | str]) -> None:
    # A JSON string is a TOML string as well.
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    LocalDisk().write_file(files.config, ("[node]\n" + "\n".join(lines) + "\n").encode(), durable=False)


def main(arguments: list[str]) -> None:
    """Become the keeper of a directory, unless there is one."""
    files, settings = PrivateFiles(arguments[0]), json.loads(arguments[1])
    if os.fork():
        return
    os.setsid()
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + STOP_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Another keeper: one that serves makes us superfluous, one that is ending makes us wait.
            if os.path.exists(files.keeper) or time.monotonic() > end:
                return
            time.sleep(POLL_S)
    _write_config(files, settings)
    Keeper(files).run()


if __name__ == "__main__":
    main(sys.argv[1:])
