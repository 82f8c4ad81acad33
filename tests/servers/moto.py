"""moto's S3 in a process of its own: an emulator that checks nothing, but has restores and starts at once."""

from __future__ import annotations

import sys
from pathlib import Path

from s3_server import START_ATTEMPTS, S3Endpoint, ServerFailed, ServerProcess, free_ports, http_body


class MotoServer:
    """moto_server on a free port. Objects lie in its memory: keep them below about 64 MiB."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        failures = []
        for _ in range(START_ATTEMPTS):
            port = free_ports(1)[0]
            self.endpoint = S3Endpoint("moto", f"http://127.0.0.1:{port}", "motoaccess", "moto-secret")
            main = "import sys; from moto.server import main; sys.exit(main())"
            command = [sys.executable, "-c", main, "-H", "127.0.0.1", "-p", str(port)]
            self._process = ServerProcess(command, folder / "log")
            try:
                ready = f"{self.endpoint.endpoint}/moto-api/"
                self._process.wait_until(lambda ready=ready: http_body(ready) is not None)
                return
            except ServerFailed as error:
                self._process.kill()
                failures.append(str(error))
        raise ServerFailed("\n".join(failures))

    def kill(self) -> None:
        self._process.kill()
