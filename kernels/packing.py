"""Weight formats and their layout in memory: packed once, mapped by every worker, multiplied as they lie.

The outputs of a product are cut into panels of 16. A panel is what one pass over a few rows of x needs, in the order in
which it is read, so that a vector of weights is loaded once for all of them. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PANEL = 16
BLOCK = 32
FORMATS = ("float16", "int8", "int4")
"""What `pack` makes; float32 is not packed."""

VECTOR_FLAGS = ("avx2", "fma", "f16c")
"""What a processor needs for the kernels that multiply packed weights as they lie."""

_GROUP = 4
_HALF_MAX = 65504.0


@dataclass(frozen=True, eq=False, slots=True)
class PackedWeight:
    """A matrix [num_out, width]; the last panel is filled up with zeros. Never written.

    float16: panels [P, width, 16] of float16. int8: panels of int8, and scales [P, 16] float32, one an output.
    int4: blocks of 32 along the width, which is filled up with zeros: panels [P, width / 32, 256] of uint8, a block
    being 4 pairs of groups, 2 halves of 8 outputs, 4 weights each; a byte holds a weight of either group of the pair;
    scales [P, width / 32, 2, 16] float16: the step and the smallest weight of each output's block.
    """

    format: str
    num_out: int
    width: int
    panels: np.ndarray
    scales: np.ndarray


def pack(weight: np.ndarray, format: str) -> PackedWeight:
    """weight: float32 [num_out, width]. Raises ValueError where it does not fit into the format."""
    num_out, width = weight.shape
    num_panels = -(-num_out // PANEL)
    columns = -(-width // BLOCK) * BLOCK if format == "int4" else width
    padded = np.zeros((num_panels * PANEL, columns), np.float32)
    padded[:num_out, :width] = weight
    if width < columns:  # the smallest weight of a block must not become a zero that is not there
        padded[:num_out, width:] = weight[:, -1:]
    panels, scales = _PACKERS[format](padded.reshape(num_panels, PANEL, columns))
    return PackedWeight(format, num_out, width, panels, scales)


def unpack(weight: PackedWeight) -> np.ndarray:
    """float32 [num_out, width], as exact as the format."""
    whole = _UNPACKERS[weight.format](weight)  # [P, 16, columns]
    return np.ascontiguousarray(whole.reshape(-1, whole.shape[2])[: weight.num_out, : weight.width])


def take_rows(weight: PackedWeight, rows: np.ndarray) -> np.ndarray:
    """unpack(weight)[rows] without unpacking the rest: the embedding, where it is the output projection too."""
    panel, lane = rows // PANEL, rows % PANEL
    if weight.format == "int4":
        lanes = _nibbles(weight.panels[panel])[np.arange(len(rows)), lane]  # [rows, columns]
        step, least = np.repeat(weight.scales[panel, :, :, lane].astype(np.float32), BLOCK, axis=1).transpose(2, 0, 1)
        return np.ascontiguousarray((lanes * step + least)[:, : weight.width])
    values = weight.panels[panel, :, lane].astype(np.float32)
    return values if weight.format == "float16" else values * weight.scales[panel, lane][:, None]


def parts_of(weight: PackedWeight) -> Mapping[str, np.ndarray]:
    """The arrays by the suffix that names them in a file; `restore` is the way back."""
    return {"": weight.panels} | ({".scales": weight.scales} if weight.scales.size else {})


def kinds_of_parts(format: str, num_out: int, width: int) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of what `parts_of` will give for a matrix of that shape, in the same order."""
    num_panels, num_blocks = -(-num_out // PANEL), -(-width // BLOCK)
    if format == "int4":
        panels, scales = (num_panels, num_blocks, PANEL * BLOCK // 2), (num_panels, num_blocks, 2, PANEL)
        return {"": (np.dtype(np.uint8), panels), ".scales": (np.dtype(np.float16), scales)}
    panels = (num_panels, width, PANEL)
    if format == "float16":
        return {"": (np.dtype(np.float16), panels)}
    return {"": (np.dtype(np.int8), panels), ".scales": (np.dtype(np.float32), (num_panels, PANEL))}


def restore(format: str, shape: tuple[int, int], panels: np.ndarray, scales: np.ndarray | None) -> PackedWeight:
    return PackedWeight(format, *shape, panels, np.empty((0, PANEL), np.float32) if scales is None else scales)


def _pack_float16(panels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _check_halves(panels)
    return _turned(panels.astype(np.float16)), np.empty((0, PANEL), np.float32)


def _pack_int8(panels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(panels).max(axis=2, initial=0) / np.float32(127)
    steps = np.where(scales == 0, np.float32(1), scales)
    return _turned(np.rint(panels / steps[:, :, None]).astype(np.int8)), steps


def _pack_int4(panels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _check_halves(panels)  # steps and smallest weights are kept in float16
    num_panels, _, width = panels.shape
    blocks = panels.reshape(num_panels, PANEL, width // BLOCK, BLOCK)
    least = blocks.min(axis=3).astype(np.float16)
    step = ((blocks.max(axis=3) - least.astype(np.float32)) / np.float32(15)).astype(np.float16)
    divisor = np.where(step == 0, np.float16(1), step).astype(np.float32)[..., None]
    values = np.rint((blocks - least.astype(np.float32)[..., None]) / divisor).clip(0, 15).astype(np.uint8)
    # [P, half, output, block, pair, group of the pair, weight] -> [P, block, pair, half, output, weight]
    split = values.reshape(num_panels, 2, 8, width // BLOCK, 4, 2, _GROUP).transpose(5, 0, 3, 4, 1, 2, 6)
    packed = (split[0] | split[1] << 4).reshape(num_panels, width // BLOCK, PANEL * BLOCK // 2)
    scales = np.stack((step, least), axis=2).transpose(0, 3, 2, 1)  # [P, block, 2, output]
    return np.ascontiguousarray(packed), np.ascontiguousarray(scales)


def _unpack_float16(weight: PackedWeight) -> np.ndarray:
    return weight.panels.astype(np.float32).transpose(0, 2, 1)


def _unpack_int8(weight: PackedWeight) -> np.ndarray:
    return np.asarray(weight.panels.astype(np.float32).transpose(0, 2, 1) * weight.scales[:, :, None])


def _unpack_int4(weight: PackedWeight) -> np.ndarray:
    scales = np.repeat(weight.scales.astype(np.float32), BLOCK, axis=1)  # [P, columns, 2, 16]
    step, least = scales.transpose(2, 0, 3, 1)
    return np.asarray(_nibbles(weight.panels) * step + least)


def _nibbles(panels: np.ndarray) -> np.ndarray:
    """[P, blocks, 256] -> the weights as 0 .. 15, [P, 16, columns]."""
    num_panels, num_blocks, _ = panels.shape
    packed = panels.reshape(num_panels, num_blocks, 4, 2, 8, _GROUP)
    pairs = np.stack((packed & 15, packed >> 4), axis=3)  # [P, block, pair, group, half, output, weight]
    return np.asarray(pairs.transpose(0, 4, 5, 1, 2, 3, 6).reshape(num_panels, PANEL, num_blocks * BLOCK))


def _check_halves(panels: np.ndarray) -> None:
    if np.abs(panels).max(initial=0) > _HALF_MAX:
        raise ValueError("a weight is too large for float16")


def _turned(panels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(panels.transpose(0, 2, 1))


_PACKERS = {"float16": _pack_float16, "int8": _pack_int8, "int4": _pack_int4}
_UNPACKERS = {"float16": _unpack_float16, "int8": _unpack_int8, "int4": _unpack_int4}
