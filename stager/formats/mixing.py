"""Several datasets as one stream: which of them gives a sample is a function of the position and the weights alone.

Weights are whole numbers; their sum is the length of a pattern in which every source has as many places as its
weight, spread so that after any number of places each source is less than one sample away from its share
(Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). A lane of the mix walks the
pattern over and over, each lane from another place of it, and takes the next sample of the same lane of the
source that the pattern names. So the count of every source's samples at any place is arithmetic, and a seek
costs what it costs in one dataset.

A source is read endlessly: after its last sample follows its next epoch, in another order, whatever the mix's
epochs are. Each of its samples comes once before any comes again.

Weights may change at any position. The places of all changes make the counts, so they belong to the state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import gcd, isfinite, lcm
from typing import Any

from stager.errors import FormatError, UsageError
from stager.formats.batches import BatchGeometry, encode_order
from stager.formats.fields import take_count, take_list
from stager.formats.order import POSITION_MAX, SEED_MAX, EpochOrder, OrderPlan
from stager.formats.permutation import derive_key

SOURCES_MAX = 64
PERIOD_MAX = 1 << 16
CHANGES_MAX = 256
EPOCH_SAMPLES_MAX = 1 << 60
_ORDERS_KEPT = 3
_SOURCE_DIGITS = 8


@dataclass(frozen=True, slots=True)
class WeightsFrom:
    """Weights, as `whole_weights` gives them, that hold from ``position`` of ``epoch`` on."""

    epoch: int
    position: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """What fixes a mix, beside the `OrderPlan` that it shares with a single dataset.

    Attributes:
        sources: The beginning of each source's fingerprint.
        epoch_samples: After how many samples the mix's next epoch begins.
        history: Every change of weights; the first is at the very beginning, their places ascend.
    """

    sources: tuple[str, ...]
    epoch_samples: int
    history: tuple[WeightsFrom, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """Those of the last change."""
        return self.history[-1].weights

    def changed(self, epoch: int, position: int, weights: tuple[int, ...]) -> Mix:
        """With other weights from a place on, in place of all changes recorded there or behind it.

        Raises:
            UsageError: Another number of sources, or too many changes.
        """
        if len(weights) != len(self.sources):
            raise UsageError(
                f"{len(weights)} weights for {len(self.sources)} sources", subject="weights", hint="one for each"
            )
        kept = tuple(entry for entry in self.history if (entry.epoch, entry.position) < (epoch, position))
        if kept and kept[-1].weights == weights:
            return replace(self, history=kept)
        if len(kept) == CHANGES_MAX:
            raise UsageError(f"weights were changed {CHANGES_MAX} times already", subject="weights")
        return replace(self, history=(*kept, WeightsFrom(epoch, position, weights)))

    def weights_at(self, epoch: int, position: int) -> tuple[int, ...]:
        """Those that hold at a place."""
        entries = [entry for entry in self.history if (entry.epoch, entry.position) <= (epoch, position)]
        return entries[-1].weights


def make_mix(fingerprints: Sequence[str], epoch_samples: int, weights: tuple[int, ...]) -> Mix:
    """A mix that begins with ``weights``."""
    sources = tuple(fingerprint[:_SOURCE_DIGITS] for fingerprint in fingerprints)
    return Mix(sources, epoch_samples, (WeightsFrom(0, 0, weights),))


def mix_fingerprint(fingerprints: Iterable[str]) -> str:
    """32 hexadecimal digits that change with any source, or their order."""
    return sha256(b"stager-mix-1\n" + "\n".join(fingerprints).encode()).hexdigest()[:32]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of ``weights``.

    Numbers are taken as they are written: 0.7 and 0.3 give 7 and 3. Where the sum would be more than `PERIOD_MAX` they are
    rounded to that sum, so that none is wrong by more than one part in 65,536 of the whole.

    Raises:
        UsageError: No weights or too many, one that is negative or no finite number, none above zero, or one too small.
    """
    if not 1 <= len(weights) <= SOURCES_MAX:
        raise UsageError(f"{len(weights)} sources; a mix has 1 to {SOURCES_MAX}", subject="weights")
    for weight in weights:
        plain = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not plain or not isfinite(weight) or weight < 0:
            raise UsageError(f"a weight is a number from 0 up, not {weight!r}", subject="weights")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise UsageError("every weight is 0", subject="weights", hint="at least one source must be read")
    scale = lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * scale) for weight in exact]
    divisor = gcd(*numbers)
    whole = tuple(number // divisor for number in numbers)
    if sum(whole) <= PERIOD_MAX:
        return whole
    shares = [weight * PERIOD_MAX / total for weight in exact]
    rounded = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda at: (rounded[at] - shares[at], at))
    for at in by_rest[: PERIOD_MAX - sum(rounded)]:
        rounded[at] += 1
    for weight, number in zip(weights, rounded, strict=True):
        if weight and not number:
            raise UsageError(
                f"the weight {weight!r} is less than 1/{PERIOD_MAX} of all weights",
                subject="weights",
                hint="use 0 to leave the source out, or a larger one",
            )
    divisor = gcd(*rounded)
    return tuple(number // divisor for number in rounded)


class Pattern:
    """One period of a mix: which source has each place, and how many places each has before any index."""

    def __init__(self, weights: tuple[int, ...]) -> None:
        self.weights = weights
        self.period = sum(weights)
        self.table = array("B", _spread(weights, self.period))
        self._places = [array("I") for _ in weights]
        for place, source in enumerate(self.table):
            self._places[source].append(place)

    def count(self, source: int, index: int) -> int:
        """How many of the first ``index`` places of the endless pattern belong to ``source``."""
        periods, rest = divmod(index, self.period)
        return periods * self.weights[source] + bisect_left(self._places[source], rest)


def _spread(weights: tuple[int, ...], period: int) -> Iterator[int]:
    """Sources of the period's places, so that no prefix is a whole sample away from the shares.

    Every place of a source has an earliest and a latest index at which the bound still holds; giving each index to
    the source whose latest is nearest meets them all (the bound is Tijdeman's, the method Steiner and Yeomans').
    """
    sources = sum(1 for weight in weights if weight)
    parts = max(2 * sources - 2, 1)
    waiting: list[tuple[int, int]] = []
    ready: list[tuple[int, int]] = []
    given = [0] * len(weights)

    def release(source: int) -> None:
        # The bound is 1 - 1 / parts; both ends in whole numbers.
        number = given[source]
        heappush(waiting, (-(-(number * parts + 1) * period // (parts * weights[source])), source))

    for source, weight in enumerate(weights):
        if weight:
            release(source)
    for index in range(period):
        while waiting and waiting[0][0] <= index + 1:
            source = heappop(waiting)[1]
            latest = (given[source] * parts + parts - 1) * period // (parts * weights[source])
            heappush(ready, (latest, source))
        source = heappop(ready)[1]
        given[source] += 1
        if given[source] < weights[source]:
            release(source)
        yield source


@lru_cache(maxsize=16)
def _pattern(weights: tuple[int, ...]) -> Pattern:
    return Pattern(weights)


@dataclass(frozen=True, slots=True)
class MixSource:
    """One of the datasets that are mixed: its fingerprint, and the samples of every shard."""

    fingerprint: str
    shard_samples: Sequence[int]


class MixOrder:
    """The order of one epoch of a mix; the same to `EpochBatches` as that of one dataset.

    Shards are numbered through: those of the first source, then those of the second, and so on.
    """

    def __init__(self, plan: OrderPlan, mix: Mix, sources: Sequence[MixSource]) -> None:
        """Lay the mix out.

        Args:
            plan: Of the mix: its fingerprint stands for all sources.
            mix: Weights and their changes.
            sources: What is mixed.

        Raises:
            UsageError: A source has fewer samples than there are lanes.
        """
        self.plan = plan
        self.mix = mix
        self.samples = mix.epoch_samples
        self._sources = [
            _EndlessOrder(source_plan(plan, number, source.fingerprint), source.shard_samples)
            for number, source in enumerate(sources)
        ]
        self._first_shards = list(accumulate((len(source.shard_samples) for source in sources), initial=0))
        for number, source in enumerate(self._sources):
            if source.samples < plan.lanes:
                raise UsageError(
                    f"source {number} of the mix has {source.samples} samples, less than the {plan.lanes} lanes",
                    subject="lanes",
                    hint="give fewer lanes, or leave the source out",
                )

    def lane_samples(self, lane: int) -> int:
        """Samples of one lane in an epoch of the mix; lanes differ by one at most."""
        lanes = self.plan.lanes
        if not 0 <= lane < lanes:
            raise IndexError(f"lane {lane} of {lanes}")
        return (lane + 1) * self.samples // lanes - lane * self.samples // lanes

    def sample_at(self, lane: int, offset: int) -> tuple[int, int]:
        """``(shard, sample in the shard)`` that ``lane`` gives after ``offset`` others of this epoch."""
        return self.samples_in(lane, offset, offset + 1)[0]

    def samples_in(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        """``(shard, sample in the shard)`` at offsets ``begin`` to ``end`` (exclusive) of ``lane``, in order."""
        size = self.lane_samples(lane)
        if begin < 0 or end > size:
            raise IndexError(f"lane {lane} has {size} samples, not offsets {begin} to {end}")
        first = self.plan.epoch * size
        found: list[tuple[int, int]] = []
        for pattern, index, counts, length in self._stretches(lane, first + begin, first + end):
            table, period = pattern.table, pattern.period
            chosen = [table[place % period] for place in range(index, index + length)]
            places = [
                iter(source.samples_in(lane, count, count + chosen.count(number)))
                for number, (source, count) in enumerate(zip(self._sources, counts, strict=True))
            ]
            for number in chosen:
                shard, sample = next(places[number])
                found.append((self._first_shards[number] + shard, sample))
        return found

    def standing(self, position: int, lanes: Iterable[int]) -> list[tuple[OrderPlan, int]]:
        """``(plan with the epoch, position)`` of every source, where the farthest behind of ``lanes`` stands."""
        counts = []
        for lane in lanes:
            size = self.lane_samples(lane)
            at = self.plan.epoch * size + min(position // self.plan.lanes, size)
            (_, _, before, _), *_ = self._stretches(lane, at, at + 1)
            counts.append([source.standing(lane, count) for source, count in zip(self._sources, before, strict=True)])
        least = [min(places) for places in zip(*counts, strict=True)]
        return [
            (source.plan.at_epoch(epoch), offset * self.plan.lanes)
            for source, (epoch, offset) in zip(self._sources, least, strict=True)
        ]

    def _stretches(self, lane: int, begin: int, end: int) -> Iterator[tuple[Pattern, int, list[int], int]]:
        """Offsets ``begin`` to ``end`` of the endless lane, cut where weights change.

        Each is the pattern, the index in it, how many samples every source has given before, and the length.
        """
        counts = [0] * len(self._sources)
        starts = [self._lane_offset(lane, entry) for entry in self.mix.history]
        for entry, (start, stop) in zip(self.mix.history, pairwise([*starts, end]), strict=True):
            stop = min(stop, end)
            if stop <= start:
                continue
            pattern = _pattern(entry.weights)
            phase = lane * pattern.period // self.plan.lanes

            def counts_at(offset: int) -> list[int]:
                return [
                    count + pattern.count(source, phase + offset) - pattern.count(source, phase)
                    for source, count in enumerate(counts)
                ]

            if begin < stop:
                skipped = max(begin - start, 0)
                yield pattern, phase + skipped, counts_at(skipped), stop - start - skipped
            counts = counts_at(stop - start)

    def _lane_offset(self, lane: int, entry: WeightsFrom) -> int:
        size = self.lane_samples(lane)
        return entry.epoch * size + min(entry.position // self.plan.lanes, size)


class _EndlessOrder:
    """A source's lanes, epoch after epoch. Lanes turn to the next epoch each by itself."""

    def __init__(self, plan: OrderPlan, shard_samples: Sequence[int]) -> None:
        self.plan = plan
        self.samples = sum(shard_samples)
        self._shard_samples = shard_samples
        self._orders: dict[int, EpochOrder] = {}

    def samples_in(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        size = self._lane_samples(lane)
        found: list[tuple[int, int]] = []
        while begin < end:
            epoch, offset = divmod(begin, size)
            length = min(size - offset, end - begin)
            found += self._order(epoch).samples_in(lane, offset, offset + length)
            begin += length
        return found

    def standing(self, lane: int, count: int) -> tuple[int, int]:
        """Epoch and offset in it, after ``count`` samples of the lane."""
        return divmod(count, self._lane_samples(lane))

    def _lane_samples(self, lane: int) -> int:
        lanes = self.plan.lanes
        return (lane + 1) * self.samples // lanes - lane * self.samples // lanes

    def _order(self, epoch: int) -> EpochOrder:
        known = self._orders.get(epoch)
        if known is None:
            while len(self._orders) >= _ORDERS_KEPT:
                del self._orders[min(self._orders)]
            known = self._orders[epoch] = EpochOrder(self.plan.at_epoch(epoch), self._shard_samples)
        return known


def source_plan(plan: OrderPlan, number: int, fingerprint: str) -> OrderPlan:
    """The order of one source of the mix of ``plan``, at its first epoch.

    The seed comes from the mix's and the source's number, so that two sources of equal content have orders of their own.
    """
    seed = derive_key("mix", plan.seed, number) % SEED_MAX
    return replace(plan, fingerprint=fingerprint, seed=seed, epoch=0)


def encode_mix_orders(
    order: MixOrder, geometry: BatchGeometry, position: int, lanes: Iterable[int]
) -> list[dict[str, Any]]:
    """What a reader of some ``lanes`` of a mix announces: for every source that is read, its number, order and place."""
    weights = order.mix.weights_at(order.plan.epoch, position)
    return [
        {"source": number, "position": place, "order": encode_order(plan, geometry, pace=sum(weights) / weight)}
        for number, ((plan, place), weight) in enumerate(
            zip(order.standing(position, lanes), weights, strict=True)
        )
        if weight
    ]


def encode_mix(mix: Mix) -> dict[str, Any]:
    """The entries of a state: some 12 bytes and 3 to 7 for each source, for every change of weights."""
    return {
        "sources": list(mix.sources),
        "epoch_samples": mix.epoch_samples,
        "weights": encode_history(mix),
    }


def decode_mix(value: Mapping[str, Any], *, at: str) -> Mix:
    """What `encode_mix` wrote.

    Raises:
        FormatError: Anything is missing, of another type or out of bounds.
    """
    sources = take_list(value, "sources", at=at, length_max=SOURCES_MAX)
    if not sources or not all(isinstance(source, str) and len(source) <= _SOURCE_DIGITS for source in sources):
        raise FormatError(f"`{at}`: `sources` must be beginnings of fingerprints", subject=at)
    samples = take_count(value, "epoch_samples", at=at, most=EPOCH_SAMPLES_MAX)
    entries = take_list(value, "weights", at=at, length_max=CHANGES_MAX)
    return Mix(tuple(sources), samples, decode_history(entries, len(sources), at=at))


def encode_history(mix: Mix) -> list[list[int]]:
    """``[epoch, position, weight, ...]`` of every change of weights."""
    return [[entry.epoch, entry.position, *entry.weights] for entry in mix.history]


def decode_history(entries: Sequence[Any], sources: int, *, at: str) -> tuple[WeightsFrom, ...]:
    """Changes of weights from ``[epoch, position, weight, ...]``; FormatError if they are none."""
    found = []
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) != 2 + sources:
            raise _no_history(at)
        if not all(type(number) is int and 0 <= number <= POSITION_MAX for number in entry):
            raise _no_history(at)
        if not 0 < sum(entry[2:]) <= PERIOD_MAX:
            raise _no_history(at)
        found.append(WeightsFrom(entry[0], entry[1], tuple(entry[2:])))
    places = [(entry.epoch, entry.position) for entry in found]
    if not places or places[0] != (0, 0) or any(second <= first for first, second in pairwise(places)):
        raise _no_history(at)
    return tuple(found)


def _no_history(at: str) -> FormatError:
    return FormatError(
        f"`{at}`: `weights` must be lists of epoch, position and a whole weight for every source, in ascending order "
        "from the beginning",
        subject=at,
    )
