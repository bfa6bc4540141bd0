"""`fp8`: e4m3 codes and a scale for each token and head, number by number what a pool of fp8 rows holds. Each number
keeps 4 bits."""

from functools import cache
from typing import ClassVar

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, is_lossy_input
from shared.transfer.formats.scaled import decode_rows, encode_rows

_NAN = 0x7F


class Fp8:
    name: ClassVar[str] = "fp8"
    number: ClassVar[int] = 4
    version: ClassVar[int] = 1
    largest: ClassVar[float] = 448.0

    def takes(self, component: StateComponent) -> bool:
        return is_lossy_input(component)

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        return encode_rows(self, values, component)

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        decode_rows(self, data, component, out)

    def to_codes(self, scaled: np.ndarray) -> np.ndarray:
        # The upper half of a float, its last bit set where the lower half holds anything, rounds as the whole does.
        bits = scaled.view(np.uint32)
        upper = (bits >> 16).astype(np.uint16)
        upper |= (bits & 0xFFFF).astype(bool)
        codes: np.ndarray = _code_of_upper()[upper]
        return codes

    def from_codes(self, codes: np.ndarray) -> np.ndarray:
        values: np.ndarray = _value_of_code()[codes]
        return values


@cache
def _value_of_code() -> np.ndarray:
    """float32 [256]."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[_NAN] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


@cache
def _code_of_upper() -> np.ndarray:
    """uint8 [65536]: the nearest code, ties to even, of a float32 by its upper 16 bits."""
    sizes = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    exact = _value_of_code()[:_NAN].astype(np.float64)
    middles = (exact[:-1] + exact[1:]) / 2
    with np.errstate(invalid="ignore"):
        above, reached = (np.searchsorted(middles, sizes, side=side) for side in ("left", "right"))
    code = np.where((above != reached) & (above % 2 == 1), reached, above).astype(np.uint8)
    code[np.isnan(sizes)] = _NAN
    return np.concatenate((code, code | 0x80))
