"""Two given pools: whether what one holds lies in the other as it is, and if not, where it goes.

Runs of units are counted in the source's units on both sides: `first_unit`, `num_units` and `rows_in_last` say which
rows of a request are meant, whatever pages they lie in at the target.
"""

from dataclasses import dataclass

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.state.remap.route import Chunk, Route
from shared.state.remap.routes import routes
from shared.state.remap.sharding import ShardedState
from shared.state.remap.spans import Int64s, Place, Units

MAX_RANKS = 64
_MAX_PAGE_TOKENS = 1 << 16
"""A peer may say anything, and a piece of its units is made before a byte of it has come."""


@dataclass(frozen=True, slots=True)
class Fit:
    """From `source` to `target`. components: what travels, in the source's order and units."""

    source: PoolLayout
    target: PoolLayout
    route: Route
    components: tuple[StateComponent, ...]

    @property
    def source_rank(self) -> int:
        return self.route.source_rank

    @property
    def target_rank(self) -> int:
        return self.route.target_rank

    @property
    def cuts_heads(self) -> bool:
        """Whether only some of what the source's pages hold goes this way."""
        return self.components != self.source.components

    def travels(self, component: int) -> bool:
        """Whether this component of the source goes this way at all."""
        return bool(self.route.heads[component])

    def target_index(self, component: int) -> int:
        """Where the target keeps this component of the source."""
        return self.route.target.index_of(self.source.components[component].name)

    def target_units(
        self, component: int, first_unit: int, num_units: int, rows_in_last: int, held_len: int = 0
    ) -> tuple[int, int]:
        """Half-open: the target's logical units that rows of the run lie in. held_len: so many positions the target has
        already, and their rows do not count."""
        start, stop = self._rows(component, first_unit, num_units, rows_in_last, held_len)
        size = self.target.components[self.target_index(component)].unit_tokens
        return start // size, -(-stop // size)

    def gather(self, component: int, run: tuple[int, int, int], layers: range, units: Units, piece: Place) -> Int64s:
        """[n, 3] (offset in the source, offset in the piece, length) of a run (first_unit, num_units, rows_in_last) in
        `layers` of the source's component, which lies in physical `units`."""
        return self.route.gather(_place(self.source, units, run[0]), piece, self._chunk(component, run, layers))

    def scatter(
        self, component: int, run: tuple[int, int, int], layers: range, piece: Place, units: Units, held_len: int = 0
    ) -> Int64s:
        """[n, 3] (offset in the piece, offset in the target, length); `units` are the target's, from the first one of
        `target_units` on."""
        first, _ = self.target_units(component, *run, held_len)
        chunk = self._chunk(component, run, layers, held_len)
        return self.route.scatter(piece, _place(self.target, units, first), chunk)

    def _chunk(self, component: int, run: tuple[int, int, int], layers: range, held_len: int = 0) -> Chunk:
        one = self.source.components[component]
        chosen = frozenset(one.layers[layers.start : layers.stop])
        if one.index is IndexKind.PAGE:
            rows = self._rows(component, *run, held_len)
            return Chunk((rows,), layers=chosen, components=frozenset((component,)))
        return Chunk(processed_len=run[2], layers=chosen, components=frozenset((component,)))

    def _rows(
        self, component: int, first_unit: int, num_units: int, rows_in_last: int, held_len: int
    ) -> tuple[int, int]:
        one = self.source.components[component]
        start, last = first_unit * one.unit_tokens, (first_unit + num_units - 1) * one.unit_tokens
        stop = last + rows_in_last
        return (min(max(start, held_len), stop) if one.index is IndexKind.PAGE else start), stop


def fit_between(source: PoolLayout, target: PoolLayout) -> Fit | None:
    """None where both are cut alike, so that pages are copied as they are. Raises GeometryMismatch where the two do not
    hold the same state, or no part of it goes from this rank to that."""
    ours, theirs = _group(source), _group(target)
    if ours == theirs and source.rank == target.rank:
        return None
    for route in routes(ours, theirs):
        if (route.source_rank, route.target_rank) == (source.rank, target.rank):
            _check_units(ours, theirs)
            return Fit(source, target, route, route.components)
    raise GeometryMismatch(
        f"nothing goes from rank {source.rank} of {ours.tp_size} to rank {target.rank} of {theirs.tp_size}"
    )


def _group(layout: PoolLayout) -> ShardedState:
    """All ranks' state together. Raises GeometryMismatch unless the pool is what its rank of them has."""
    shard = layout.shard
    if shard is None:
        return ShardedState(layout.components)
    if shard.tp_size > MAX_RANKS:
        raise GeometryMismatch(f"there are {shard.tp_size} ranks, at most {MAX_RANKS} may share a state")
    group = ShardedState(shard.whole, shard.tp_size)
    if group.of_rank(shard.rank) != layout.components:
        raise GeometryMismatch(f"the pool is not what rank {shard.rank} of {shard.tp_size} has")
    return group


def _check_units(source: ShardedState, target: ShardedState) -> None:
    for ours in source.components:
        if ours.unit_tokens > _MAX_PAGE_TOKENS:
            raise GeometryMismatch(f"component {ours.name}: unit_tokens is {ours.unit_tokens} at the source")
        theirs = target.components[target.index_of(ours.name)]
        if ours.index is not IndexKind.PAGE and ours.unit_tokens != theirs.unit_tokens:
            raise GeometryMismatch(
                f"component {ours.name}: unit_tokens is {ours.unit_tokens} at the source, {theirs.unit_tokens} at the "
                "target, and only pages are regrouped"
            )


def _place(layout: PoolLayout, units: Units, first_page: int) -> Place:
    """As pages and as a slot: the chunk says which of the two is meant."""
    return Place(layout, units, first_page, int(units[0]) if len(units) else None)
