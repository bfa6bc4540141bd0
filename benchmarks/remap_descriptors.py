"""`remap-descriptors`: by how many runs of bytes a request is named on its way between workers that cut their state
differently, as pieces (what we do) and without them. Counted, not measured."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.report import Row, figure
from shared.engine.pieces import chunk_pieces
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout, Shard
from shared.state.remap import Fit, ShardedState, fit_between, routes
from shared.state.remap.spans import joined
from shared.transfer.pool import Pool, Run
from shared.transfer.regroup import Staging
from shared.transfer.sending import travelling, wire_pieces

DESCRIPTORS = "remap-descriptors"
_NUM_TOKENS, _CHUNK = 2041, 256
_LAYERS, _HEADS, _HEAD_DIM = 32, 8, 128
"""Of an 8B Llama."""


@dataclass(frozen=True, slots=True)
class Pair:
    """P's and D's ranks and tokens a page."""

    tp_sizes: tuple[int, int]
    page_tokens: tuple[int, int]

    @property
    def name(self) -> str:
        if self.tp_sizes[0] != self.tp_sizes[1]:
            return f"{DESCRIPTORS}-tp{self.tp_sizes[0]}-tp{self.tp_sizes[1]}"
        return f"{DESCRIPTORS}-page{self.page_tokens[0]}-page{self.page_tokens[1]}"


PAIRS = (
    Pair((1, 1), (16, 32)),
    Pair((1, 1), (32, 16)),
    Pair((4, 2), (16, 16)),
    Pair((2, 4), (16, 16)),
    Pair((8, 3), (16, 16)),
)


def descriptor_rows() -> list[Row]:
    """Of a request of 2,041 tokens in chunks of 256, all its routes together. Against: what a side would have to name
    if the rows went straight from page to page."""
    rows = []
    for pair in PAIRS:
        as_pieces, straight = count(pair)
        against = figure(f"{pair.name}-straight", "runs", [float(straight)])
        rows += [figure(pair.name, "runs", [float(as_pieces)], against=against.value), against]
    return rows


def count(pair: Pair) -> tuple[int, int]:
    """(runs of bytes as pieces, without them)."""
    source, target = (_state(tp, page) for tp, page in zip(pair.tp_sizes, pair.page_tokens, strict=True))
    as_pieces = straight = 0
    for way in routes(source, target):
        ours, theirs = _layout(source, way.source_rank), _layout(target, way.target_rank)
        fit = fit_between(ours, theirs)
        assert fit is not None
        for piece, run_length in _chunks(fit, ours, theirs):
            as_pieces += piece
            straight += run_length
    return as_pieces, straight


def _chunks(fit: Fit, ours: PoolLayout, theirs: PoolLayout) -> Iterator[tuple[int, int]]:
    random = np.random.default_rng(0)
    pages, others = (tuple(random.permutation(layout.num_pages).tolist()) for layout in (ours, theirs))
    nothing = Pool(replace(ours, num_pages=0), memoryview(bytearray(1)))
    for start in range(0, _NUM_TOKENS, _CHUNK):
        end = min(start + _CHUNK, _NUM_TOKENS)
        pieces = travelling(fit, chunk_pieces(ours, start, end, end == _NUM_TOKENS, pages, 0))
        runs = [Run(p.component, p.units, p.rows_in_last, p.layers(_LAYERS)) for p in pieces]
        wire = wire_pieces(nothing, pieces, with_units=False)
        staging = Staging(fit, wire, nothing)
        for number, piece in enumerate(wire):
            gathered = staging.gather_spans(number, runs[number].units, piece.layers)
            first, after = fit.target_units(piece.component, piece.first_unit, piece.num_units, piece.rows_in_last)
            scattered = staging.scatter_spans(number, others[first:after], piece.layers)
            in_piece = gathered[np.argsort(gathered[:, 1]), 1:]
            yield len(joined(in_piece)), max(len(gathered), len(scattered))


def _state(tp_size: int, page_tokens: int) -> ShardedState:
    shape, layers = (2, _HEADS), tuple(range(_LAYERS))
    kv = StateComponent("kv", IndexKind.PAGE, page_tokens, shape, (_HEAD_DIM,), "float16", layers, shard_axis=1)
    return ShardedState((kv,), tp_size)


def _layout(state: ShardedState, rank: int) -> PoolLayout:
    num_pages = -(-_NUM_TOKENS // state.components[0].unit_tokens)
    return PoolLayout(state.of_rank(rank), num_pages, 1, Shard(state.components, state.tp_size, rank))
