"""Over TLS: certificates are checked, bodies travel unsigned, and a body left early is cut off."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stager.errors import Unavailable
from stager.offload import ThreadOffload
from stager.store.s3 import open_s3
from stager.store.s3_settings import S3Settings
from tests.store.raw_server import answer, raw_server

ETAG = '"0123456789abcdef"'


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stager tests")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def there_and_back(certificate: Path, offload: ThreadOffload | None) -> list[bytes]:
    body = bytes(4 << 20)
    async with raw_server(
        answer("200 OK", ETag=ETAG), answer("200 OK", body, ETag=ETAG), tls=server_context(certificate)
    ) as server:
        settings = S3Settings(endpoint=server.endpoint, region="r", access_key="a", secret_key="b")
        store = await open_s3("bucket", settings, offload=offload)
        try:
            await store.put("k", b"hello")
            async with store.get("k") as reader:
                assert await reader.read(10)
            async with store.get("k") as reader:
                got = 0
                while piece := await reader.read(1 << 20):
                    got += len(piece)
            assert got == len(body)
        finally:
            await store.aclose()
        return server.requests


@pytest.fixture(params=["loop", "threads"])
def offload(request: pytest.FixtureRequest) -> Iterator[ThreadOffload | None]:
    """Bodies by the event loop, and by sockets in threads."""
    threads = ThreadOffload() if request.param == "threads" else None
    yield threads
    if threads is not None:
        threads.close()


def test_bodies_are_not_hashed_twice(
    certificate: Path, offload: ThreadOffload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS guards the body, so that its SHA-256 need not be computed on the loop. Both a GET left early and a whole one."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    requests = uvloop.run(there_and_back(certificate, offload))
    assert b"x-amz-content-sha256: unsigned-payload" in requests[0].lower()


async def test_unknown_authority(certificate: Path, offload: ThreadOffload | None) -> None:
    """A certificate that nobody vouches for is refused, and the hint says how to vouch for it."""
    with pytest.raises(Unavailable, match="TLS") as caught:
        await there_and_back(certificate, offload)
    assert "AWS_CA_BUNDLE" in caught.value.hint
