"""`fp16`: half floats of float32 rows. Each number keeps 11 bits. Rows that are half floats already are no matter for
it: `lossless` makes them smaller and keeps them whole."""

from typing import ClassVar

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, Reader, check_values, is_lossy_input, seal, unseal

_LARGEST = 65504.0


class Fp16:
    """A finite number beyond what fits becomes the largest that does; NaN and infinity stay what they are."""

    name: ClassVar[str] = "fp16"
    number: ClassVar[int] = 2
    version: ClassVar[int] = 1

    def takes(self, component: StateComponent) -> bool:
        return is_lossy_input(component) and component.dtype == "float32"

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        check_values(values, component)
        if not self.takes(component):
            raise ValueError(f"component {component.name} does not travel as {self.name}")
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        too_large = np.isinf(halves) & np.isfinite(values)
        if too_large.any():
            halves[too_large] = np.copysign(_LARGEST, values[too_large]).astype(np.float16)
        return seal(self.number, self.version, values, halves.tobytes())

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        reader = Reader(unseal(self.number, self.version, data, component, out))
        halves = reader.array("<f2", out.shape)
        reader.end()
        out[...] = halves
