"""One component of a pool in bytes: where its units lie, and which of them are neighbours."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

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

    def base(self, layer: int) -> int:
        """Where unit 0 of a layer begins."""
        return self.offset + layer * self.layer_bytes

    def rows(self, layer: int, unit: int, num_rows: int) -> list[tuple[int, int]]:
        """Byte ranges of the first rows of a unit, one for each segment."""
        start = self.base(layer) + unit * self.unit_bytes
        step, size = self.unit_tokens * self.row_bytes, num_rows * self.row_bytes
        return [(start + k * step, start + k * step + size) for k in range(self.segments)]

    def first_rows(self, flat: np.ndarray, layers: range, unit: int, num_rows: int) -> np.ndarray:
        """Those rows of a unit in several layers, [layers, segments, bytes]; shares memory with the pool."""
        end = self.offset + self.num_layers * self.layer_bytes
        size = self.unit_tokens * self.row_bytes
        units = flat[self.offset : end].reshape(self.num_layers, self.num_units, self.segments, size)
        return units[layers.start : layers.stop, unit, :, : num_rows * self.row_bytes]


def bounds(units: np.ndarray) -> tuple[int, int]:
    """The least and the greatest of at least one."""
    if len(units) <= _FEW:
        few = units.tolist()
        return min(few), max(few)
    return int(units.min()), int(units.max())


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
