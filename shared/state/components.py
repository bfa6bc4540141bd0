"""What a model's state is made of. A model declares its components; nothing else in the system knows the model.

A component is stored in *units*: a PAGE component's unit is one page of `unit_tokens` consecutive tokens, a REQUEST
component's unit is one request slot with a single row, a RING component's unit is one request slot whose
`unit_tokens` rows hold the last positions (row = position mod ring). One unit of one layer is contiguous and has the
shape `outer + (unit_tokens,) + inner`, so a head slice and a row range are both plain strides.
"""

import functools
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class IndexKind(StrEnum):
    """By what a component's units are found."""

    PAGE = "page"
    REQUEST = "request"
    RING = "ring"


@functools.cache
def _itemsize(dtype: str) -> int:
    return int(np.dtype(dtype).itemsize)


@dataclass(frozen=True, slots=True)
class StateComponent:
    """One kind of model state.

    name: unique in the model. index: how units are found. unit_tokens: rows in a unit (1 for REQUEST).
    outer, inner: dimensions around the row axis. dtype: numpy name. shard_axis: axis of `outer` that tensor
    parallelism splits, or None where every rank holds the same. layers: the model's layers that have it.
    """

    name: str
    index: IndexKind
    unit_tokens: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]
    shard_axis: int | None = None

    def __post_init__(self) -> None:
        if self.unit_tokens < 1 or not self.layers:
            raise ValueError(f"component {self.name}: needs at least one row a unit and one layer")
        if self.index is IndexKind.REQUEST and self.unit_tokens != 1:
            raise ValueError(f"component {self.name}: a REQUEST component has one row")

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return (*self.outer, self.unit_tokens, *self.inner)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer, all of `outer` together."""
        return math.prod(self.outer) * math.prod(self.inner) * _itemsize(self.dtype)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of one layer."""
        return self.row_bytes * self.unit_tokens

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def num_units(self, num_tokens: int) -> int:
        """Units one sequence of `num_tokens` positions needs."""
        if self.index is IndexKind.PAGE:
            return -(-num_tokens // self.unit_tokens)
        return 1

    def rows_in_last_unit(self, num_tokens: int) -> int:
        """Rows of the last unit that carry state once `num_tokens` positions are processed."""
        if num_tokens <= 0:
            return 0
        if self.index is IndexKind.PAGE:
            return (num_tokens - 1) % self.unit_tokens + 1
        return min(num_tokens, self.unit_tokens)
