"""The planner against laws: bounds are kept, the nearest comes first, and no policy fetches less."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stager.prefetch.planner import EVENTUALLY, NEVER, Plan, Snapshot, plan


def make_plan(
    *,
    capacity_bytes: int,
    here: dict[Any, Here],
    wanted: list[tuple[Any, int]],
    upcoming: list[tuple[Any, int]],
    coming: dict[Any, int] | None = None,
    partial: dict[Any, int] | None = None,
    kept: frozenset[Any] = frozenset(),
    slots: int = 4,
    wanted_slots: int = 4,
) -> Plan[Any]:
    """A plan where the use at place n of ``upcoming`` is n samples away."""
    places: dict[Any, int] = {}
    for place, (key, _) in enumerate(upcoming):
        places.setdefault(key, place)
    return plan(
        Snapshot(
            capacity_bytes=capacity_bytes,
            here=here,
            coming=coming or {},
            partial=partial or {},
            kept=kept,
            wanted=wanted,
            upcoming=[(place, key, size) for place, (key, size) in enumerate(upcoming)],
            next_use=lambda key: places.get(key, NEVER),
            slots=slots,
            wanted_slots=wanted_slots,
        )
    )


@dataclass(frozen=True, slots=True)
class Here:
    """A shard that is here."""

    size: int
    last_used_s: float = 0.0


SIZES = st.dictionaries(st.integers(0, 9), st.integers(1, 30), min_size=1, max_size=10)


@given(st.data())
@settings(max_examples=300)
def test_the_bound_holds_and_nothing_nearer_is_given_up(data: st.DataObject) -> None:
    """After a plan is carried out no byte is over the bound, and every victim is needed later than what replaced it."""
    sizes = data.draw(SIZES)
    capacity = data.draw(st.integers(1, 120))
    keys = sorted(sizes)
    upcoming = data.draw(st.lists(st.sampled_from(keys), max_size=20))
    wanted = data.draw(st.lists(st.sampled_from(keys), max_size=2, unique=True))
    here: dict[int, Here] = {}
    coming: dict[int, int] = {}
    partial: dict[int, int] = {}
    used = 0
    for key in data.draw(st.permutations(keys)):
        if used + sizes[key] > capacity:
            continue
        kind = data.draw(st.integers(0, 3))
        used += sizes[key] if kind else 0
        if kind == 1:
            here[key] = Here(sizes[key], data.draw(st.floats(0, 10)))
        elif kind == 2:
            coming[key] = sizes[key]
        elif kind == 3:
            partial[key] = sizes[key]
    kept = frozenset(data.draw(st.sets(st.sampled_from(keys), max_size=2)))
    slots, wanted_slots = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    made = make_plan(
        capacity_bytes=capacity,
        here=here,
        coming=coming,
        partial=partial,
        kept=kept,
        wanted=[(key, sizes[key]) for key in wanted],
        upcoming=[(key, sizes[key]) for key in upcoming],
        slots=slots,
        wanted_slots=wanted_slots,
    )
    evicted = [eviction.key for eviction in made.evict]
    fetched = [fetch.key for fetch in made.fetch]
    assert len(set(evicted)) == len(evicted) and set(evicted) <= here.keys() | partial.keys()
    assert not set(evicted) & (kept | set(wanted) | set(fetched))
    assert not set(fetched) & (here.keys() | coming.keys()) and len(set(fetched)) == len(fetched)
    gone = set(evicted) | set(fetched)
    held = sum(shard.size for key, shard in here.items() if key not in gone)
    held += sum(size for key, size in partial.items() if key not in gone)
    assert held + sum(coming.values()) + sum(sizes[key] for key in fetched) <= capacity
    needs = [*wanted, *upcoming]
    for victim in evicted:
        assert fetched and (victim not in needs or needs.index(victim) > needs.index(fetched[0]))
    # Fetches come in order of need, and nothing nearer was left out while there were slots.
    assert [needs.index(key) for key in fetched] == sorted(needs.index(key) for key in fetched)
    for fetch in made.fetch:
        assert fetch.wanted == (fetch.key in wanted)
    assert sum(fetch.wanted for fetch in made.fetch) <= wanted_slots
    assert sum(not fetch.wanted for fetch in made.fetch) <= slots


def test_over_its_bound_a_cache_gives_up_the_least_useful() -> None:
    """A bound that was lowered is reached again: first what nobody needs, the longest unused before."""
    made = make_plan(
        capacity_bytes=20,
        here={"old": Here(10, 1.0), "new": Here(10, 2.0), "needed": Here(10, 0.0)},
        wanted=[],
        upcoming=[("needed", 10)],
        slots=4,
    )
    assert [eviction.key for eviction in made.evict] == ["old"]


def test_what_a_large_victim_makes_up_for_is_spared() -> None:
    """A small one that is needed later is kept when a large one has to go as well."""
    made = make_plan(
        capacity_bytes=33,
        here={"large": Here(30)},
        partial={"small": 1},
        wanted=[],
        upcoming=[("next", 4), ("large", 30), ("small", 1)],
        slots=2,
    )
    assert [eviction.key for eviction in made.evict] == ["large"]
    assert [fetch.key for fetch in made.fetch] == ["next"]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=200)
def test_no_policy_fetches_fewer_shards(uses: list[int], capacity: int) -> None:
    """On demand, with shards of one size, the number of fetches is the least that any choice of victims reaches."""
    here: dict[int, Here] = {}
    fetches = 0
    for place, key in enumerate(uses):
        if key in here:
            continue
        made = make_plan(
            capacity_bytes=capacity,
            here=here,
            wanted=[(key, 1)],
            upcoming=[(later, 1) for later in uses[place:]],
            slots=0,
        )
        for eviction in made.evict:
            del here[eviction.key]
        assert [fetch.key for fetch in made.fetch] == [key]
        here[key] = Here(1)
        fetches += 1

    @cache
    def least(place: int, held: frozenset[int]) -> int:
        if place == len(uses):
            return 0
        key = uses[place]
        if key in held:
            return least(place + 1, held)
        if len(held) < capacity:
            return 1 + least(place + 1, held | {key})
        return 1 + min(least(place + 1, held - {victim} | {key}) for victim in held)

    assert fetches == least(0, frozenset())


def test_what_a_window_holds_goes_last() -> None:
    """Ahead of need nothing in use is given up; for a reader that waits it is, when nothing else is left."""
    here = {"current": Here(10), "later": Here(10)}
    uses = [("current", 10), ("new", 10), ("later", 10)]
    ahead = make_plan(capacity_bytes=20, here=here, wanted=[], upcoming=uses)
    assert [eviction.key for eviction in ahead.evict] == ["later"]
    del here["later"]
    assert make_plan(capacity_bytes=10, here=here, wanted=[], upcoming=uses).fetch == ()
    asked = make_plan(capacity_bytes=10, here=here, wanted=[("new", 10)], upcoming=uses)
    assert [eviction.key for eviction in asked.evict] == ["current"] and asked.blocked is None
    held = make_plan(
        capacity_bytes=10, here=here, wanted=[("new", 10)], upcoming=uses, kept=frozenset({"current"})
    )
    assert held.blocked == "new" and held.evict == ()


def test_demand_does_not_wait_for_slots_of_prefetching() -> None:
    """With every slot ahead of need taken, a wanted shard is still fetched."""
    made = make_plan(capacity_bytes=100, here={}, wanted=[("w", 10)], upcoming=[("u", 10)], slots=0)
    assert [fetch.key for fetch in made.fetch] == ["w"]


def test_what_staging_has_counts_for_its_own_shard() -> None:
    """A half-fetched shard needs no second room, and is given up for others before whole ones of the same worth."""
    own = make_plan(capacity_bytes=10, here={}, partial={"a": 10}, wanted=[("a", 10)], upcoming=[])
    assert [fetch.key for fetch in own.fetch] == ["a"] and own.evict == ()
    other = make_plan(
        capacity_bytes=20, here={"b": Here(10, 5.0)}, partial={"a": 10}, wanted=[("c", 10)], upcoming=[]
    )
    assert [eviction.key for eviction in other.evict] == ["a"]


def test_what_may_be_used_some_day_displaces_nothing_that_is_used() -> None:
    """Without an order, prefetching takes the room of what nobody asked for, never of what somebody did."""

    def some_day(here: dict[str, Here]) -> Plan[str]:
        return plan(
            Snapshot(
                capacity_bytes=20,
                here=here,
                coming={},
                partial={},
                kept=(),
                wanted=[],
                upcoming=[(EVENTUALLY, "new", 10)],
                next_use=lambda key: EVENTUALLY if key == "sibling" else NEVER,
                slots=1,
                wanted_slots=1,
            )
        )

    assert [
        eviction.key for eviction in some_day({"used": Here(10, 5.0), "stale": Here(10, -1.0)}).evict
    ] == ["stale"]
    assert some_day({"used": Here(10, 5.0), "sibling": Here(10, -1.0)}).evict == ()
