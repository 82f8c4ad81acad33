"""The connection to an S3 endpoint: one aiobotocore client for the life of a store."""

from __future__ import annotations

import functools
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import create_loader

from stager.errors import ConfigError
from stager.store.providers import Profile, find_profile
from stager.store.s3_errors import translate


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach a provider. What is empty is found by the SDK: environment, profile files, instance roles.

    Attributes:
        provider: The name of a profile; empty for AWS, or for a generic server if there is an endpoint.
        endpoint: A URL that replaces the profile's.
        region: What to sign with.
        aws_profile: A section of ``~/.aws/config``.
        access_key: With ``secret_key`` and perhaps ``session_token``, instead of the SDK's chain.
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
    requests_max: int = 64
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    call_timeout_s: float = 120.0
    complete_timeout_s: float = 900.0
    bytes_per_second_min: int = 128 << 10

    @property
    def profile(self) -> Profile:
        return find_profile(self.provider, endpoint=self.endpoint)


async def open_client(settings: S3Settings, stack: AsyncExitStack) -> Any:
    """An S3 client that ``stack`` closes.

    Raises:
        ConfigError: No region, an unknown profile of AWS, an endpoint that is no URL.
    """
    profile = settings.profile
    session = AioSession(profile=settings.aws_profile or None)
    session.register_component("data_loader", _shared_loader())
    # The defaults, one second and one attempt, lose the credentials of a busy instance.
    session.set_config_variable("metadata_service_timeout", 5)
    session.set_config_variable("metadata_service_num_attempts", 5)
    try:
        region = settings.region or session.get_config_variable("region") or profile.region
        endpoint = _endpoint(settings, profile, region)
        context = session.create_client(
            "s3",
            region_name=region,
            endpoint_url=endpoint,
            aws_access_key_id=settings.access_key or None,
            aws_secret_access_key=settings.secret_key or None,
            aws_session_token=settings.session_token or None,
            config=_config(settings, profile, endpoint),
        )
        client = await stack.enter_async_context(context)
    except ValueError as error:
        raise ConfigError(
            f"store.endpoint `{settings.endpoint}` is not a URL: {error}",
            subject="store.endpoint",
            hint="write it as http://host:port or https://host",
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise translate(
            error, doing="connect", subject="", store=settings.endpoint or profile.name
        ) from error
    if not profile.expect_continue:
        client.meta.events.register_last("before-sign.s3.*", _drop_expect)
    return client


@functools.cache
def _shared_loader() -> Any:
    """The SDK's service descriptions, read once a process rather than once a store."""
    return create_loader()


def _endpoint(settings: S3Settings, profile: Profile, region: str | None) -> str | None:
    """The URL to use; None leaves it to the SDK, which also reads AWS_ENDPOINT_URL."""
    if settings.endpoint:
        parts = urlsplit(settings.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"store.endpoint `{parts.scheme}://{parts.hostname or ''}` is not an http or https URL",
                subject="store.endpoint",
                hint="write it as http://host:port or https://host",
            )
        if parts.username or parts.password:
            raise ConfigError(
                "store.endpoint holds credentials",
                subject="store.endpoint",
                hint="give them by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        return settings.endpoint
    if profile.endpoint and "{region}" in profile.endpoint and not region:
        raise ConfigError(
            f"provider `{profile.name}` needs a region", subject="store.region", hint="set store.region"
        )
    return profile.endpoint.format(region=region) if profile.endpoint else None


def _config(settings: S3Settings, profile: Profile, endpoint: str | None) -> AioConfig:
    encrypted = endpoint is None or endpoint.startswith("https:")
    sign_body = profile.sign_body
    if sign_body is None:
        sign_body = not (encrypted or profile.checksum_header)
    # Behind an endpoint of one's own, names of buckets are seldom names of hosts.
    addressing = settings.addressing or ("path" if settings.endpoint else profile.addressing)
    return AioConfig(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        max_pool_connections=settings.requests_max + settings.requests_max // 4 + 1,
        # Retries are `stager.store.retrying`'s; two layers would multiply.
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={"addressing_style": addressing, "payload_signing_enabled": sign_body},
        user_agent_extra="stager",
        warm_up_loader_caches=True,
    )


def _drop_expect(request: Any, **_: object) -> None:
    if "Expect" in request.headers:
        del request.headers["Expect"]
