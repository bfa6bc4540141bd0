"""What one source rank sends one target rank, and where it lies on either side.

The order in which bytes travel follows from both sides' units and from the chunk alone: component after component (the
source's order), layer after layer, then token after token in steps that no unit boundary of either side crosses, and
within a step segment after segment. No page id is in it, so each side finds its own half by itself; between sides that
cut their state alike it is unit after unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.remap.sharding import ShardedState, heads_held, num_heads
from shared.state.remap.spans import Int64s, Place, cut_at_units, joined, on_every_layer


@dataclass(frozen=True, slots=True)
class Chunk:
    """What of a request is sent at once. tokens: half-open runs of positions whose pages' rows go. processed_len: with
    it, REQUEST and RING state goes too, as it is after so many positions. layers: only these, or all."""

    tokens: tuple[tuple[int, int], ...] = ()
    processed_len: int | None = None
    layers: frozenset[int] | None = None

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
class Route:
    """What `source_rank` sends `target_rank`. heads: for each component of the source, in its order, the heads that go
    this way, by their places in the uncut component."""

    source: ShardedState
    target: ShardedState
    source_rank: int
    target_rank: int
    heads: tuple[range, ...]

    def gather(self, place: Place, chunk: Chunk) -> Int64s:
        """[n, 2] (offset, length) in the source rank's pool, in the order in which the bytes travel."""
        return self._spans(chunk, (self.source, self.source_rank, place))

    def scatter(self, place: Place, chunk: Chunk) -> Int64s:
        """[n, 2] (offset, length) in the target rank's pool, in the same order."""
        return self._spans(chunk, (self.target, self.target_rank, place))

    def copies(self, source: Place, target: Place, chunk: Chunk) -> Int64s:
        """[n, 3] (source offset, target offset, length): the same bytes where one process reaches both pools, so that
        no piece is needed in between."""
        return self._spans(chunk, (self.source, self.source_rank, source), (self.target, self.target_rank, target))

    def component_bytes(self, chunk: Chunk) -> tuple[int, ...]:
        """Bytes that go this way, for each component of the source: the piece is these parts one after another."""
        sizes = [0] * len(self.heads)
        for part in self._parts(chunk):
            component = self.source.components[part.index]
            head_bytes = component.row_bytes // num_heads(component)
            rows = sum(stop - start for start, stop in part.runs) * len(part.layers)
            sizes[part.index] = rows * head_bytes * len(self.heads[part.index])
        return tuple(sizes)

    def num_bytes(self, chunk: Chunk) -> int:
        """Length of the contiguous piece. Where it is 0, nothing is sent."""
        return sum(self.component_bytes(chunk))

    def _spans(self, chunk: Chunk, *sides: tuple[ShardedState, int, Place]) -> Int64s:
        for state, rank, place in sides:
            _check_pool(state, rank, place)
        found = [np.empty((0, len(sides) + 1), dtype=np.int64)]
        for part in self._parts(chunk):
            component, heads = self.source.components[part.index], self.heads[part.index]
            indices = [state.index_of(component.name) for state, _, _ in sides]
            for (_, _, place), index in zip(sides, indices, strict=True):
                place.check_holds(index, part.runs)  # ahead of any array: a peer may have named the runs
            firsts, counts = cut_at_units(part.runs, *part.unit_tokens)
            offsets, bases = [], []
            for (state, rank, place), index in zip(sides, indices, strict=True):
                held = heads_held(num_heads(component), state.tp_size, rank)
                offsets.append(place.offsets(index, held, heads, firsts))
                bases.append(place.layer_offsets(index, part.layers))
            row_bytes = component.row_bytes // num_heads(component) * len(heads) // offsets[0].shape[1]
            lengths = np.broadcast_to(counts[:, None] * row_bytes, offsets[0].shape)
            one_layer = np.column_stack([array.ravel() for array in (*offsets, lengths)])
            found.append(on_every_layer(joined(one_layer), *bases))
        return joined(np.concatenate(found))

    def _parts(self, chunk: Chunk) -> Iterator[_Part]:
        for index, (component, heads) in enumerate(zip(self.source.components, self.heads, strict=True)):
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


def _check_pool(state: ShardedState, rank: int, place: Place) -> None:
    wanted, found = state.of_rank(rank), place.layout.components
    if len(wanted) != len(found):
        raise GeometryMismatch(f"the pool of rank {rank} has {len(found)} components, not {len(wanted)}")
    for ours, theirs in zip(wanted, found, strict=True):
        if ours != theirs:
            raise GeometryMismatch(f"component {ours.name}: the pool of rank {rank} has {theirs}, not {ours}")
