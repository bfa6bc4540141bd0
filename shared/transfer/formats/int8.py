"""`int8`: whole numbers from -127 to 127 and a scale for each token and head. At most half a scale is lost."""

from typing import ClassVar

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, is_lossy_input
from shared.transfer.formats.scaled import decode_rows, encode_rows


class Int8:
    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 3
    version: ClassVar[int] = 1
    largest: ClassVar[float] = 127.0

    def takes(self, component: StateComponent) -> bool:
        return is_lossy_input(component)

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        return encode_rows(self, values, component)

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        decode_rows(self, data, component, out)

    def to_codes(self, scaled: np.ndarray) -> np.ndarray:
        codes: np.ndarray = np.rint(scaled).astype(np.int8).view(np.uint8)
        return codes

    def from_codes(self, codes: np.ndarray) -> np.ndarray:
        return codes.view(np.int8).astype(np.float32)
