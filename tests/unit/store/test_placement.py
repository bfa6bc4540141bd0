"""Where chains belong: evenly, stably, and without asking everybody."""

import secrets
from collections import Counter

from shared.store.placement import asked, homes, ranked

STORES = ("kvstore-0", "kvstore-1", "kvstore-2", "kvstore-3")


def test_everybody_agrees_whatever_the_order_and_the_process() -> None:
    root = bytes(range(16))
    assert ranked(root, STORES) == ranked(root, reversed(STORES))
    assert ranked(root, STORES) == ["kvstore-1", "kvstore-3", "kvstore-0", "kvstore-2"]


def test_chains_are_spread_evenly() -> None:
    counts = Counter(ranked(number.to_bytes(16, "big"), STORES)[0] for number in range(4000))
    assert set(counts) == set(STORES)
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_a_store_that_joins_takes_only_what_is_its_own_and_one_that_leaves_only_that() -> None:
    for _ in range(200):
        root = secrets.token_bytes(16)
        before, after = ranked(root, STORES), ranked(root, (*STORES, "new"))
        assert [name for name in after if name != "new"] == before
        assert ranked(root, before[1:]) == before[1:]


def test_a_lookup_asks_the_homes_and_the_next_in_rank() -> None:
    root = bytes(16)
    order = ranked(root, STORES)
    assert homes(root, STORES, 1) == order[:1]
    assert homes(root, STORES, 2) == order[:2]
    assert asked(root, STORES, 1) == order[:2]
    assert asked(root, STORES, 3) == order[:3]
    assert homes(root, ("only",), 2) == asked(root, ("only",), 2) == ["only"]
    assert homes(root, (), 2) == []
