"""The planner against laws: bounds are kept, the nearest comes first, and no policy fetches less."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from stager.prefetch.planner import Here, plan

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
    for key in data.draw(st.permutations(keys)):
        if sum(shard.size for shard in here.values()) + sum(coming.values()) + sizes[key] <= capacity:
            if data.draw(st.booleans()):
                here[key] = Here(sizes[key], data.draw(st.floats(0, 10)))
            elif data.draw(st.booleans()):
                coming[key] = sizes[key]
    made = plan(
        capacity_bytes=capacity,
        here=here,
        coming=coming,
        wanted=[(key, sizes[key]) for key in wanted],
        upcoming=[(key, sizes[key]) for key in upcoming],
        slots=data.draw(st.integers(0, 5)),
    )
    evicted = [eviction.key for eviction in made.evict]
    fetched = [fetch.key for fetch in made.fetch]
    assert len(set(evicted)) == len(evicted) and set(evicted) <= here.keys()
    assert not set(fetched) & (here.keys() | coming.keys()) and len(set(fetched)) == len(fetched)
    held = sum(shard.size for key, shard in here.items() if key not in evicted)
    assert held + sum(coming.values()) + sum(sizes[key] for key in fetched) <= capacity
    needs = [*wanted, *upcoming]
    for victim in evicted:
        assert fetched and (victim not in needs or needs.index(victim) > needs.index(fetched[0]))
    # Fetches come in order of need, and nothing nearer was left out while there were slots.
    assert [needs.index(key) for key in fetched] == sorted(needs.index(key) for key in fetched)
    for fetch in made.fetch:
        assert fetch.wanted == (fetch.key in wanted)


def test_over_its_bound_a_cache_gives_up_the_least_useful() -> None:
    """A bound that was lowered is reached again: first what nobody needs, the longest unused before."""
    made = plan(
        capacity_bytes=20,
        here={"old": Here(10, 1.0), "new": Here(10, 2.0), "needed": Here(10, 0.0)},
        coming={},
        wanted=[],
        upcoming=[("needed", 10)],
        slots=4,
    )
    assert [eviction.key for eviction in made.evict] == ["old"]


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
        made = plan(
            capacity_bytes=capacity,
            here=here,
            coming={},
            wanted=[(key, 1)],
            upcoming=[(later, 1) for later in uses[place:]],
            slots=1,
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
