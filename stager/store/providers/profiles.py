"""Profiles of the providers that speak S3. Figures are the vendors' own, or were measured against the server named.

Conditional writes and whether checksums are kept are not here: `stager.store.probe` finds them by experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stager.errors import ConfigError

Addressing = Literal["virtual", "path"]
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Profile:
    """What differs between providers of the S3 dialect.

    Attributes:
        name: As configured under ``[store] provider``.
        endpoint: A template with ``{region}``; empty where the SDK knows it; None where the site decides.
        region: What to sign with when none is configured; None where it must be configured or found by the SDK.
        addressing: Bucket in the host's name or in the path.
        checksum_header: Send the CRC-64/NVME of each put and part as a header, which the store checks and keeps.
        sign_body: Sign the SHA-256 of bodies. None: only where neither TLS nor a checksum guards them.
        expect_continue: Wait for ``100 Continue`` before a body: one round trip for each put.
        delete_batch_max: Keys in one DeleteObjects; 1 where it is missing or wants an MD5 that botocore no longer sends.
        part_bytes_min: Smallest part but the last.
        part_bytes_max: Largest part.
        parts_max: Parts in one upload.
        put_bytes_max: Largest single put.
        copy_bytes_max: Largest object that one server-side copy moves; larger ones are copied in parts.
        key_bytes_max: Longest key.
        lists_in_order: Listings come in the order of UTF-8 keys. Where they may not, they are sorted here, whole. SeaweedFS
            walks its folders, so ``a/1`` comes before ``a-x``.
    """

    name: str
    endpoint: str | None = None
    region: str | None = "us-east-1"
    addressing: Addressing = "path"
    checksum_header: bool = False
    sign_body: bool | None = None
    expect_continue: bool = False
    delete_batch_max: int = 1000
    part_bytes_min: int = 5 * _MIB
    part_bytes_max: int = 5 * _GIB
    parts_max: int = 10_000
    put_bytes_max: int = 5 * _GIB
    copy_bytes_max: int = 5 * _GIB
    key_bytes_max: int = 1024
    lists_in_order: bool = True


_ALL = (
    Profile("aws", endpoint="", region=None, addressing="virtual", checksum_header=True),
    # Any other endpoint: nothing is assumed beyond the dialect of 2006.
    Profile("generic", lists_in_order=False),
    # Checks and keeps CRC-64/NVME; checks no signed body, so none is made. Tried with 4.48.
    Profile("seaweedfs", checksum_header=True, sign_body=False, lists_in_order=False),
    # Accepts checksum headers and neither checks nor keeps them, but checks the signed body. Tried with 16.2.
    Profile("ceph"),
    Profile("minio", checksum_header=True),
    Profile("r2", region="auto", checksum_header=True),
    # The XML interface with HMAC keys: no S3 checksums, no DeleteObjects with botocore's CRC.
    Profile(
        "gcs-xml",
        endpoint="https://storage.googleapis.com",
        region="auto",
        delete_batch_max=1,
        sign_body=True,
    ),
    Profile(
        "b2", endpoint="https://s3.{region}.backblazeb2.com", region=None, delete_batch_max=1, sign_body=True
    ),
    Profile("wasabi", endpoint="https://s3.{region}.wasabisys.com", region=None),
    Profile("digitalocean", endpoint="https://{region}.digitaloceanspaces.com", region=None),
    Profile("linode", endpoint="https://{region}.linodeobjects.com", region=None),
    Profile("vultr", endpoint="https://{region}.vultrobjects.com", region=None),
    Profile("scaleway", endpoint="https://s3.{region}.scw.cloud", region=None, parts_max=1000),
    Profile("coreweave", endpoint="https://cwobject.com", addressing="virtual"),
    # No DeleteObjects, and at most 500 MB in a put or a part.
    Profile(
        "runpod",
        endpoint="https://s3api-{region}.runpod.io",
        region=None,
        delete_batch_max=1,
        part_bytes_max=500_000_000,
        put_bytes_max=500_000_000,
    ),
    Profile(
        "oss",
        endpoint="https://s3.oss-{region}.aliyuncs.com",
        region=None,
        addressing="virtual",
        delete_batch_max=1,
    ),
    Profile(
        "cos",
        endpoint="https://cos.{region}.myqcloud.com",
        region=None,
        addressing="virtual",
        delete_batch_max=1,
        key_bytes_max=850,
    ),
)
PROFILES = {profile.name: profile for profile in _ALL}


def find_profile(name: str, *, endpoint: str = "") -> Profile:
    """The profile of this name; without a name, AWS, or the generic one if there is an endpoint.

    Raises:
        ConfigError: No such provider.
    """
    chosen = name or ("generic" if endpoint else "aws")
    profile = PROFILES.get(chosen)
    if profile is None:
        raise ConfigError(
            f"store.provider is `{chosen}`, which is not known",
            subject="store.provider",
            hint=f"one of {', '.join(sorted(PROFILES))}; for another S3 endpoint leave it out and set store.endpoint",
        )
    return profile
