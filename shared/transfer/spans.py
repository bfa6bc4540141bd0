"""A transfer as spans of bytes: what lies where in two pools whose components are equal, neighbours merged.

For backends that hand whole lists of addresses to somebody else. Arrays, not loops: a transfer has thousands of units.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.state.layout import PoolLayout
from shared.transfer.planes import bounds
from shared.transfer.pool import Run


class Step(NamedTuple):
    """Units `first` up to `last`, not included, of one piece in one layer; `end` spans come up to there."""

    piece: int
    layer: int
    first: int
    last: int
    end: int


@dataclass(frozen=True, slots=True)
class Spans:
    """mine, theirs: offsets into the two pools. In the order of bytes: piece after piece, layer after layer, unit after
    unit. steps: the same in parts that can be digested one by one."""

    mine: np.ndarray
    theirs: np.ndarray
    lengths: np.ndarray
    steps: tuple[Step, ...]

    def batches(self, max_bytes: int, max_spans: int, *, by_step: bool = False) -> Iterator[slice]:
        """Consecutive spans, in as few batches as the limits allow; with `by_step` none goes over the end of a step."""
        total = np.cumsum(self.lengths)
        at, step = 0, 0
        while at < len(total):
            before = int(total[at - 1]) if at else 0
            end = int(np.searchsorted(total, before + max_bytes, side="right"))
            end = min(max(end, at + 1), at + max_spans)
            if by_step:
                while self.steps[step].end <= at:
                    step += 1
                end = min(end, self.steps[step].end)
            yield slice(at, end)
            at = end


def holds(layout: PoolLayout, run: Run) -> bool:
    """Whether every unit, row and layer of `run` exists in a pool of this layout."""
    if not 0 <= run.component < len(layout.components) or not len(run.units):
        return False
    component = layout.components[run.component]
    if run.layers.start < 0 or run.layers.stop > component.num_layers:
        return False
    first, last = bounds(run.units)
    return first >= 0 and last < layout.units_of(component) and 1 <= run.rows_in_last <= component.unit_tokens


def spans_of(mine: PoolLayout, theirs: PoolLayout, runs: list[tuple[Run, Run]], max_bytes: int) -> Spans:
    """Of pairs (ours, theirs) that hold equally many units of the same layers. No span is longer than `max_bytes`, nor
    are the units of a step together, unless it is a single one."""
    nothing = np.empty(0, dtype=np.int64)
    found = [(nothing, nothing, nothing)]
    steps: list[Step] = []
    for piece, (ours, other) in enumerate(runs):
        component, num_units = mine.components[ours.component], len(ours.units)
        per_step = max(1, max_bytes // component.unit_bytes)
        a, lengths = _unit_spans(mine, ours)
        b, _ = _unit_spans(theirs, other)
        part = np.minimum(np.arange(len(a)), num_units - 1) // per_step
        a, b, lengths, part = _cut(*_merged(a, b, lengths, part), max_bytes)
        layers = np.array(ours.layers, dtype=np.int64)[:, None]
        a = (a + layers * component.unit_bytes * mine.units_of(component)).ravel()
        b = (b + layers * component.unit_bytes * theirs.units_of(component)).ravel()
        end = steps[-1].end if steps else 0
        for layer in ours.layers:
            for first, count in zip(range(0, num_units, per_step), np.bincount(part).tolist(), strict=True):
                end += count
                steps.append(Step(piece, layer, first, min(first + per_step, num_units), end))
        found.append((a, b, np.tile(lengths, len(ours.layers))))
    every = [np.concatenate(column) for column in zip(*found, strict=True)]
    return Spans(every[0], every[1], every[2], tuple(steps))


def _unit_spans(layout: PoolLayout, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, lengths) in the first layer: a unit each, but of a last unit that is not full one for each segment."""
    component = layout.components[run.component]
    starts = layout.offset_of(run.component) + run.units * component.unit_bytes
    lengths = np.full(len(starts), component.unit_bytes, dtype=np.int64)
    if run.rows_in_last == component.unit_tokens:
        return starts, lengths
    segments = math.prod(component.outer)
    row_bytes = component.row_bytes // segments if segments else 0
    parts = starts[-1] + np.arange(segments) * component.unit_tokens * row_bytes
    part_lengths = np.full(segments, run.rows_in_last * row_bytes, dtype=np.int64)
    return np.concatenate((starts[:-1], parts)), np.concatenate((lengths[:-1], part_lengths))


def _merged(
    a: np.ndarray, b: np.ndarray, lengths: np.ndarray, part: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Spans of one part that follow each other in both pools become one."""
    joined = (a[1:] == a[:-1] + lengths[:-1]) & (b[1:] == b[:-1] + lengths[:-1]) & (part[1:] == part[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return a[first], b[first], np.add.reduceat(lengths, first), part[first]


def _cut(
    a: np.ndarray, b: np.ndarray, lengths: np.ndarray, part: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Spans longer than `limit` become several."""
    counts = -(-lengths // limit)
    if (counts == 1).all():
        return a, b, lengths, part
    whole = np.repeat(np.arange(len(a)), counts)
    offsets = (np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
    return a[whole] + offsets, b[whole] + offsets, np.minimum(lengths[whole] - offsets, limit), part[whole]
