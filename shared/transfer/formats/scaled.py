"""What formats with one byte a number and a scale for each row, that is for each token and head, have in common."""

from typing import ClassVar, Protocol

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, Reader, check_values, is_lossy_input, seal, unseal

_SMALLEST = 1e-30
"""The largest of a row is taken for at least this, so that zeros stay zeros."""


class Codes(Protocol):
    """largest: the magnitude a row's largest number gets."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int]
    largest: ClassVar[float]

    def to_codes(self, scaled: np.ndarray) -> np.ndarray:
        """float32 of at most `largest`, or NaN, as one byte each."""

    def from_codes(self, codes: np.ndarray) -> np.ndarray:
        """uint8 as float32."""


def encode_rows(codes: Codes, values: np.ndarray, component: StateComponent) -> bytes:
    """All scales, then all codes. A row that holds NaN or infinity becomes NaN as a whole, never numbers."""
    check_values(values, component)
    if not is_lossy_input(component):
        raise ValueError(f"component {component.name} does not travel as {codes.name}")
    scales = np.empty(values.shape[:-1], dtype="<f4")
    coded = np.empty(values.shape, dtype=np.uint8)
    for layer in range(len(values)):  # a layer at a time stays in the cache
        rows = values[layer].astype(np.float32)
        top = np.abs(rows).max(axis=-1)
        scales[layer] = np.where(np.isfinite(top), top / np.float32(codes.largest), np.nan)
        factor = np.float32(codes.largest) / np.maximum(top, np.float32(_SMALLEST))
        with np.errstate(invalid="ignore"):
            rows *= factor[..., None]
            coded[layer] = codes.to_codes(rows)
    return seal(codes.number, codes.version, values, scales.tobytes() + coded.tobytes())


def decode_rows(codes: Codes, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
    reader = Reader(unseal(codes.number, codes.version, data, component, out))
    scales = reader.array("<f4", out.shape[:-1])
    coded = reader.array("u1", out.shape)
    reader.end()
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in range(len(out)):
            out[layer] = codes.from_codes(coded[layer]) * scales[layer][..., None]
