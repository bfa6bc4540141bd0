"""How a piece is cut into steps that a socket takes one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.state.components import StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.planes import Plane, apart
from shared.transfer.pool import Run

_FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class Step:
    """Some layers of all units of a piece, or one layer of some of them. first_unit: its place in the piece.
    spans: which of the piece's it is."""

    run: Run
    first_unit: int
    layers: range
    spans: range
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Steps:
    """A piece cut up. spans: int64 [n, 2] (first byte, length), those of the whole piece in wire order."""

    spans: np.ndarray
    steps: tuple[Step, ...]


def spans_of(layout: PoolLayout, run: Run, layers: range, every: int = _FAR) -> np.ndarray:
    """Rows in wire order: layer after layer, unit after unit, neighbours joined, but none across every so many units.
    int64 [layers, spans, 2]: first byte and length."""
    plane = Plane.of(layout, run.component)
    starts, lengths = plane.spans(np.asarray(run.units, dtype=np.int64), run.rows_in_last)
    begins = apart(lengths, starts)
    begins[::every] = True
    first = np.flatnonzero(begins)
    spans = np.empty((len(layers), len(first), 2), dtype=np.int64)
    spans[:, :, 0] = starts[first] + plane.layer_offsets(layers)
    spans[:, :, 1] = np.add.reduceat(lengths, first)
    return spans


def part_of(run: Run, first: int, end: int, unit_tokens: int) -> Run:
    """Units [first, end) of it; all rows of those before the last of all."""
    rows = run.rows_in_last if end >= len(run.units) else unit_tokens
    return Run(run.component, run.units[first:end], rows, run.layers)


def steps_of(layout: PoolLayout, run: Run, layers: range, step_bytes: int, *, apart: bool = False) -> Steps:
    """All of `run` in wire order, in steps of at most `step_bytes`, but at least one unit. apart: no step has several
    layers."""
    component, num_units = layout.components[run.component], len(run.units)
    at_once = max(1, step_bytes // component.unit_bytes)
    if num_units <= at_once:
        spans = spans_of(layout, run, layers)
        return Steps(spans.reshape(-1, 2), tuple(_by_layers(run, layers, spans, 1 if apart else at_once // num_units)))
    spans = spans_of(layout, run, layers, at_once)
    return Steps(spans.reshape(-1, 2), tuple(_by_units(run, layers, spans, at_once, component)))


def _by_layers(run: Run, layers: range, spans: np.ndarray, at_once: int) -> Iterator[Step]:
    each, layer_bytes = spans.shape[1], int(spans[0, :, 1].sum())
    for k in range(0, len(layers), at_once):
        some = layers[k : k + at_once]
        yield Step(run, 0, some, range(k * each, (k + len(some)) * each), len(some) * layer_bytes)


def _by_units(run: Run, layers: range, spans: np.ndarray, at_once: int, component: StateComponent) -> Iterator[Step]:
    """None of `spans` belongs to two steps. The last step has all of the last unit, whole or not."""
    each, ends = spans.shape[1], np.cumsum(spans[0, :, 1])
    firsts = range(0, len(run.units), at_once)
    parts = [part_of(run, first, first + at_once, component.unit_tokens) for first in firsts]
    borders = [first * component.unit_bytes for first in firsts]
    starts = np.searchsorted(ends, borders, side="right").tolist()
    sizes = np.diff(borders, append=int(ends[-1])).tolist()
    for k in range(len(layers)):
        for first, part, start, end, size in zip(firsts, parts, starts, [*starts[1:], each], sizes, strict=True):
            yield Step(part, first, layers[k : k + 1], range(k * each + start, k * each + end), size)
