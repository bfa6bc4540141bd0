"""One component of a pool in bytes: where its units and their rows lie, and which of them are neighbours.

All byte arithmetic of pages that travel as they are is here; where heads are cut it is in `shared/state/remap`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from kernels.cpu.units import bounds
from shared.state.layout import PoolLayout

_FEW = 24
"""For so few numpy takes longer to begin than Python to be done."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A unit is `segments` pieces of unit_tokens rows each, `row_bytes` a row and segment."""

    offset: int
    layer_bytes: int
    num_layers: int
    num_units: int
    unit_bytes: int
    unit_tokens: int
    segments: int
    row_bytes: int

    @classmethod
    def of(cls, layout: PoolLayout, index: int) -> Self:
        component = layout.components[index]
        segments = math.prod(component.outer)
        num_units = layout.units_of(component)
        return cls(
            offset=layout.offset_of(index),
            layer_bytes=component.unit_bytes * num_units,
            num_layers=component.num_layers,
            num_units=num_units,
            unit_bytes=component.unit_bytes,
            unit_tokens=component.unit_tokens,
            segments=segments,
            row_bytes=component.row_bytes // segments if segments else 0,
        )

    def spans(self, units: np.ndarray, rows_in_last: int) -> tuple[np.ndarray, np.ndarray]:
        """Where many units lie in layer 0: (first bytes, lengths). Of a whole unit one; of the last, where only some of
        its rows count, one for each segment."""
        starts = self.offset + units * self.unit_bytes
        whole = len(units) - (rows_in_last < self.unit_tokens)
        lengths = np.full(whole, self.unit_bytes, dtype=np.int64)
        if whole == len(units):
            return starts, lengths
        parts = starts[-1] + np.arange(self.segments) * (self.unit_tokens * self.row_bytes)
        part_lengths = np.full(self.segments, rows_in_last * self.row_bytes, dtype=np.int64)
        return np.concatenate((starts[:-1], parts)), np.concatenate((lengths, part_lengths))

    def layer_offsets(self, layers: range) -> np.ndarray:
        """[layers, 1]: how far each of them lies from layer 0."""
        return np.array(layers, dtype=np.int64)[:, None] * self.layer_bytes

    def holds(self, units: np.ndarray, rows_in_last: int, layers: range) -> bool:
        """Whether every unit, row and layer exists, and there is at least one unit."""
        if not len(units) or layers.start < 0 or layers.stop > self.num_layers:
            return False
        first, last = bounds(units)
        return first >= 0 and last < self.num_units and 1 <= rows_in_last <= self.unit_tokens

    def base(self, layer: int) -> int:
        """Where unit 0 of a layer begins."""
        return self.offset + layer * self.layer_bytes

    def first_rows(self, flat: np.ndarray, layers: range, unit: int, num_rows: int) -> np.ndarray:
        """Those rows of a unit in several layers, [layers, segments, bytes]; shares memory with the pool."""
        end = self.offset + self.num_layers * self.layer_bytes
        size = self.unit_tokens * self.row_bytes
        units = flat[self.offset : end].reshape(self.num_layers, self.num_units, self.segments, size)
        return units[layers.start : layers.stop, unit, :, : num_rows * self.row_bytes]


def apart(lengths: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    """Of each span whether it begins anew, or else goes on where the one before ends, by all of `starts`."""
    found = np.ones(len(lengths), dtype=bool)
    if len(found):
        found[1:] = starts[0][1:] != starts[0][:-1] + lengths[:-1]
        for more in starts[1:]:
            found[1:] |= more[1:] != more[:-1] + lengths[:-1]
    return found


def joined(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First unit and number of each run of neighbouring units."""
    if not len(units):
        return units, units
    begins = np.concatenate(([0], np.flatnonzero(np.diff(units) != 1) + 1))
    return units[begins], np.diff(begins, append=len(units))


def joined_pairs(src: np.ndarray, dst: np.ndarray, limit: int) -> Iterator[tuple[int, int, int]]:
    """(source, destination, count) of units that are neighbours on both sides, `limit` units at most."""
    if len(src) <= _FEW:
        yield from ((a, b, 1) for a, b in zip(src.tolist(), dst.tolist(), strict=True))
        return
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(begins, append=len(src))
    for a, b, count in zip(src[begins].tolist(), dst[begins].tolist(), counts.tolist(), strict=True):
        for done in range(0, count, limit):
            yield a + done, b + done, min(limit, count - done)
