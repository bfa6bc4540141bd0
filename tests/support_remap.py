"""A whole model state as plain arrays, and pools filled from it row by row: what a remap must come to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.state.remap import Chunk, Place, Route, ShardedState, copy_spans, heads_held
from shared.state.remap.spans import Bytes


@dataclass
class Whole:
    """rows: for each uncut component [layer, position, *outer, *inner], layers in the order that `layers` gives."""

    num_tokens: int
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    layers: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Rank:
    """One rank's pool and where the request lies in it."""

    state: ShardedState
    rank: int
    place: Place
    pool: Bytes


def random_whole(components: Iterable[StateComponent], num_tokens: int, seed: int) -> Whole:
    random, whole = np.random.default_rng(seed), Whole(num_tokens)
    for c in components:
        shape = (c.num_layers, num_tokens, *c.outer, *c.inner)
        size = int(np.prod(shape)) * np.dtype(c.dtype).itemsize
        whole.rows[c.name] = random.integers(0, 256, size, dtype=np.uint8).view(c.dtype).reshape(shape)
        whole.layers[c.name] = sorted(c.layers)
    return whole


def poisoned(state: ShardedState, rank: int, pages: Iterable[int], slot: int, sizes: tuple[int, int], seed: int = 0,
             first_page: int = 0) -> Rank:  # fmt: skip
    """A rank whose pool of `sizes` (pages, slots) holds noise."""
    layout = PoolLayout(state.of_rank(rank), *sizes)
    noise = np.random.default_rng([seed, rank]).integers(0, 256, layout.total_bytes, dtype=np.uint8)
    return Rank(state, rank, Place(layout, tuple(pages), first_page, slot), noise)


def put(one: Rank, whole: Whole, tokens: Iterable[int], last: dict[str, int]) -> None:
    """Writes the rows of `tokens` into a rank's pages, and the last `last[name]` positions of each other component."""
    for index, component in enumerate(one.state.components):
        array = one.place.layout.view(memoryview(one.pool), index)
        rows = whole.rows[component.name]
        if (axis := component.shard_axis) is not None:
            held = heads_held(component.outer[axis], one.state.tp_size, one.rank)
            rows = rows.take(list(held), axis=2 + axis)
        if component.index is IndexKind.PAGE:
            positions = list(tokens)
        else:
            positions = list(range(whole.num_tokens - last.get(component.name, 0), whole.num_tokens))
        for where, layer in enumerate(component.layers):
            of_layer = rows[whole.layers[component.name].index(layer)]
            for position in positions:
                page, row = divmod(position, component.unit_tokens)
                is_page = component.index is IndexKind.PAGE
                unit = one.place.pages[page - one.place.first_page] if is_page else one.place.slot
                cell = (where, unit, *(slice(None),) * len(component.outer), row)
                array[cell] = of_layer[position]


def piece_of(route: Route, num_tokens: int) -> tuple[Place, Bytes]:
    """A piece with room for everything that a route may bring, full of noise, and where the request lies in it."""
    rows = [c.unit_tokens for c in route.components if c.index is IndexKind.PAGE]
    pages = tuple(range(-(-num_tokens // min(rows, default=1))))
    layout = PoolLayout(route.components, len(pages), 1)
    return Place(layout, pages, 0, 0), np.full(layout.total_bytes, 0xA5, dtype=np.uint8)


def move(route: Route, source: Rank, target: Rank, chunk: Chunk, num_tokens: int) -> None:
    """One chunk over one route by way of a piece."""
    place, piece = piece_of(route, num_tokens)
    copy_spans(source.pool, piece, route.gather(source.place, place, chunk))
    copy_spans(piece, target.pool, route.scatter(place, target.place, chunk))
