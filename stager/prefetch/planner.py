"""Which shards to fetch and which to give up, from what is known of the future. Pure.

The next use of every shard is known, so eviction is by the farthest next use (Belady 1966), and nothing is fetched for
which something needed sooner would have to go. What a reader's window holds is needed now, and goes only when a reader
stands waiting and nothing else is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key")

NEVER = float("inf")
EVENTUALLY = 1e300
_NOW = -1.0


class Held(Protocol):
    """A shard that is here: its bytes, and when a reader last asked for it, negative if none did since the start."""

    @property
    def size(self) -> int: ...

    @property
    def last_used_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[Key]):
    """What a plan is made from.

    Sizes are in bytes, distances in samples until a use: `EVENTUALLY` is some day, `NEVER` is none that is known.

    Attributes:
        capacity_bytes: The bound on all that is here, coming or partial.
        here: Visible shards.
        coming: Shards in flight; they are never given up.
        partial: What earlier, failed fetches left in staging; it counts as room for its own shard only.
        kept: Shards that are not given up now, whatever the need.
        wanted: Shards that readers wait for, the longest waiting first, as (shard, bytes).
        upcoming: Shards by their next use, nearest first, as (distance, shard, bytes); may repeat and be long: it is read as
            far as the capacity reaches.
        next_use: The distance of a shard's next use, `NEVER` if none is known.
        slots: How many more fetches may run ahead of need.
        wanted_slots: How many more fetches of wanted shards may run.
    """

    capacity_bytes: int
    here: Mapping[Key, Held]
    coming: Mapping[Key, int]
    partial: Mapping[Key, int]
    kept: Collection[Key]
    wanted: Sequence[tuple[Key, int]]
    upcoming: Iterable[tuple[float, Key, int]]
    next_use: Callable[[Key], float]
    slots: int
    wanted_slots: int


@dataclass(frozen=True, slots=True)
class Fetch(Generic[Key]):
    """Fetch a shard; ``wanted`` by a reader that stands waiting, or ahead of its use."""

    key: Key
    size: int
    wanted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Evict(Generic[Key]):
    """Give up a shard that is here, or what is left in staging of one, and why."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Evictions to carry out first, then fetches in order; ``blocked`` is the first that has no room for now."""

    evict: tuple[Evict[Key], ...]
    fetch: tuple[Fetch[Key], ...]
    blocked: Key | None = None


def plan(snapshot: Snapshot[Key]) -> Plan[Key]:
    """What to do next."""
    room = _Room(snapshot)
    fetch: list[Fetch[Key]] = []
    room.shrink_to_bound()
    slots = {True: snapshot.wanted_slots, False: snapshot.slots}
    for distance, key, size, is_wanted in _targets(snapshot):
        if key in snapshot.here or key in snapshot.coming or slots[is_wanted] <= 0:
            continue
        # What was given up for something nearer is not fetched by the same plan: it waits for the next one.
        if room.gave_up(key) or not room.make(key, size, distance):
            return Plan(tuple(room.evict), tuple(fetch), key)
        slots[is_wanted] -= 1
        fetch.append(Fetch(key, size, is_wanted, _reason(distance)))
        if slots[False] <= 0 and not is_wanted:
            break
    return Plan(tuple(room.evict), tuple(fetch))


def _targets(snapshot: Snapshot[Key]) -> Iterable[tuple[float, Key, int, bool]]:
    """Distinct shards in order of need: all that are wanted, then as many as the capacity holds."""
    seen: set[Key] = set()
    room = snapshot.capacity_bytes
    for key, size in snapshot.wanted:
        if key not in seen:
            seen.add(key)
            room -= size
            yield _NOW, key, size, True
    if snapshot.slots <= 0:
        return
    for distance, key, size in snapshot.upcoming:
        if key in seen:
            continue
        seen.add(key)
        room -= size
        if room < 0:
            return
        yield distance, key, size, False


def _reason(distance: float) -> str:
    if distance == _NOW:
        return "a reader waits for it"
    return "there is room for it" if distance == EVENTUALLY else f"it is needed in {distance:.0f} samples"


class _Room(Generic[Key]):
    """Free bytes, and what could be given up for more."""

    def __init__(self, snapshot: Snapshot[Key]) -> None:
        self._snapshot = snapshot
        self._held = {key: shard.size for key, shard in snapshot.here.items()}
        for key, size in snapshot.partial.items():
            self._held[key] = size
        self._wanted = {key for key, _ in snapshot.wanted}
        self._victims: list[tuple[float, float, Key]] | None = None
        self.free = snapshot.capacity_bytes - sum(self._held.values()) - sum(snapshot.coming.values())
        self.evict: list[Evict[Key]] = []

    def shrink_to_bound(self) -> None:
        """Give up what is over the bound: the bound may have been lowered, or the disk be fuller than it allows."""
        while self.free < 0:
            victims = self._sorted_victims()
            if not victims:
                return
            self._give_up(victims.pop()[2], "the cache is over its bound")

    def gave_up(self, key: Key) -> bool:
        return any(eviction.key == key for eviction in self.evict)

    def make(self, key: Key, size: int, distance: float) -> bool:
        """Room for a shard needed in ``distance``, by giving up what is needed later; nothing is given up in vain."""
        own = self._held.pop(key, 0)
        lacking = size - own - self.free
        chosen: list[Key] = []
        if lacking > 0:
            for next_use, unused, victim in reversed(self._sorted_victims()):
                if lacking <= 0 or next_use <= distance:
                    break
                if distance == EVENTUALLY and unused <= 0:
                    # What somebody uses, if only by asking, is worth more than what somebody may use some day.
                    break
                if victim != key and victim in self._held:
                    chosen.append(victim)
                    lacking -= self._held[victim]
        if lacking > 0:
            if own:
                self._held[key] = own
            return False
        # A large one may have made up for small ones that were chosen before it: spare those, the nearest first.
        for victim in chosen[::-1]:
            if self._held[victim] <= -lacking:
                lacking += self._held[victim]
                chosen.remove(victim)
        for victim in chosen:
            self._give_up(victim, f"its next use is farther than that of {key}")
        self.free -= size - own
        return True

    def _sorted_victims(self) -> list[tuple[float, float, Key]]:
        """Farthest next use last; among those of no known use, the least recently used last. Sorted once, when needed."""
        snapshot = self._snapshot
        if self._victims is None:
            victims = []
            for key in self._held:
                if key in snapshot.kept or key in self._wanted:
                    continue
                shard = snapshot.here.get(key)
                # What is only partly here is of less worth than what is whole.
                unused = NEVER if shard is None else -shard.last_used_s
                victims.append((snapshot.next_use(key), unused, key))
            self._victims = sorted(victims, key=lambda victim: victim[:2])
        return self._victims

    def _give_up(self, key: Key, reason: str) -> None:
        self.free += self._held.pop(key)
        self.evict.append(Evict(key, reason))
