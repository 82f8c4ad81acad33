"""A server that answers byte for byte what a test says: the rude neighbours of real object stores."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class RawServer:
    """Answers requests with ``answers`` in turn, the last one again and again; notes what was asked."""

    answers: Sequence[bytes]
    scheme: str = "http"
    port: int = 0
    requests: list[bytes] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: keep-alive until an answer says ``Connection: close`` or breaks off."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line
                )
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
                self.requests.append(head + body)
                if answer == HANG:
                    await reader.read()
                    return
                if answer.endswith(RESET):
                    writer.write(answer.removesuffix(RESET))
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(answer)
                await writer.drain()
                if b"connection: close" in answer.lower():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


RESET = b"<<reset>>"
HANG = b"<<hang>>"


@asynccontextmanager
async def raw_server(*answers: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Serve on a free port of 127.0.0.1 for the time of the block."""
    state = RawServer(answers, scheme="https" if tls else "http")
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0, ssl=tls)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()


def answer(status: str, body: bytes = b"", *, length: int | None = None, **headers: str) -> bytes:
    """An HTTP answer; header names with ``_`` for ``-``."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error(status: str, code: str, message: str = "said the server", **headers: str) -> bytes:
    """An S3 error."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return answer(status, body, Content_Type="application/xml", **headers)
