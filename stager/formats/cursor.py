"""Where a run stands in its data: a few numbers that resume the stream exactly, on any world size and
worker count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stager.errors import UsageError
from stager.formats.batches import decode_plan
from stager.formats.fields import as_object, take_count
from stager.formats.mixing import Mix, decode_mix, encode_mix
from stager.formats.order import ORDER_VERSION, POSITION_MAX, OrderPlan


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the stream of samples.

    Attributes:
        plan: What fixes the order, with the epoch.
        position: Samples of that epoch which all ranks together have consumed.
        mix: What is mixed how, if the stream is of several datasets.
    """

    plan: OrderPlan
    position: int = 0
    mix: Mix | None = None

    def at_epoch(self, epoch: int) -> Cursor:
        """The beginning of an epoch of the same stream."""
        return replace(self, plan=self.plan.at_epoch(epoch), position=0)

    def check_matches(self, other: Cursor, *, of: str) -> None:
        """UsageError, naming what differs, unless this cursor counts through the stream of ``other`` (in any
        epoch, and with any changes of weights that began with those of ``other`` or have led to them).

        Args:
            other: Of the dataset that is to go on from here.
            of: The dataset, for the message.
        """
        if self.plan.fingerprint != other.plan.fingerprint:
            raise UsageError(
                f"the state is of another dataset than `{of}`: fingerprint {self.plan.fingerprint}, "
                f"but `{of}` has {other.plan.fingerprint}{_sources_changed(self.mix, other.mix)}",
                subject=of,
                hint="it was packed again or its shards changed: use the old one, or begin without the state",
            )
        told = [
            f"{name}={getattr(self.plan, name)} (not {getattr(other.plan, name)})"
            for name in ("seed", "lanes", "window", "shuffle")
            if getattr(self.plan, name) != getattr(other.plan, name)
        ]
        if self.mix is not None and other.mix is not None:
            if self.mix.epoch_samples != other.mix.epoch_samples:
                told.append(f"epoch_samples={self.mix.epoch_samples} (not {other.mix.epoch_samples})")
            known = {entry.weights for entry in self.mix.history}
            if other.mix.weights not in known:
                weights = ":".join(map(str, self.mix.weights))
                told.append(f"weights {weights} (not {':'.join(map(str, other.mix.weights))})")
        if told:
            raise UsageError(
                f"the state of `{of}` was taken in another order: {', '.join(told)}",
                subject=of,
                hint="give StagedDataset the values of the state, or begin an epoch without it; weights are changed by "
                "set_weights after load_state_dict",
            )


def _sources_changed(mine: Mix | None, other: Mix | None) -> str:
    """Which sources of a mix are not what they were."""
    if mine is None or other is None:
        return "" if mine is other else ", and only one of the two is a mix"
    if len(mine.sources) != len(other.sources):
        return f", and it mixes {len(mine.sources)} sources, not {len(other.sources)}"
    changed = [
        str(number)
        for number, (was, now) in enumerate(zip(mine.sources, other.sources, strict=True))
        if was != now
    ]
    return f"; what changed is source {' and '.join(changed)}" if changed else ""


def encode_cursor(cursor: Cursor) -> dict[str, Any]:
    """A dict that JSON, YAML and torch.save take, of about 200 bytes; a mix adds `encode_mix`'s."""
    plan = cursor.plan
    mixed = {} if cursor.mix is None else {"mix": encode_mix(cursor.mix)}
    return {
        "version": ORDER_VERSION,
        "fingerprint": plan.fingerprint,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "lanes": plan.lanes,
        "window": plan.window,
        "shuffle": plan.shuffle,
        "position": cursor.position,
        **mixed,
    }


def decode_cursor(value: Mapping[str, Any], *, at: str = "dataset state") -> Cursor:
    """What `encode_cursor` wrote.

    Raises:
        FormatError: Anything is missing, of another type or out of bounds.
    """
    position = take_count(value, "position", at=at, most=POSITION_MAX)
    mix = decode_mix(as_object(value["mix"], at=f"{at}: mix"), at=f"{at}: mix") if "mix" in value else None
    return Cursor(decode_plan(value, at=at), position, mix)
