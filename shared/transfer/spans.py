"""A transfer as spans of bytes in two pools whose components are equal: those merged that are neighbours in both.

For backends that hand whole lists of addresses to somebody else. Arrays, not loops: a transfer has thousands of units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.state.layout import PoolLayout
from shared.transfer.planes import Plane, apart
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
    if not 0 <= run.component < len(layout.components):
        return False
    return Plane.of(layout, run.component).holds(run.units, run.rows_in_last, run.layers)


def spans_of(mine: PoolLayout, theirs: PoolLayout, runs: list[tuple[Run, Run]], max_bytes: int) -> Spans:
    """Of pairs (ours, theirs) that hold equally many units of the same layers. No span is longer than `max_bytes`, nor
    are the units of a step together, unless it is a single one."""
    nothing = np.empty(0, dtype=np.int64)
    found = [(nothing, nothing, nothing)]
    steps: list[Step] = []
    for piece, (ours, other) in enumerate(runs):
        plane, far = Plane.of(mine, ours.component), Plane.of(theirs, other.component)
        num_units, per_step = len(ours.units), max(1, max_bytes // plane.unit_bytes)
        a, lengths = plane.spans(ours.units, ours.rows_in_last)
        b, _ = far.spans(other.units, ours.rows_in_last)
        part = np.minimum(np.arange(len(a)), num_units - 1) // per_step
        begins = apart(lengths, a, b)
        begins[1:] |= part[1:] != part[:-1]
        first = np.flatnonzero(begins)
        a, b, lengths, part = _cut(a[first], b[first], np.add.reduceat(lengths, first), part[first], max_bytes)
        end = steps[-1].end if steps else 0
        for layer in ours.layers:
            for first_unit, count in zip(range(0, num_units, per_step), np.bincount(part).tolist(), strict=True):
                end += count
                steps.append(Step(piece, layer, first_unit, min(first_unit + per_step, num_units), end))
        a, b = (a + plane.layer_offsets(ours.layers)).ravel(), (b + far.layer_offsets(ours.layers)).ravel()
        found.append((a, b, np.tile(lengths, len(ours.layers))))
    every = [np.concatenate(column) for column in zip(*found, strict=True)]
    return Spans(every[0], every[1], every[2], tuple(steps))


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
