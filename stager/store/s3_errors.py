"""Errors of botocore, aiobotocore and aiohttp, translated once.

No message carries credentials: of the answer only its code and its message are shown, never the signed text.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from stager.errors import (
    BucketNotFound,
    ConfigError,
    IntegrityError,
    NotFound,
    NotSupported,
    OutOfSpace,
    PermissionDenied,
    PreconditionFailed,
    StagerError,
    StoreError,
    Throttled,
    Unauthenticated,
    Unavailable,
    UsageError,
)

_CREDENTIALS_HINT = (
    "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_PROFILE, or the keys under [store]"
)
_BUCKET_HINT = "create the bucket, or check its spelling, the region and the endpoint"
_REGION_HINT = (
    "set store.region (or AWS_DEFAULT_REGION) to the bucket's region, or store.endpoint to its address"
)

_NOT_FOUND = {"NoSuchKey", "NoSuchUpload", "NoSuchVersion", "NotFound", "404"}
_UNAUTHENTICATED = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "MissingAuthenticationToken",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "Unauthorized",
    "UnrecognizedClientException",
    "401",
}
_INTEGRITY = {
    "BadDigest",
    "EntityTooSmall",
    "InvalidDigest",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "416",
}
_THROTTLED = {
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "RequestThrottled",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
    "429",
}
_FULL = {"InsufficientCapacity", "QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "507"}
_REDIRECTED = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
    "301",
    "302",
    "307",
    "308",
}
_UNAVAILABLE = {
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
}


def translate(error: BaseException, *, doing: str, subject: str, store: str) -> StagerError:
    """What went wrong, in stager's terms. ``doing`` is a verb phrase such as ``put``, ``store`` names the bucket."""
    what = f"cannot {doing} `{subject}` in {store}" if subject else f"cannot {doing} in {store}"
    if isinstance(error, boto.ClientError):
        metadata = error.response.get("ResponseMetadata", {})
        return translate_answer(
            error.response.get("Error", {}),
            int(metadata.get("HTTPStatusCode", 0) or 0),
            metadata.get("HTTPHeaders", {}),
            what=what,
            subject=subject,
            store=store,
        )
    if isinstance(
        error,
        boto.NoCredentialsError
        | boto.PartialCredentialsError
        | boto.CredentialRetrievalError
        | boto.TokenRetrievalError
        | boto.UnauthorizedSSOTokenError,
    ):
        return Unauthenticated(
            f"{what}: no usable credentials were found", subject=subject, hint=_CREDENTIALS_HINT
        )
    if isinstance(error, boto.ProfileNotFound | boto.NoRegionError | boto.ConfigParseError):
        return ConfigError(f"{what}: {_brief(error)}", subject=subject, hint=_REGION_HINT)
    if isinstance(error, boto.ParamValidationError):
        return UsageError(f"{what}: {_brief(error)}", subject=subject)
    if isinstance(error, boto.FlexibleChecksumError | boto.ChecksumError):
        return IntegrityError(f"{what}: {_brief(error)}", subject=subject)
    if isinstance(error, boto.SSLError):
        return Unavailable(
            f"{what}: the TLS connection failed: {_brief(error)}",
            subject=subject,
            hint="check the endpoint's certificate, and AWS_CA_BUNDLE if it is signed by an authority of your own",
        )
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ProxyConnectionError):
        return Unavailable(
            f"{what}: the endpoint cannot be reached: {_brief(error)}",
            subject=subject,
            hint="check store.endpoint (or AWS_ENDPOINT_URL), and that the server runs and is not behind a firewall",
        )
    if isinstance(error, ResponseParserError):
        return Unavailable(
            f"{what}: the answer is not S3's",
            subject=subject,
            hint="something else answers at store.endpoint: a proxy, a console or a web site",
        )
    if isinstance(
        error, TimeoutError | boto.HTTPClientError | aiohttp.ClientError | boto.BotoCoreError | OSError
    ):
        return Unavailable(f"{what}: {_brief(error) or type(error).__name__}", subject=subject)
    raise error


def translate_answer(
    answer: Mapping[str, object],
    status: int,
    headers: Mapping[str, str],
    *,
    what: str,
    subject: str,
    store: str,
) -> StagerError:
    """An error that the server sent: its code and message, the HTTP status (0 if it has none), the headers."""
    code = str(answer.get("Code") or "")
    message = _printable(str(answer.get("Message") or ""))[:200]
    said = f"{what}: {code or status}" + (f" ({message})" if message else "")
    if code == "NoSuchBucket":
        return BucketNotFound(f"{store} does not exist", subject=subject or store, hint=_BUCKET_HINT)
    if code in _REDIRECTED or status in (301, 302, 307, 308):
        region = headers.get("x-amz-bucket-region") or answer.get("Region") or ""
        place = f"; the bucket is in {_printable(str(region))[:40]}" if region else ""
        return ConfigError(f"{said}{place}", subject=subject, hint=_REGION_HINT)
    if code in _NOT_FOUND or status == 404:
        return NotFound(f"{what}: it does not exist", subject=subject)
    if code in _FULL:
        return OutOfSpace(said, subject=subject, hint="the bucket's quota or the store is full")
    if code == "RequestTimeTooSkewed":
        return Unauthenticated(said, subject=subject, hint="this machine's clock is wrong; synchronise it")
    if code in _UNAUTHENTICATED or status == 401:
        return Unauthenticated(said, subject=subject, hint=_CREDENTIALS_HINT)
    if code in _INTEGRITY or status == 416:
        return IntegrityError(said, subject=subject)
    if code == "InvalidObjectState":
        return NotSupported(said, subject=subject, hint="the object is archived; restore it first")
    if code in _UNAVAILABLE:
        return Unavailable(said, subject=subject)
    if code in _THROTTLED or status in (429, 503):
        return Throttled(said, subject=subject, retry_after_s=_retry_after_s(headers))
    return _by_status(status, said, subject)


def _by_status(status: int, said: str, subject: str) -> StagerError:
    if status == 412:
        return PreconditionFailed(said, subject=subject)
    if status in (405, 501):
        return NotSupported(said, subject=subject)
    if status == 403:
        return PermissionDenied(
            said,
            subject=subject,
            hint="the credentials lack a right on this bucket or prefix; see its policy",
        )
    if status >= 500 or status == 408:
        return Unavailable(said, subject=subject)
    return StoreError(said, subject=subject)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), 300.0) if seconds == seconds else None  # "nan" is a float too


def _brief(error: BaseException) -> str:
    return _printable(str(error))[:300]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text).strip()
