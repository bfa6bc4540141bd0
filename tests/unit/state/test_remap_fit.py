"""Two pools as a pair of sidecars has them: alike, convertible, or not each other's."""

from dataclasses import replace

import pytest

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout, Shard
from shared.state.remap import fit_between

KV = StateComponent("kv", IndexKind.PAGE, 4, (2, 4), (3,), "uint8", (0, 1), 1)
WINDOW = StateComponent("window", IndexKind.RING, 8, (), (3,), "uint8", (1,))
WHOLE = (KV, WINDOW)
POOL = PoolLayout(WHOLE, 6, 2)


def rank(number: int, tp_size: int) -> PoolLayout:
    heads = (number + 1) * 4 // tp_size - number * 4 // tp_size
    return PoolLayout((replace(KV, outer=(2, heads)), WINDOW), 3, 1, Shard(WHOLE, tp_size, number))


@pytest.mark.parametrize("other", [POOL, PoolLayout(WHOLE, 99, 7), PoolLayout(WHOLE, 1, 1, Shard(WHOLE, 1, 0))])
def test_pools_that_are_cut_alike_need_no_fit(other: PoolLayout) -> None:
    assert fit_between(POOL, other) is None
    assert fit_between(other, POOL) is None
    assert fit_between(rank(1, 2), rank(1, 2)) is None


def test_a_fit_says_which_heads_go_and_whose_units_count() -> None:
    found = fit_between(PoolLayout((replace(KV, unit_tokens=16), WINDOW), 6, 2), rank(1, 2))
    assert found is not None
    assert (found.source_rank, found.target_rank, found.cuts_heads) == (0, 1, True)
    assert found.components == (replace(KV, unit_tokens=16, outer=(2, 2)), WINDOW)
    assert found.target_units(0, 1, 1, 16) == (4, 8)
    assert found.target_units(1, 0, 1, 5) == (0, 1)
    other = fit_between(POOL, PoolLayout((WINDOW, replace(KV, unit_tokens=3)), 6, 2))
    assert other is not None
    assert (other.cuts_heads, other.target_index(0), other.target_index(1)) == (False, 1, 0)
    assert other.target_units(0, 1, 2, 2) == (1, 4)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (PoolLayout((KV, replace(WINDOW, unit_tokens=6)), 6, 2), POOL, "window: unit_tokens is 6 at the source, 8 at"),
        (PoolLayout((replace(KV, unit_tokens=1 << 17), WINDOW), 6, 2), POOL, "kv: unit_tokens is 131072 at the source"),
        (PoolLayout((KV,), 6, 2), POOL, "component window: the source does not have it"),
        (rank(0, 2), rank(1, 2), "nothing goes from rank 0 of 2 to rank 1 of 2"),
        (replace(rank(0, 2), shard=Shard(WHOLE, 2, 5)), POOL, "there is no rank 5 among 2"),
        (replace(rank(0, 2), shard=Shard(WHOLE, 4, 0)), POOL, "the pool is not what rank 0 of 4 has"),
        (replace(rank(0, 2), shard=Shard(WHOLE, 65, 0)), POOL, "there are 65 ranks"),
    ],
)
def test_what_is_not_each_others_is_named(source: PoolLayout, target: PoolLayout, message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        fit_between(source, target)
