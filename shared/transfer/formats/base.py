"""What a wire format is: a pure pair of functions between rows in memory and bytes on a link."""

from typing import ClassVar, Protocol

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer


class WireFormat(Protocol):
    """No state and no I/O; threads may share one. `values` and `out` are [layers, units, segments, rows, width] of the
    component's dtype (block.py) with any strides, so that `out` may be pages themselves."""

    name: ClassVar[str]
    number: ClassVar[int]
    """On the wire; never given to another format."""
    version: ClassVar[int]

    def takes(self, component: StateComponent) -> bool:
        """Whether this component can travel so."""

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        """first_layer: which of the component's layers values[0] is. ValueError for what it does not take."""

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        """Fills `out` and writes nowhere else. Raises Damaged, after which `out` may hold anything."""
