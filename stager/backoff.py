"""How long to wait before trying again."""

from __future__ import annotations

import random

from stager.errors import DeadlineExceeded, Exhausted, StagerError, Throttled

FIRST_S = 0.2
LONGEST_S = 20.0
ASKED_LONGEST_S = 60.0


def backoff_s(attempt: int, chance: random.Random, error: BaseException | None = None) -> float:
    """How long to wait before attempt number ``attempt`` (from 1 for the first repeat): full jitter, at most 20 s.

    A store that named a time is believed, up to a minute.
    """
    if isinstance(error, Throttled) and error.retry_after_s is not None:
        return min(ASKED_LONGEST_S, error.retry_after_s)
    return chance.uniform(0.05, min(LONGEST_S, FIRST_S * 2**attempt))


def may_pass(error: StagerError) -> bool:
    """Whether a wait may mend it: retryable, or what came of retrying for a while. For those who have all the time."""
    return error.retryable or isinstance(error, Exhausted | DeadlineExceeded)
