"""The byte arithmetic of one rank's pool: where the rows of tokens lie, in arrays, never in a loop over pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.state.remap.sharding import segments_around

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Units = Sequence[int] | Int64s


@dataclass(frozen=True, slots=True)
class Place:
    """Where the state of one request lies in one rank's pool. pages: physical pages of its logical pages `first_page`,
    `first_page` + 1, … (logical page k holds tokens from k x page size on). slot: its request slot."""

    layout: PoolLayout
    pages: Units = ()
    first_page: int = 0
    slot: int | None = None

    def offsets(self, index: int, held: range, heads: range, positions: Int64s) -> Int64s:
        """[positions, segments] byte offset in the pool, in the component's first layer, of the row of each position in
        each segment of `heads`, where the rank holds `held`. The positions must have passed `check_holds`."""
        component = self.layout.components[index]
        before, after = segments_around(component)
        ours = np.arange(heads.start - held.start, heads.stop - held.start)
        at = np.arange(before)[:, None, None] * len(held) + ours[:, None]
        segments = (at * after + np.arange(after)).ravel()  # [before, heads, after] flat
        row_bytes = component.row_bytes // (before * len(held) * after)
        start = self.layout.offset_of(index) + self._units(component, positions) * component.unit_bytes
        start += positions % component.unit_tokens * row_bytes
        return np.asarray(start[:, None] + segments * (component.unit_tokens * row_bytes), dtype=np.int64)

    def layer_offsets(self, index: int, layers: Sequence[int]) -> Int64s:
        """How far each of `layers` lies from the component's first layer."""
        component = self.layout.components[index]
        layer_bytes = component.unit_bytes * self.layout.units_of(component)
        return np.array([component.layers.index(layer) * layer_bytes for layer in layers], dtype=np.int64)

    def check_holds(self, index: int, runs: Sequence[tuple[int, int]]) -> None:
        """Raises GeometryMismatch unless the request has units in the pool for all positions of non-empty `runs`."""
        component = self.layout.components[index]
        units: Units = self.pages
        if component.index is IndexKind.PAGE:
            end = self.first_page + len(self.pages)
            for start, stop in runs:
                if not self.first_page * component.unit_tokens <= start < stop <= end * component.unit_tokens:
                    raise GeometryMismatch(
                        f"component {component.name}: tokens {start} to {stop} do not lie in pages {self.first_page} "
                        f"to {end} of {component.unit_tokens} tokens"
                    )
        elif self.slot is None:
            raise GeometryMismatch(f"component {component.name}: the request has no slot")
        else:
            units = (self.slot,)
        count = self.layout.units_of(component)
        every = np.asarray(units, dtype=np.int64)
        if not 0 <= every.min() <= every.max() < count:
            raise GeometryMismatch(f"component {component.name}: a unit lies outside the pool of {count}")

    def _units(self, component: StateComponent, positions: Int64s) -> Int64s:
        if component.index is IndexKind.PAGE:
            pages = np.asarray(self.pages, dtype=np.int64)
            return pages[positions // component.unit_tokens - self.first_page]
        assert self.slot is not None
        return np.full_like(positions, self.slot)


def cut_at_units(runs: Sequence[tuple[int, int]], *unit_tokens: int) -> tuple[Int64s, Int64s]:
    """(first position, number of positions) of the parts of non-empty `runs` that no unit boundary crosses, whatever
    of `unit_tokens` the unit has."""
    firsts, counts = [], []
    for start, stop in runs:
        edges = [np.arange((start // size + 1) * size, stop, size) for size in unit_tokens]
        cuts = np.unique(np.concatenate([[start], *edges, [stop]]).astype(np.int64))
        firsts.append(cuts[:-1])
        counts.append(np.diff(cuts))
    return np.concatenate(firsts), np.concatenate(counts)


def joined(spans: Int64s) -> Int64s:
    """`spans` ([n, k]: k - 1 offsets and a length) with each joined to the next where it ends as that begins, by all
    its offsets."""
    if len(spans) < 2:
        return spans
    ends = spans[:-1, :-1] + spans[:-1, -1:]
    first = np.flatnonzero(np.concatenate([[True], (ends != spans[1:, :-1]).any(axis=1)]))
    return np.column_stack([spans[first, :-1], np.add.reduceat(spans[:, -1], first)])


def on_every_layer(spans: Int64s, *layer_offsets: Int64s) -> Int64s:
    """`spans` of one layer on all layers, one layer after another; one array of layer offsets for each offset."""
    moved = np.column_stack([*layer_offsets, np.zeros_like(layer_offsets[0])])
    return (moved[:, None, :] + spans).reshape(-1, spans.shape[1])


def copy_spans(source: Bytes, target: Bytes, spans: Int64s) -> None:
    """Copies what `spans` ([n, 3]: offsets in source and target, length above 0) name; none may overlap another in the
    target. IndexError, and maybe some copied, where one goes over an end. Spans alike in length go in one call, in
    grains as large as all their offsets and lengths allow."""
    while len(spans):
        lengths, counts = np.unique(spans[:, -1], return_counts=True)
        alike = spans[:, -1] % lengths[counts.argmax()] == 0
        grain = int(np.gcd.reduce(spans[alike], axis=None))
        from_, to = _grains(spans[alike] // grain)
        _in_grains(target, grain)[to] = _in_grains(source, grain)[from_]
        spans = spans[~alike]


def _grains(spans: Int64s) -> tuple[Int64s, Int64s]:
    """The numbers of all grains of spans that are counted in grains, at the source and at the target."""
    counts = spans[:, -1]
    steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(spans[:, 0], counts) + steps, np.repeat(spans[:, 1], counts) + steps


def _in_grains(data: Bytes, grain: int) -> npt.NDArray[np.void]:
    return data[: len(data) // grain * grain].view(np.dtype((np.void, grain)))
