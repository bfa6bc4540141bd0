"""What a block's reuse is worth, and that the least of it goes first: by the formula, and by replays of histories."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.eviction import ATTENTION_TOKENS, Order, Use, rank, recompute_cost

HALF_LIFE_S = 100.0


def worth(use: Use, cost: float, num_bytes: int, now: float) -> float:
    """As the module's own words have it, in numbers that would overflow for long histories."""
    return use.count * 2.0 ** (-(now - use.at) / HALF_LIFE_S) * cost / num_bytes


def test_uses_fade_by_half_in_a_half_life() -> None:
    use = Use(1.0, 0.0).again(HALF_LIFE_S, HALF_LIFE_S)
    assert use == Use(1.5, HALF_LIFE_S)
    assert use.again(HALF_LIFE_S, HALF_LIFE_S) == Use(2.5, HALF_LIFE_S)
    assert Use(1.0, 5.0).again(3.0, HALF_LIFE_S) == Use(2.0, 5.0), "a clock never goes back"


def test_a_block_deep_in_a_prompt_costs_more() -> None:
    assert recompute_cost(0, 64) == 64
    assert recompute_cost(ATTENTION_TOKENS, 64) == 128
    assert recompute_cost(0, 128) == 128


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1e3), st.floats(0, 1e4), st.floats(1, 1e6), st.integers(1, 1 << 30)),
        min_size=2,
        max_size=2,
    )
)
def test_the_rank_has_the_order_of_the_worth_at_any_time(two: list[tuple[float, float, float, int]]) -> None:
    now = 1e4
    ranks = [rank(Use(count, at), cost, size, HALF_LIFE_S) for count, at, cost, size in two]
    worths = [math.log2(count * cost / size) - (now - at) / HALF_LIFE_S for count, at, cost, size in two]
    if abs(worths[0] - worths[1]) > 1e-6:
        assert (ranks[0] < ranks[1]) == (worths[0] < worths[1])
    assert worth(Use(1.0, now), 64, 1, now) == 64


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((Use(3, 0), 64.0, 100), (Use(1, 0), 64.0, 100)),
        ((Use(1, 0), 128.0, 100), (Use(1, 0), 64.0, 100)),
        ((Use(1, 0), 64.0, 100), (Use(1, 0), 64.0, 200)),
        ((Use(1, 50), 64.0, 100), (Use(1, 0), 64.0, 100)),
        ((Use(1, 101), 64.0, 100), (Use(2, 0), 64.0, 100)),
        ((Use(2, 0), 64.0, 100), (Use(1, 99), 64.0, 100)),
    ],
)
def test_what_is_used_more_or_later_costs_more_or_is_smaller_stays(
    better: tuple[Use, float, int], worse: tuple[Use, float, int]
) -> None:
    assert rank(*better, HALF_LIFE_S) > rank(*worse, HALF_LIFE_S)


def test_the_order_gives_the_least_and_finds_out_late_what_has_changed() -> None:
    ranks: dict[bytes, float | None] = {b"a": 1.0, b"b": 2.0, b"c": 3.0, b"d": 4.0}
    order = Order(lambda key: ranks[key])
    for key in ranks:
        order.consider(key)
    ranks[b"a"] = 3.5  # used meanwhile
    ranks[b"b"] = None  # may not go now
    assert order.least() == b"c"
    ranks[b"b"] = 0.5
    order.consider(b"b")
    ranks[b"d"] = 0.25
    order.consider(b"d")
    order.consider(b"d")
    assert [order.least() for _ in range(4)] == [b"d", b"b", b"a", None]


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_of_a_long_history_evicts_what_was_worth_least_each_time(seed: int) -> None:
    """Against a plain search through all of them."""
    random, room, now = Random(seed), 12, 0.0
    there: dict[bytes, tuple[Use, float, int]] = {}
    order = Order(lambda key: rank(*there[key], HALF_LIFE_S) if key in there else None)
    for _ in range(600):
        now += random.expovariate(1 / 5)
        key = b"%d" % int(random.paretovariate(0.6))
        if key in there:
            use, cost, size = there[key]
            there[key] = use.again(now, HALF_LIFE_S), cost, size
            continue
        if len(there) == room:
            least = min(there, key=lambda k: rank(*there[k], HALF_LIFE_S))
            victim = order.least()
            assert victim == least
            del there[victim]
        there[key] = Use(1.0, now), recompute_cost(random.randrange(8192), 64), random.choice((1000, 4000))
        order.consider(key)


def test_what_is_used_often_outlives_a_flood_of_what_is_used_once() -> None:
    """A plain least-recently-used order would have lost it."""
    room, there = 8, dict[bytes, Use]()
    order = Order(lambda key: rank(there[key], 64, 1000, HALF_LIFE_S) if key in there else None)
    for k in range(4):
        there[b"hot"] = there[b"hot"].again(float(k), HALF_LIFE_S) if k else Use(1.0, 0.0)
    order.consider(b"hot")
    for k in range(3 * room):
        key, now = b"once-%d" % k, 5.0 + k
        if len(there) == room:
            victim = order.least()
            assert victim is not None
            del there[victim]
        there[key] = Use(1.0, now)
        order.consider(key)
    assert b"hot" in there
