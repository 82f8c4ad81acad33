"""How to reach an S3 endpoint, as values: importing this costs no SDK."""

from __future__ import annotations

from dataclasses import dataclass, field

from stager.formats.names import STAGER_FOLDER
from stager.store.providers import Profile, find_profile


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach a provider. What is empty is found by the SDK: environment, profile files, instance roles.

    Attributes:
        provider: The name of a profile; empty for AWS, or for a generic server if there is an endpoint.
        endpoint: A URL that replaces the profile's.
        region: What to sign with.
        aws_profile: A section of ``~/.aws/config``.
        access_key: With ``secret_key`` and perhaps ``session_token``, instead of the SDK's chain.
        kms_key: What objects are encrypted with by the server; empty leaves it to the bucket.
        storage_class: Of data objects. What stager itself reads, below ``.stager/``, stays in the usual class.
        requests_max: Requests in flight at once; the pool of connections holds a quarter more.
        connect_timeout_s: For a connection to stand.
        read_timeout_s: For the next bytes of an answer.
        call_timeout_s: For a whole call, besides its bytes at ``bytes_per_second_min``.
        complete_timeout_s: For a store to put the parts of an upload together.
        bytes_per_second_min: A slower upload counts as stalled.
    """

    provider: str = ""
    endpoint: str = ""
    region: str = ""
    aws_profile: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    addressing: str = ""
    kms_key: str = ""
    storage_class: str = ""
    requests_max: int = 64
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    call_timeout_s: float = 120.0
    complete_timeout_s: float = 900.0
    bytes_per_second_min: int = 128 << 10

    @property
    def profile(self) -> Profile:
        return find_profile(self.provider, endpoint=self.endpoint)

    def placing(self, key: str) -> dict[str, str]:
        """Parameters of a request that makes the object ``key``: how it is encrypted, and its class."""
        placing: dict[str, str] = {}
        if self.kms_key:
            placing |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key}
        if self.storage_class and STAGER_FOLDER not in key.split("/"):
            placing["StorageClass"] = self.storage_class
        return placing
