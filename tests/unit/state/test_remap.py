"""State moved between groups that cut it differently, against the same state cut for the target from the start."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.state.components import IndexKind, StateComponent
from shared.state.remap import Chunk, ShardedState, copy_spans, routes
from tests.support_remap import Rank, Whole, move, piece_of, poisoned, put, random_whole

SLOTS = 3


@dataclass
class Case:
    source: ShardedState
    target: ShardedState
    num_tokens: int
    prefix_len: int
    """Tokens that the target holds already."""
    chunks: tuple[Chunk, ...]
    whole: Whole
    sources: list[Rank]
    targets: list[Rank]

    def last(self) -> dict[str, int]:
        """How many positions of each request-indexed component the target must end up with."""
        pairs = ((c, self.target.components[self.target.index_of(c.name)]) for c in self.source.components)
        return {a.name: min(self.num_tokens, a.unit_tokens, b.unit_tokens) for a, b in pairs}

    def expected(self, one: Rank) -> bytes:
        """The target's pool with the rows that it lacked put in one by one, and all else as it was."""
        wanted = replace(one, pool=one.pool.copy())
        put(wanted, self.whole, range(self.prefix_len, self.num_tokens), self.last())
        return wanted.pool.tobytes()


@st.composite
def component_pairs(draw: st.DrawFn, name: str, pages: tuple[int, int]) -> tuple[StateComponent, StateComponent]:
    kind = draw(st.sampled_from(list(IndexKind)))
    units = {IndexKind.PAGE: pages, IndexKind.REQUEST: (1, 1)}.get(kind) or draw(
        st.sampled_from([(5, 5), (3, 8), (8, 3)])
    )
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    axis = draw(st.none() | st.integers(0, len(outer)))
    if axis is not None:
        outer.insert(axis, draw(st.integers(1, 8)))
    inner = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    layers = draw(st.sampled_from([(0,), (1, 4), (0, 1, 2)]))
    dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
    first = StateComponent(name, kind, units[0], tuple(outer), inner, dtype, layers, axis)
    return first, replace(first, unit_tokens=units[1], layers=tuple(draw(st.permutations(layers))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page = draw(st.sampled_from([1, 2, 3, 4, 16])), draw(st.sampled_from([1, 2, 3, 4, 16]))
    pairs = [draw(component_pairs(f"c{k}", page)) for k in range(draw(st.integers(1, 3)))]
    num_tokens = draw(st.integers(1, 40))
    prefix_len = draw(st.integers(0, num_tokens))
    source = ShardedState(tuple(a for a, _ in pairs), draw(st.integers(1, 8)))
    target = ShardedState(tuple(b for _, b in draw(st.permutations(pairs))), draw(st.integers(1, 8)))
    whole = random_whole(source.components, num_tokens, seed=7)
    sides = []
    for side, state in enumerate((source, target)):
        first_page = draw(st.integers(0, prefix_len // page[side]))
        count = -(-num_tokens // page[side]) - first_page
        ids = draw(st.permutations(range(count + 2)))[:count]
        slot = draw(st.integers(0, SLOTS - 1))
        sizes = (count + 2, SLOTS)
        sides.append([poisoned(state, k, ids, slot, sizes, side, first_page) for k in range(state.tp_size)])
    for one in sides[0]:
        start = one.place.first_page * page[0]
        put(one, whole, range(start, num_tokens), {c.name: min(num_tokens, c.unit_tokens) for c in source.components})
    return Case(source, target, num_tokens, prefix_len, draw(chunked(prefix_len, num_tokens)), whole, *sides)


@st.composite
def chunked(draw: st.DrawFn, start: int, stop: int) -> tuple[Chunk, ...]:
    """The run from `start` to `stop` in chunks, the last of which brings the rest; perhaps layer by layer."""
    cuts = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=3))})
    runs = tuple(pairwise(cuts))
    if draw(st.booleans()):
        chunks = [Chunk(tokens=(run,)) for run in runs[:-1]]
        chunks.append(Chunk(tokens=runs[-1:], processed_len=stop))
    else:
        chunks = [Chunk(tokens=runs, processed_len=stop)]
    if draw(st.booleans()):
        chunks = [replace(c, layers=frozenset(some)) for c in chunks for some in ((0, 2), (1,), (4,))]
    return tuple(chunks)


@given(cases())
def test_what_arrives_is_the_state_as_the_target_cuts_it(case: Case) -> None:
    wanted = [case.expected(one) for one in case.targets]
    untouched = [one.pool.tobytes() for one in case.sources]
    for route in routes(case.source, case.target):
        source, target = case.sources[route.source_rank], case.targets[route.target_rank]
        for chunk in case.chunks:
            move(route, source, target, chunk, case.num_tokens)
    assert [one.pool.tobytes() for one in case.targets] == wanted
    assert [one.pool.tobytes() for one in case.sources] == untouched


@given(cases())
def test_there_and_back_is_the_same_piece(case: Case) -> None:
    """gather(scatter(x)) == x: no byte of a piece is lost on the way, and none overwrites another."""
    random = np.random.default_rng(3)
    for route in routes(case.source, case.target):
        source, target = case.sources[route.source_rank], case.targets[route.target_rank]
        place, empty = piece_of(route, case.num_tokens)
        for chunk in case.chunks:
            piece = random.integers(0, 256, len(empty), dtype=np.uint8)
            spans = route.scatter(place, target.place, chunk)
            copy_spans(piece, target.pool, spans)
            again, wanted = empty.copy(), empty.copy()
            copy_spans(target.pool, again, spans[:, [1, 0, 2]])
            copy_spans(piece, wanted, spans[:, [0, 0, 2]])
            assert again.tobytes() == wanted.tobytes()
            assert (np.count_nonzero(piece != empty) > 0) or not len(piece)
            back = route.gather(source.place, place, chunk)
            copy_spans(piece, source.pool, back[:, [1, 0, 2]])
            copy_spans(source.pool, again := empty.copy(), back)
            assert again.tobytes() == wanted.tobytes()


@given(cases())
def test_each_byte_goes_once_and_in_as_few_spans_as_can_be(case: Case) -> None:
    ways = routes(case.source, case.target)
    pairs = {(way.source_rank, way.target_rank) for way in ways}
    assert len(pairs) == len(ways), "two pieces of one chunk for one rank from one rank"
    arrived = [0] * case.target.tp_size
    for route in ways:
        source, target = case.sources[route.source_rank].place, case.targets[route.target_rank].place
        for chunk in case.chunks:
            size = route.num_bytes(chunk)
            arrived[route.target_rank] += size
            place, _ = piece_of(route, case.num_tokens)
            for spans in (route.gather(source, place, chunk), route.scatter(place, target, chunk)):
                assert spans[:, -1].sum() == size
                assert (spans[:, -1] > 0).all()
                ends = spans[:-1, :-1] + spans[:-1, -1:]
                assert not (ends == spans[1:, :-1]).all(axis=1).any(), "two neighbours were not joined"
    for rank, size in enumerate(arrived):
        rows = {c.name: case.last()[c.name] for c in case.target.components}
        rows |= {c.name: case.num_tokens - case.prefix_len for c in case.target.components if c.index is IndexKind.PAGE}
        assert size == sum(c.row_bytes * rows[c.name] * c.num_layers for c in case.target.of_rank(rank))


@given(cases())
def test_a_piece_is_a_pool_of_the_sources_units_with_the_heads_that_go(case: Case) -> None:
    for route in routes(case.source, case.target):
        for ours, piece, heads in zip(case.source.components, route.components, route.heads, strict=True):
            axis = ours.shard_axis
            assert piece == ours if axis is None else piece.outer[axis] == len(heads)
            assert replace(piece, outer=ours.outer) == ours
        if case.source.tp_size == case.target.tp_size == 1:
            assert route.components == case.source.components


@given(st.data())
def test_spans_of_any_lengths_are_copied_and_nothing_else(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from([1, 4, 6]))
    lengths = data.draw(st.lists(st.integers(1, 9), max_size=12))
    source = np.random.default_rng(1).integers(0, 256, 997, dtype=np.uint8)
    target = np.random.default_rng(2).integers(0, 256, 811, dtype=np.uint8)
    wanted, spans, at = target.copy(), [], data.draw(st.integers(0, 3))
    for length in data.draw(st.permutations(lengths)):
        start = data.draw(st.integers(0, 100)) * row
        spans.append((start, at, length * row))
        wanted[at : at + length * row] = source[start : start + length * row]
        at += (length + data.draw(st.integers(0, 2))) * row
    copy_spans(source, target, np.array(spans, dtype=np.int64).reshape(-1, 3))
    assert target.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("span", [(95, 0, 6), (0, 95, 6), (100, 0, 1), (0, 200, 1)])
def test_a_span_outside_is_not_copied(span: tuple[int, int, int]) -> None:
    source, target = np.ones(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    with pytest.raises(IndexError):
        copy_spans(source, target, np.array([span], dtype=np.int64))
    assert not target.any()
