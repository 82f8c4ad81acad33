"""Which shards to fetch and which to give up, from what is known of the future. Pure.

The next use of every shard is known, so eviction is by the farthest next use (Belady 1966), and nothing is fetched for
which something needed sooner would have to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key")

LOOKAHEAD_USES_MAX = 20_000
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Here:
    """A shard that is here: its bytes, and when it was last used."""

    size: int
    last_used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetch(Generic[Key]):
    """Fetch a shard; ``wanted`` by a reader that stands waiting, or ahead of its use."""

    key: Key
    size: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Evict(Generic[Key]):
    """Give a shard up, and why."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Evictions to carry out first, then fetches in order; ``blocked`` is what has no room for now."""

    evict: tuple[Evict[Key], ...]
    fetch: tuple[Fetch[Key], ...]
    blocked: Key | None = None


def plan(
    *,
    capacity_bytes: int,
    here: Mapping[Key, Here],
    coming: Mapping[Key, int],
    wanted: Sequence[tuple[Key, int]],
    upcoming: Iterable[tuple[Key, int]],
    slots: int,
) -> Plan[Key]:
    """What to do next.

    Args:
        capacity_bytes: The bound on all that is here or coming.
        here: Visible shards.
        coming: Shards in flight, with their bytes; they are never given up.
        wanted: Shards that readers wait for, the longest waiting first, with their bytes.
        upcoming: Shards in the order of their next use, nearest first, with their bytes; may repeat and be long: it
            is read as far as the capacity reaches and what is here is met again.
        slots: How many more fetches may run.
    """
    targets, ranks = _targets(capacity_bytes, wanted, upcoming, here)
    held = {key: shard.size for key, shard in here.items()}
    free = capacity_bytes - sum(held.values()) - sum(coming.values())
    # Farthest next use first; among those of no known use, the least recently used.
    victims = sorted(held, key=lambda key: (ranks.get(key, _NEVER), -here[key].last_used_s))
    evict: list[Evict[Key]] = []
    fetch: list[Fetch[Key]] = []
    while free < 0 and victims:
        free += _give_up(victims.pop(), held, evict, "the cache is over its bound")
    for key, size, is_wanted in targets:
        if len(fetch) >= slots:
            break
        if key in held or key in coming:
            continue
        chosen, gained = _make_room(size - free, ranks[key], victims, ranks, held)
        if free + gained < size:
            return Plan(tuple(evict), tuple(fetch), key)
        for victim in chosen:
            victims.remove(victim)
            free += _give_up(victim, held, evict, f"its next use is farther than that of {key}")
        free -= size
        fetch.append(Fetch(key, size, is_wanted))
    return Plan(tuple(evict), tuple(fetch))


def _targets(
    capacity_bytes: int,
    wanted: Sequence[tuple[Key, int]],
    upcoming: Iterable[tuple[Key, int]],
    here: Mapping[Key, Here],
) -> tuple[list[tuple[Key, int, bool]], dict[Key, int]]:
    """Distinct shards in order of need, as many as the capacity holds; and by shard, how soon it is needed.

    Beyond the capacity only what is here is looked for: of two that must go, the one of the farther use is to go.
    """
    targets: list[tuple[Key, int, bool]] = []
    ranks: dict[Key, int] = {}
    room = capacity_bytes
    for key, size in wanted:
        if key not in ranks:
            ranks[key] = len(ranks)
            targets.append((key, size, True))
            room -= size
    unranked = here.keys() - ranks.keys()
    for key, size in islice(upcoming, LOOKAHEAD_USES_MAX):
        if room <= 0 and not unranked:
            break
        if key in ranks:
            continue
        ranks[key] = len(ranks)
        unranked.discard(key)
        room -= size
        if room >= 0:
            targets.append((key, size, False))
    return targets, ranks


def _make_room(
    lacking: int, rank: int, victims: Sequence[Key], ranks: Mapping[Key, int], held: Mapping[Key, int]
) -> tuple[list[Key], int]:
    """Victims, from the last of ``victims``, whose next use is farther than ``rank``, and the bytes they give."""
    chosen: list[Key] = []
    gained = 0
    for victim in reversed(victims):
        if gained >= lacking or ranks.get(victim, _NEVER) <= rank:
            break
        chosen.append(victim)
        gained += held[victim]
    return chosen, gained


def _give_up(key: Key, held: dict[Key, int], evict: list[Evict[Key]], reason: str) -> int:
    evict.append(Evict(key, reason))
    return held.pop(key)
