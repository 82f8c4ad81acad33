"""The connection to an S3 endpoint: one aiobotocore client for the life of a store."""

from __future__ import annotations

import functools
import re
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import create_loader

from stager.errors import ConfigError
from stager.offload import Offload
from stager.store.providers import Profile
from stager.store.s3_errors import translate
from stager.store.s3_settings import S3Settings
from stager.store.s3_wire import wire_session

# Regions, China's, VPC endpoints, dual stack.
_AWS_HOSTS = re.compile(r"(^|\.)(amazonaws\.com(\.cn)?|api\.aws)$")


async def open_client(settings: S3Settings, stack: AsyncExitStack, offload: Offload | None = None) -> Any:
    """An S3 client that ``stack`` closes. With ``offload`` bodies travel by its threads (`stager.store.s3_wire`).

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
            config=_config(settings, profile, endpoint, offload),
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


def endpoint_of_the_sdk(client: Any, settings: S3Settings) -> str:
    """The endpoint that the SDK found by itself where none is configured; empty if it is AWS's, or one is configured."""
    endpoint = str(client.meta.endpoint_url)
    host = urlsplit(endpoint).hostname or ""
    if settings.provider or settings.endpoint or _AWS_HOSTS.search(host):
        return ""
    return endpoint


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


def _config(
    settings: S3Settings, profile: Profile, endpoint: str | None, offload: Offload | None
) -> AioConfig:
    encrypted = endpoint is None or endpoint.startswith("https:")
    sign_body = profile.sign_body
    if sign_body is None:
        sign_body = not (encrypted or profile.checksum_header)
    # Behind an endpoint of one's own, names of buckets are seldom names of hosts.
    addressing = settings.addressing or ("path" if settings.endpoint else profile.addressing)
    wire = {"http_session_cls": wire_session(offload)} if offload is not None else {}
    return AioConfig(
        **wire,
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
