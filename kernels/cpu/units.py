"""Which units of a pool of bytes are meant, and where they lie. Needs no compiler."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

_FAR = 1 << 40
"""More than a pool holds: what is checked with it cannot overflow."""
_FEW = 24
Place = tuple[int, np.ndarray, int]
"""Address of unit 0 of the first layer, the units, and the bytes from one layer to the next."""


@dataclass(frozen=True, slots=True)
class Units:
    """Some units of a pool, which must not change while they are copied.

    data: all bytes of the pool, one dimension, contiguous. units: int64, which ones, in order. unit_bytes: of one unit
    of one layer. offset: where unit 0 of layer 0 begins. layer_bytes: from one layer to the next.
    """

    data: np.ndarray
    units: np.ndarray
    unit_bytes: int
    offset: int = 0
    layer_bytes: int = 0
    num_layers: int = 1
    _begin: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise ValueError("a pool is flat bytes")
        if self.units.dtype != np.int64 or self.units.ndim != 1 or not self.units.flags.c_contiguous:
            raise ValueError("units are int64 in a row")
        if not 1 <= self.unit_bytes < _FAR or not 0 <= self.offset < _FAR or not 0 <= self.layer_bytes < _FAR:
            raise ValueError("units have bytes, and layers lie one after the other")
        if self.num_layers < 1:
            raise ValueError("there is at least one layer")
        if len(self.units):
            first, last = bounds(self.units)
            end = self.offset + (self.num_layers - 1) * self.layer_bytes + (last + 1) * self.unit_bytes
            if first < 0 or end > len(self.data):
                raise ValueError("a unit lies outside its pool")
        object.__setattr__(self, "_begin", self.data.__array_interface__["data"][0] + self.offset)

    @classmethod
    def contiguous(cls, buffer: np.ndarray, num_units: int, unit_bytes: int, num_layers: int = 1) -> Self:
        """Layer after layer and unit after unit in one buffer: what is gathered into and scattered from."""
        layer_bytes = num_units * unit_bytes
        return cls(buffer, np.arange(num_units, dtype=np.int64), unit_bytes, 0, layer_bytes, num_layers)

    @property
    def total(self) -> int:
        """How many there are in all layers."""
        return len(self.units) * self.num_layers

    @property
    def place(self) -> Place:
        """As the kernels take it; the data must outlive the call."""
        return self._begin, self.units, self.layer_bytes


def bounds(units: np.ndarray) -> tuple[int, int]:
    """The least and the greatest of at least one."""
    if len(units) <= _FEW:  # numpy's reductions take longer to begin
        few = units.tolist()
        return min(few), max(few)
    return int(units.min()), int(units.max())
