"""The one taxonomy of errors.

Every error names the thing it is about, says what was tried, and ends in a ``hint:`` line where a hint helps.
Exceptions of botocore, aiohttp, sqlite and the operating system are translated once, where they arise.
"""

from __future__ import annotations

from typing import ClassVar


class StagerError(Exception):
    """Base of all errors that stager raises on purpose.

    Attributes:
        subject: The key, path, URL or setting that the error is about.
        hint: What the reader can do about it, one sentence, or empty.
        exit_code: What the command line exits with.
        retryable: Whether the same call may succeed later without anybody's help.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, subject: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (pack workers, DataLoader workers); keyword arguments must survive.
        return _rebuild, (type(self), self.message, self.subject, self.hint, self.__dict__.copy())


def _rebuild(
    kind: type[StagerError], message: str, subject: str, hint: str, state: dict[str, object]
) -> StagerError:
    error = kind.__new__(kind)
    StagerError.__init__(error, message, subject=subject, hint=hint)
    error.__dict__.update(state)
    return error


class UsageError(StagerError):
    """The caller asked for something that cannot be meant."""

    exit_code = 2


class Partial(StagerError):
    """Some of the work was done, and some was not; the message says what is left."""

    exit_code = 3


class ConfigError(StagerError):
    """The configuration is wrong. All its problems are in the message."""

    exit_code = 10


class LockHeld(StagerError):
    """Another process owns what this one needs."""

    exit_code = 11


class StoreError(StagerError):
    """A store did not do what was asked."""

    exit_code = 12


class NotFound(StoreError):
    """No object, upload or bucket of this name."""


class BucketNotFound(NotFound):
    """The bucket itself does not exist; no wait brings it."""


class AlreadyExists(StoreError):
    """A create-only write met an existing name."""


class PreconditionFailed(StoreError):
    """The object is not the version that the caller named."""


class PermissionDenied(StoreError):
    """The credentials are known, and are not enough."""


class Unauthenticated(StoreError):
    """The credentials are missing, wrong or expired."""


class NotSupported(StoreError):
    """The store has no such capability."""


class Throttled(StoreError):
    """The store asks to be left alone for a while.

    Attributes:
        retry_after_s: How long the store asked to wait, or None.
    """

    retryable = True

    def __init__(
        self, message: str, *, subject: str = "", hint: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, subject=subject, hint=hint)
        self.retry_after_s = retry_after_s


class Unavailable(StoreError):
    """The store, the network or the answer's body failed; the outcome of a write is unknown."""

    retryable = True


class Exhausted(StoreError):
    """Every allowed attempt failed; the last failure is the cause."""


class DeadlineExceeded(StoreError):
    """A wait ended without what it waited for, which the message names."""


class OutOfSpace(StagerError):
    """The disk, the quota or the configured bound is full."""

    exit_code = 12


class IntegrityError(StagerError):
    """Bytes are not what a manifest, a checksum or a length says."""

    exit_code = 13


class FormatError(IntegrityError):
    """Bytes from outside do not follow their format."""
