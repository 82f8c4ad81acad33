"""The servers of `bench/moving.py`: SeaweedFS, nginx over plain files, and Ceph's gateway where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moving_cases import BUCKET

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from s3_server import (  # noqa: E402
    ACCESS_KEY,
    SECRET_KEY,
    S3Endpoint,
    SeaweedServer,
    ServerProcess,
    free_ports,
)
from tests.servers.ceph import CephServer, missing_programs  # noqa: E402
from tests.servers.choice import make_bucket  # noqa: E402

_NGINX_PROGRAM = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")

_NGINX = """
worker_processes 2;
{user}
pid {folder}/nginx.pid;
daemon off;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_requests 100000;
  client_body_temp_path {folder}/temp;
  proxy_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/temp;
  uwsgi_temp_path {folder}/temp;
  scgi_temp_path {folder}/temp;
  default_type application/octet-stream;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Endpoint]:
    server = SeaweedServer(folder, buckets=[BUCKET])
    try:
        yield server.endpoint
    finally:
        server.kill()


@contextmanager
def nginx(folder: Path) -> Iterator[S3Endpoint]:
    """Serves ``folder/root``: a store that only gives, and as fast as the kernel sends files."""
    if _NGINX_PROGRAM is None:
        raise FileNotFoundError("nginx is not installed")
    (port,) = free_ports(1)
    (folder / "root" / BUCKET).mkdir(parents=True)
    config = folder / "nginx.conf"
    config.write_text(
        _NGINX.format(
            user="user root;" if os.getuid() == 0 else "", folder=folder, port=port, root=folder / "root"
        )
    )
    server = ServerProcess([_NGINX_PROGRAM, "-c", str(config), "-p", str(folder)], folder / "log")
    try:
        server.wait_until(lambda: _answers(port))
        yield S3Endpoint("nginx", f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
    finally:
        server.kill()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def ceph(_: Path) -> Iterator[S3Endpoint]:
    """A gateway that keeps no checksums; its objects lie in memory."""
    server = CephServer()
    try:
        make_bucket(server.endpoint, BUCKET)
        yield server.endpoint
    finally:
        server.kill()


SERVERS = {"seaweedfs": seaweedfs, "nginx": nginx, "ceph": ceph}


def missing(server: str) -> str:
    """Why this server cannot be started here, or nothing."""
    if server == "ceph" and missing_programs():
        return f"{', '.join(missing_programs())} not installed"
    if server == "nginx" and not _NGINX_PROGRAM:
        return "nginx not installed"
    return ""
