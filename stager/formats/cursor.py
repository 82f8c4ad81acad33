"""Where a run stands in its data: a few numbers that resume the stream exactly, on any world size and
worker count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stager.errors import UsageError
from stager.formats.batches import decode_plan
from stager.formats.fields import take_count
from stager.formats.order import ORDER_VERSION, OrderPlan

POSITION_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the stream of samples.

    Attributes:
        plan: What fixes the order, with the epoch.
        position: Samples of that epoch which all ranks together have consumed.
    """

    plan: OrderPlan
    position: int = 0

    def check_matches(self, plan: OrderPlan, *, of: str) -> None:
        """UsageError, naming what differs, unless this cursor counts through the order of ``plan`` (in any
        epoch).

        Args:
            plan: Of the dataset that is to go on from here.
            of: The dataset, for the message.
        """
        if self.plan.fingerprint != plan.fingerprint:
            raise UsageError(
                f"the state is of another dataset than `{of}`: fingerprint {self.plan.fingerprint}, "
                f"but `{of}` has {plan.fingerprint}",
                subject=of,
                hint="it was packed again or its shards changed: use the old one, or begin without the state",
            )
        mine = replace(self.plan, epoch=0)
        other = replace(plan, epoch=0)
        differing = [
            name
            for name in ("seed", "lanes", "window", "shuffle")
            if getattr(mine, name) != getattr(other, name)
        ]
        if differing:
            told = ", ".join(
                f"{name}={getattr(mine, name)} (not {getattr(other, name)})" for name in differing
            )
            raise UsageError(
                f"the state of `{of}` was taken in another order: {told}",
                subject=of,
                hint="give StagedDataset the values of the state, or begin an epoch without it",
            )


def encode_cursor(cursor: Cursor) -> dict[str, Any]:
    """A dict that JSON, YAML and torch.save take, of about 200 bytes."""
    plan = cursor.plan
    return {
        "version": ORDER_VERSION,
        "fingerprint": plan.fingerprint,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "lanes": plan.lanes,
        "window": plan.window,
        "shuffle": plan.shuffle,
        "position": cursor.position,
    }


def decode_cursor(value: Mapping[str, Any], *, at: str = "dataset state") -> Cursor:
    """What `encode_cursor` wrote.

    Raises:
        FormatError: Anything is missing, of another type or out of bounds.
    """
    return Cursor(decode_plan(value, at=at), take_count(value, "position", at=at, most=POSITION_MAX))
