"""Who sends which heads to whom, for every number of ranks and heads up to 8, and what is refused."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.state.remap import Chunk, Place, ShardedState, check_fit, heads_held, routes
from shared.state.remap.spans import cut_at_units
from tests.support_remap import Rank, move, piece_of, poisoned, put, random_whole

UP_TO_8 = range(1, 9)
NUM_TOKENS = 7
PAGE_TOKENS = (2, 3)
CHUNK = Chunk(((0, 5), (5, NUM_TOKENS)), NUM_TOKENS)


def state(heads: int, tp_size: int, page_tokens: int, other_heads: int | None = None) -> ShardedState:
    """Attention with heads, a latent that every rank holds, and a window with heads."""
    kv = StateComponent("kv", IndexKind.PAGE, page_tokens, (2, heads), (3,), "uint8", (0, 1), 1)
    latent = StateComponent("latent", IndexKind.PAGE, page_tokens, (), (5,), "uint8", (0,))
    window = StateComponent("window", IndexKind.RING, 4, (other_heads or heads, 2), (1,), "float16", (1,), 0)
    return ShardedState((latent, kv, window), tp_size)


@cache
def ranks(heads: int, tp_size: int, side: int, filled: bool) -> list[Rank]:
    cut, whole = (
        state(heads, tp_size, PAGE_TOKENS[side]),
        random_whole(state(heads, 1, 1).components, NUM_TOKENS, heads),
    )
    pages = ((4, 0, 2, 3), (1, 2, 0))[side]
    found = [poisoned(cut, rank, pages, 1, (5, 2), side) for rank in range(tp_size)]
    if filled:
        for one in found:
            put(one, whole, range(NUM_TOKENS), {"window": 4})
    return found


@pytest.mark.parametrize("heads", UP_TO_8)
def test_every_pair_of_sizes_is_byte_exact_in_few_pieces(heads: int) -> None:
    for source_tp, target_tp in product(UP_TO_8, UP_TO_8):
        sources, wanted = ranks(heads, source_tp, 0, True), ranks(heads, target_tp, 1, True)
        targets = [replace(one, pool=one.pool.copy()) for one in ranks(heads, target_tp, 1, False)]
        ways = routes(sources[0].state, wanted[0].state)
        for way in ways:
            move(way, sources[way.source_rank], targets[way.target_rank], CHUNK, NUM_TOKENS)
        got, expected = ([one.pool.tobytes() for one in side] for side in (targets, wanted))
        assert got == expected, (source_tp, target_tp)
        assert len(ways) <= source_tp + target_tp - 1, (source_tp, target_tp)


def test_each_head_reaches_each_rank_that_keeps_it_once_and_from_one_that_has_it() -> None:
    for heads, source_tp, target_tp, other in product(UP_TO_8, UP_TO_8, UP_TO_8, (1, 2, 8)):
        source, target = state(heads, source_tp, 2, other), state(heads, target_tp, 2, other)
        ways = routes(source, target)
        assert len({(way.source_rank, way.target_rank) for way in ways}) == len(ways)
        for index, count in enumerate((1, heads, other)):
            got: dict[int, list[int]] = {rank: [] for rank in range(target_tp)}
            for way in ways:
                assert set(way.heads[index]) <= set(heads_held(count, source_tp, way.source_rank))
                got[way.target_rank] += way.heads[index]
            assert got == {rank: list(heads_held(count, target_tp, rank)) for rank in range(target_tp)}


@pytest.mark.parametrize(
    ("heads", "source_tp", "target_tp"),
    [p for p in product((1, 2, 4, 8), repeat=3)] + [(6, 3, 6), (6, 6, 2), (3, 6, 3), (3, 3, 6)],
)
def test_sizes_that_divide_each_other_take_the_fewest_routes(heads: int, source_tp: int, target_tp: int) -> None:
    ways = routes(state(heads, source_tp, 2), state(heads, target_tp, 2))
    assert len(ways) == max(target_tp, min(source_tp, heads))
    if source_tp == target_tp:
        assert all(way.source_rank == way.target_rank for way in ways)
    if target_tp >= source_tp:
        assert {way.source_rank for way in ways} == set(range(source_tp)), "a source rank stands idle"


@pytest.mark.parametrize("tp_size", UP_TO_8)
def test_state_that_every_rank_has_comes_once_to_each_rank_from_all_in_turn(tp_size: int) -> None:
    latent = StateComponent("latent", IndexKind.PAGE, 4, (), (5,), "uint8", (0,))
    for target_tp in UP_TO_8:
        ways = routes(ShardedState((latent,), tp_size), ShardedState((latent,), target_tp))
        assert [way.target_rank for way in sorted(ways, key=lambda way: way.target_rank)] == list(range(target_tp))
        assert len({way.source_rank for way in ways}) == min(tp_size, target_tp)


def test_ranks_share_the_heads_evenly() -> None:
    for heads, tp_size in product(range(1, 33), range(1, 33)):
        held = [heads_held(heads, tp_size, rank) for rank in range(tp_size)]
        assert {head for some in held for head in some} == set(range(heads))
        assert [some.start for some in held] == sorted(some.start for some in held)
        sizes = {len(some) for some in held}
        copies = {sum(head in some for some in held) for head in range(heads)}
        if tp_size <= heads:
            assert copies == {1}
            assert max(sizes) - min(sizes) <= (heads % tp_size > 0)
        else:
            assert sizes == {1}
            assert max(copies) - min(copies) <= (tp_size % heads > 0)
    assert [list(heads_held(8, 4, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(heads_held(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]


KV = StateComponent("kv", IndexKind.PAGE, 16, (2, 4), (8,), "float16", (0, 1), 1)
INDEX = StateComponent("index", IndexKind.PAGE, 16, (), (8,), "uint8", (0, 1))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((KV,), "component index: the target does not have it"),
        ((KV, INDEX, replace(INDEX, name="more")), "component more: the source does not have it"),
        ((KV, replace(INDEX, dtype="float16")), "component index: dtype is uint8 at the source, float16 at the target"),
        ((replace(KV, outer=(2, 8)), INDEX), r"component kv: outer is \(2, 4\) at the source, \(2, 8\) at the target"),
        ((replace(KV, inner=(4,)), INDEX), r"component kv: inner is \(8,\) at the source, \(4,\) at the target"),
        ((replace(KV, shard_axis=0), INDEX), "component kv: shard_axis is 1 at the source, 0 at the target"),
        ((replace(KV, layers=(0, 2)), INDEX), r"component kv: only one side has it in layers \[1, 2\]"),
        ((replace(KV, layers=(0, 1, 1)), INDEX), "component kv: a layer is named twice"),
        (
            (KV, replace(INDEX, index=IndexKind.RING)),
            "component index: index is page at the source, ring at the target",
        ),
    ],
)
def test_what_does_not_fit_is_named(target: tuple[StateComponent, ...], message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        routes(ShardedState((KV, INDEX), 2), ShardedState(target, 2))


def test_units_and_the_order_of_components_and_layers_may_differ() -> None:
    other = (INDEX, replace(KV, unit_tokens=4, layers=(1, 0)))
    check_fit(ShardedState((KV, INDEX), 2), ShardedState(other, 3))


@pytest.mark.parametrize(
    ("components", "tp_size", "message"),
    [
        ((KV,), 0, "a group of 0 ranks"),
        ((KV, KV), 1, "component kv: there are two of that name"),
        ((replace(KV, shard_axis=2),), 1, r"component kv: outer \(2, 4\) has no axis 2"),
        ((replace(KV, outer=(2, 0)),), 1, "component kv: its rows have no bytes"),
    ],
)
def test_a_group_that_cannot_be_is_refused(components: tuple[StateComponent, ...], tp_size: int, message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        ShardedState(components, tp_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": (1, 2)}, "component latent: tokens 5 to 7 do not lie in pages 0 to 2 of 3 tokens"),
        ({"first_page": 1}, "component latent: tokens 0 to 5 do not lie in pages 1 to 4 of 3 tokens"),
        ({"pages": (1, 2, 5)}, "component latent: a unit lies outside the pool of 5"),
        ({"pages": (1, 2, -1)}, "component latent: a unit lies outside the pool of 5"),
        ({"slot": None}, "component window: the request has no slot"),
        ({"slot": 2}, "component window: a unit lies outside the pool of 2"),
        ({"layout": PoolLayout(state(4, 1, 3).components, 5, 2)}, "component kv: the pool of rank 1 has"),
        ({"layout": PoolLayout(state(4, 2, 3).of_rank(1)[:2], 5, 2)}, "the pool of rank 1 has 2 components, not 3"),
    ],
)
def test_a_place_outside_the_pool_is_refused(change: dict[str, object], message: str) -> None:
    source, target = state(4, 1, 2), state(4, 2, 3)
    way = routes(source, target)[1]
    place = Place(PoolLayout(target.of_rank(1), 5, 2), (1, 2, 0), 0, 1)
    piece, _ = piece_of(way, NUM_TOKENS)
    assert way.scatter(piece, place, CHUNK)[:, 2].sum() == way.num_bytes(CHUNK)
    with pytest.raises(GeometryMismatch, match=message):
        way.scatter(piece, replace(place, **change), CHUNK)


def test_runs_are_cut_where_a_unit_of_either_side_ends() -> None:
    firsts, counts = cut_at_units([(1, 7), (20, 22)], 4, 6)
    assert list(zip(firsts.tolist(), counts.tolist(), strict=True)) == [(1, 3), (4, 2), (6, 1), (20, 2)]


@pytest.mark.parametrize(
    ("tokens", "processed_len", "message"),
    [
        (((3, 2),), None, "positions 3 to 2 are no run"),
        (((-1, 2),), None, "positions -1 to 2 are no run"),
        ((), -1, "nobody processes -1 positions"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(
    tokens: tuple[tuple[int, int], ...], processed_len: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Chunk(tokens, processed_len)


def test_a_run_beyond_all_bounds_costs_nothing() -> None:
    """A peer may name any: it is refused before an array of that length is made."""
    cut = state(4, 1, 2)
    (way,) = routes(cut, cut)
    endless = Chunk(((0, 1 << 60),), 1 << 60)
    assert way.num_bytes(endless) > 1 << 60
    place = Place(PoolLayout(cut.components, 5, 2), (1, 2, 0), 0, 1)
    piece, _ = piece_of(way, NUM_TOKENS)
    for ask in (way.gather, way.scatter):
        with pytest.raises(GeometryMismatch, match="component latent: tokens 0 to"):
            ask(place, piece, endless)
