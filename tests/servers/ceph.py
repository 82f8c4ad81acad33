"""Ceph's RADOS gateway with one monitor and one OSD in memory, from Debian's packages, without systemd or root rights.

Facts that were tried and found: radosgw's ``ms_mon_client_mode = secure`` cannot join a cluster without cephx;
``paxos_propose_interval = 0.05`` takes the start from 12 s to under 2; ``tcp_nodelay=1`` saves a round trip per GET; one
start in about 40 fails, so a second is tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from s3_server import S3Endpoint, ServerFailed, ServerProcess, free_ports, http_body

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY = "cephaccess"
SECRET_KEY = "ceph-secret-for-loopback"

_CONFIGURATION = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = false
run_dir = {root}
log_file = {root}/$name.log
crash_dir = {root}
keyring = {root}/keyring
pid_file =
admin_socket =
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_warn = 1
mon_data_avail_crit = 1
osd_max_object_name_len = 460
osd_max_object_namespace_len = 64
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
ms_async_op_threads = 2
[mon]
mon_data = {root}/mon
mon_cluster_log_file = {root}/cluster.log
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
mon_osd_min_up_ratio = 0
[osd]
osd_data = {root}/osd
osd_class_load_list = *
osd_class_default_list = *
[client]
ms_mon_client_mode = crc
client_mount_timeout = 30
[client.rgw.a]
rgw_data = {root}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_thread_pool_size = 64
rgw_run_sync_thread = false
rgw_enable_usage_log = false
rgw_enable_ops_log = false
rgw_gc_obj_min_wait = 10
rgw_gc_processor_period = 10
"""


def missing_programs() -> list[str]:
    """What of Ceph is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class CephServer:
    """One monitor, one OSD and one gateway, each a child in the foreground."""

    def __init__(self) -> None:
        failures = []
        for _ in range(2):
            try:
                self._start()
                return
            except (ServerFailed, subprocess.SubprocessError) as error:
                self.kill()
                failures.append(str(error))
        raise ServerFailed("Ceph did not start:\n" + "\n".join(failures))

    def kill(self) -> None:
        for process in reversed(self._processes):
            process.kill()
        self._folder.cleanup()

    def _start(self) -> None:
        self._processes: list[ServerProcess] = []
        # Unix sockets have names of at most 107 bytes, so this is not below pytest's folder.
        self._folder = tempfile.TemporaryDirectory(prefix="ceph-", ignore_cleanup_errors=True)
        root = self._root = Path(self._folder.name)
        for name in ("mon", "osd", "rgw"):
            (root / name).mkdir()
        port, mon_v2, mon_v1 = free_ports(3)
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        self._configuration = root / "ceph.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(root=root, fsid=fsid, port=port, mon_v2=mon_v2, mon_v1=mon_v1)
        )
        keyring, monmap = str(root / "keyring"), str(root / "monmap")
        self._call(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        address = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
        self._call("monmaptool", "--create", "--clobber", "--addv", "a", address, "--fsid", fsid, monmap)
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        monitor = self._spawn("ceph-mon", "-f", "-i", "a")
        monitor.wait_until(
            lambda: self._succeeds("ceph", "--connect-timeout", "10", "osd", "new", osd, "0"), 40
        )
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-f", "-i", "0")
        self._call("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=h", "root=default")
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        # The first call of radosgw-admin makes the default zone and its pools.
        self._call("radosgw-admin", "user", "create", "--uid=stager", "--display-name=stager", *keys)
        gateway = self._spawn("radosgw", "-f", "-n", "client.rgw.a")
        self.endpoint = S3Endpoint("ceph", f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        gateway.wait_until(lambda: http_body(self.endpoint.endpoint) is not None)

    def _spawn(self, program: str, *arguments: str) -> ServerProcess:
        command = [program, "-c", str(self._configuration), *arguments]
        process = ServerProcess(command, self._root / f"{program}.out", environment={"CEPH_ARGS": ""})
        self._processes.append(process)
        return process

    def _call(self, program: str, *arguments: str) -> None:
        result = subprocess.run(
            [program, "-c", str(self._configuration), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "CEPH_ARGS": ""},
        )
        if result.returncode:
            raise ServerFailed(f"{program} {arguments[0]} failed: {result.stderr[-2000:]}")

    def _succeeds(self, program: str, *arguments: str) -> bool:
        with contextlib.suppress(ServerFailed, subprocess.TimeoutExpired):
            self._call(program, *arguments)
            return True
        return False
