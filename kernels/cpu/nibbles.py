"""x times packed 4-bit weights, transposed.

x becomes 8-bit numbers with a step for each block of 32 of each row, so no row depends on another; what a block adds by
its smallest weight uses the exact sum of x.
"""

import numpy as np
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import floats_at
from kernels.cpu.nibble_tile import make_nibble_tile
from kernels.cpu.threads import compiled, inlined
from kernels.packing import BLOCK, PANEL, PackedWeight

_ROWS = 6
_X_BLOCK_BYTES = 128 * 1024
_SERIAL_ROWS = 16

_tile1, _tile2, _tile3 = make_nibble_tile(1), make_nibble_tile(2), make_nibble_tile(3)
_tile4, _tile5, _tile6 = make_nibble_tile(4), make_nibble_tile(5), make_nibble_tile(6)


def multiply(x_at: int, weight: PackedWeight, bias: np.ndarray, out: np.ndarray, num_parts: int) -> None:
    """out [T, all panels' outputs] = x weight transposed, plus bias [num_out] unless it is empty; at x_at in memory x
    [T, width] begins. Each part takes an equal share of the panels."""
    num_blocks = weight.panels.shape[1]
    small = np.empty((len(out), num_blocks * BLOCK), np.int8)
    notes = np.empty((len(out), num_blocks, 2), np.float32)
    quantize = _quantize.serial if len(out) <= _SERIAL_ROWS else _quantize
    quantize(x_at, weight.width, small, notes)
    panels, scales = weight.panels.reshape(-1), weight.scales.view(np.uint16).reshape(-1)
    _multiply(small, notes.reshape(-1), panels, scales, bias, out, num_parts)


@compiled
def _quantize(x_at: int, width: int, small: np.ndarray, notes: np.ndarray) -> None:
    """small [T, blocks * 32]: x in steps of notes[t, block, 0]; notes[t, block, 1]: the block's sum. A NaN or infinity
    shows up in the sum."""
    num_rows = len(small)
    x = carray(floats_at(x_at), (num_rows, width))
    for t in prange(num_rows):
        row, target = x[t], small[t]
        for block in range(notes.shape[1]):
            begin = block * BLOCK
            end = min(begin + BLOCK, width)
            largest, total = np.float32(0), np.float32(0)
            for k in range(begin, end):
                largest = max(largest, abs(row[k]))
                total += row[k]
            step = largest / np.float32(127)
            inverse = np.float32(127) / largest if largest > np.float32(0) else np.float32(0)
            for k in range(begin, end):
                target[k] = np.int8(np.int32(np.floor(row[k] * inverse + np.float32(0.5))))
            for k in range(end, begin + BLOCK):
                target[k] = np.int8(0)
            notes[t, block, 0], notes[t, block, 1] = step, total


@inlined
def _rows_times_panel(
    weights: np.ndarray, scales: np.ndarray, block: int, num_blocks: int, x: np.ndarray, x_at: int, width: int,
    notes: np.ndarray, out: np.ndarray, out_at: int, out_width: int, rows: int,
) -> None:  # fmt: skip
    if rows == 6:
        _tile6(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)
    elif rows == 5:
        _tile5(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)
    elif rows == 4:
        _tile4(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)
    elif rows == 3:
        _tile3(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)
    elif rows == 2:
        _tile2(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)
    else:
        _tile1(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width)


@compiled
def _multiply(
    x: np.ndarray, notes: np.ndarray, weights: np.ndarray, scales: np.ndarray, bias: np.ndarray, out: np.ndarray,
    num_parts: int,
) -> None:  # fmt: skip
    num_rows, width = x.shape
    out_width = out.shape[1]
    num_panels, num_blocks = out_width // PANEL, width // BLOCK
    row_block = max(_X_BLOCK_BYTES // width // _ROWS, 1) * _ROWS
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    for part in prange(num_parts):
        stop = (part + 1) * num_panels // num_parts
        for first_row in range(0, num_rows, row_block):
            stop_row = min(first_row + row_block, num_rows)
            rows = stop_row - first_row
            num_tiles = (rows + _ROWS - 1) // _ROWS
            for panel in range(part * num_panels // num_parts, stop):
                for tile in range(num_tiles):
                    row, next_row = tile * rows // num_tiles, (tile + 1) * rows // num_tiles
                    _rows_times_panel(
                        weights, scales, panel * num_blocks, num_blocks, flat_x, (first_row + row) * width, width,
                        notes, flat_out, (first_row + row) * out_width + panel * PANEL, out_width, next_row - row,
                    )  # fmt: skip
                for r in range(first_row, stop_row):
                    for n in range(panel * PANEL, min(panel * PANEL + PANEL, len(bias))):
                        out[r, n] += bias[n]
