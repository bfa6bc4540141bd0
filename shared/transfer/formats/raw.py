"""`raw`: the rows as they are."""

from typing import ClassVar

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, Reader, check_values, seal, unseal


class Raw:
    name: ClassVar[str] = "raw"
    number: ClassVar[int] = 1
    version: ClassVar[int] = 1

    def takes(self, component: StateComponent) -> bool:
        return True

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        check_values(values, component)
        return seal(self.number, self.version, values, values.tobytes())

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        reader = Reader(unseal(self.number, self.version, data, component, out))
        rows = reader.array(out.dtype.str, out.shape)
        reader.end()
        out[...] = rows
