"""What one source rank sends one target rank, and where it lies on either side.

In between it is a *piece*: a pool of its own, in the source's units, that has only the heads which go this way and only
the units which are sent. So it travels as the source's own pages would, and only the side that has to knows how the
other one cuts its state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.remap.sharding import ShardedState, heads_held, num_heads
from shared.state.remap.spans import Int64s, Place, cut_at_units, joined, on_every_layer


@dataclass(frozen=True, slots=True)
class Chunk:
    """What of a request is sent at once. tokens: half-open runs of positions whose pages' rows go. processed_len: with
    it, REQUEST and RING state goes too, as it is after so many positions. layers: only these, or all. components: only
    these, by their places at the source, or all."""

    tokens: tuple[tuple[int, int], ...] = ()
    processed_len: int | None = None
    layers: frozenset[int] | None = None
    components: frozenset[int] | None = None

    def __post_init__(self) -> None:
        for start, stop in self.tokens:
            if not 0 <= start <= stop:
                raise ValueError(f"positions {start} to {stop} are no run")
        if self.processed_len is not None and self.processed_len < 0:
            raise ValueError(f"nobody processes {self.processed_len} positions")


@dataclass(frozen=True, slots=True)
class _Part:
    """One component's share in a chunk: the rows of the positions in `runs`. unit_tokens: either side's."""

    index: int
    layers: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    unit_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Side:
    """A pool with some of the heads. indices, held: for each component of the source, its place here and the heads."""

    place: Place
    indices: tuple[int, ...]
    held: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """What `source_rank` sends `target_rank`. heads: for each component of the source, in its order, the heads that go
    this way, by their places in the uncut component."""

    source: ShardedState
    target: ShardedState
    source_rank: int
    target_rank: int
    heads: tuple[range, ...]

    @property
    def components(self) -> tuple[StateComponent, ...]:
        """What a piece is made of: the source's components with the heads that go this way."""
        pairs = zip(self.source.components, self.heads, strict=True)
        return tuple(_with_heads(component, len(heads)) for component, heads in pairs)

    def gather(self, source: Place, piece: Place, chunk: Chunk) -> Int64s:
        """[n, 3] (offset in the source rank's pool, offset in the piece, length)."""
        return self._spans(chunk, self._source_side(source), self._piece_side(piece))

    def scatter(self, piece: Place, target: Place, chunk: Chunk) -> Int64s:
        """[n, 3] (offset in the piece, offset in the target rank's pool, length)."""
        return self._spans(chunk, self._piece_side(piece), self._target_side(target))

    def num_bytes(self, chunk: Chunk) -> int:
        """Bytes that go this way. Where it is 0, nothing is sent."""
        num_bytes = 0
        for part in self._parts(chunk):
            component = self.source.components[part.index]
            head_bytes = component.row_bytes // num_heads(component)
            rows = sum(stop - start for start, stop in part.runs) * len(part.layers)
            num_bytes += rows * head_bytes * len(self.heads[part.index])
        return num_bytes

    def _source_side(self, place: Place) -> _Side:
        return _side(self.source, self.source, self.source_rank, place)

    def _target_side(self, place: Place) -> _Side:
        return _side(self.source, self.target, self.target_rank, place)

    def _piece_side(self, place: Place) -> _Side:
        _check_pool("the piece", self.components, place)
        return _Side(place, tuple(range(len(self.heads))), self.heads)

    def _spans(self, chunk: Chunk, *sides: _Side) -> Int64s:
        found = [np.empty((0, len(sides) + 1), dtype=np.int64)]
        for part in self._parts(chunk):
            component, heads = self.source.components[part.index], self.heads[part.index]
            for side in sides:
                side.place.check_holds(
                    side.indices[part.index], part.runs
                )  # before any array: a peer may name the runs
            firsts, counts = cut_at_units(part.runs, *part.unit_tokens)
            offsets, bases = [], []
            for side in sides:
                index = side.indices[part.index]
                offsets.append(side.place.offsets(index, side.held[part.index], heads, firsts))
                bases.append(side.place.layer_offsets(index, part.layers))
            row_bytes = component.row_bytes // num_heads(component) * len(heads) // offsets[0].shape[1]
            lengths = np.broadcast_to(counts[:, None] * row_bytes, offsets[0].shape)
            one_layer = np.column_stack([array.ravel() for array in (*offsets, lengths)])
            found.append(on_every_layer(joined(one_layer), *bases))
        return joined(np.concatenate(found))

    def _parts(self, chunk: Chunk) -> Iterator[_Part]:
        for index, (component, heads) in enumerate(zip(self.source.components, self.heads, strict=True)):
            if chunk.components is not None and index not in chunk.components:
                continue
            theirs = self.target.components[self.target.index_of(component.name)]
            layers = tuple(k for k in component.layers if chunk.layers is None or k in chunk.layers)
            runs = tuple(run for run in _runs(component, theirs, chunk) if run[0] < run[1])
            if heads and layers and runs:
                yield _Part(index, layers, runs, (component.unit_tokens, theirs.unit_tokens))


def _runs(source: StateComponent, target: StateComponent, chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """The positions whose rows of a component are in the chunk.

    A row of a ring is found by its position, so rings of one length send the rows they have written as they lie.
    Between rings of two lengths go the positions that the shorter one still has: what is older no model may need, since
    the side with the shorter ring could not have it.
    """
    if source.index is IndexKind.PAGE:
        return chunk.tokens
    if chunk.processed_len is None:
        return ()
    rows = min(chunk.processed_len, source.unit_tokens, target.unit_tokens)
    if source.unit_tokens == target.unit_tokens:
        return ((0, rows),)
    return ((chunk.processed_len - rows, chunk.processed_len),)


def _with_heads(component: StateComponent, heads: int) -> StateComponent:
    axis = component.shard_axis
    if axis is None:
        return component
    return replace(component, outer=(*component.outer[:axis], heads, *component.outer[axis + 1 :]))


def _side(source: ShardedState, state: ShardedState, rank: int, place: Place) -> _Side:
    _check_pool(f"the pool of rank {rank}", state.of_rank(rank), place)
    held = tuple(heads_held(num_heads(component), state.tp_size, rank) for component in source.components)
    return _Side(place, tuple(state.index_of(component.name) for component in source.components), held)


def _check_pool(what: str, wanted: tuple[StateComponent, ...], place: Place) -> None:
    found = place.layout.components
    if len(wanted) != len(found):
        raise GeometryMismatch(f"{what} has {len(found)} components, not {len(wanted)}")
    for ours, theirs in zip(wanted, found, strict=True):
        if ours != theirs:
            raise GeometryMismatch(f"component {ours.name}: {what} has {theirs}, not {ours}")
