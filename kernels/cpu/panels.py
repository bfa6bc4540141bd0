"""x times packed float16 or int8 weights, transposed: activations and sums are float32.

A panel stays in the nearest cache while all rows of x pass by it; x is cut into blocks of rows that stay in the next.
int8 is widened to float on the way, so activations keep their precision and no row has a scale to share.
"""

import numpy as np
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import floats_at
from kernels.cpu.threads import compiled, inlined
from kernels.cpu.tile import AHEAD_BYTES, make_tile
from kernels.packing import PANEL, PackedWeight

_ROWS = 6
_X_BLOCK_FLOATS = 48 * 1024
_WIDTH_BLOCK = 2048

_tile1x4, _tile2x2 = make_tile(1, 4), make_tile(2, 2)
_tile1, _tile2, _tile3 = make_tile(1, 1), make_tile(2, 1), make_tile(3, 1)
_tile4, _tile5, _tile6 = make_tile(4, 1), make_tile(5, 1), make_tile(6, 1)


def multiply(x_at: int, weight: PackedWeight, bias: np.ndarray, out: np.ndarray, num_parts: int) -> None:
    """out [T, all panels' outputs] = x weight transposed, plus bias [num_out] unless it is empty; at x_at in memory x
    [T, width] begins. Outputs beyond num_out are zero. Each part takes an equal share of the panels."""
    panels = weight.panels.view(np.uint16) if weight.format == "float16" else weight.panels
    _multiply(x_at, weight.width, panels.reshape(-1), weight.scales.reshape(-1), bias, out, num_parts)


@inlined
def _rows_times_panels(
    weights: np.ndarray, w_at: int, panel_size: int, num_panels: int, x: np.ndarray, x_at: int, width: int,
    out: np.ndarray, out_at: int, out_width: int, count: int, fresh: bool, ahead: int, step: int, rows: int,
) -> None:  # fmt: skip
    w, size, o, n = w_at, panel_size, out_at, out_width
    if rows == 6:
        _tile6(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif rows == 5:
        _tile5(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif rows == 4:
        _tile4(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif rows == 3:
        _tile3(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif num_panels == 4:
        _tile1x4(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif num_panels == 2:
        _tile2x2(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    elif rows == 2:
        _tile2(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)
    else:
        _tile1(weights, w, size, x, x_at, width, out, o, n, count, fresh, ahead, step)


@inlined
def _finish(
    out: np.ndarray, first: int, stop: int, column: int, count: int, scales: np.ndarray, bias: np.ndarray
) -> None:
    """Scales and biases the outputs of `count` panels from `column` on."""
    end = column + count * PANEL
    if len(scales) > 0:
        for row in range(first, stop):
            for n in range(column, end):
                out[row, n] *= scales[n]
    if len(bias) > 0:
        for row in range(first, stop):
            for n in range(column, min(end, len(bias))):
                out[row, n] += bias[n]


@compiled
def _multiply(
    x_at: int, width: int, weights: np.ndarray, scales: np.ndarray, bias: np.ndarray, out: np.ndarray, num_parts: int
) -> None:
    num_rows, out_width = out.shape
    num_panels, panel_size = out_width // PANEL, width * PANEL
    element_bytes = PANEL * weights.itemsize
    # A single row leaves registers free: several panels at once keep the units busy.
    together = 4 if num_rows == 1 else 2 if num_rows == 2 else 1
    width_block = min(width, _WIDTH_BLOCK)
    row_block = max(_X_BLOCK_FLOATS // width_block // _ROWS, 1) * _ROWS
    flat_x, flat_out = carray(floats_at(x_at), (num_rows * width,)), out.reshape(-1)
    for part in prange(num_parts):
        stop = (part + 1) * num_panels // num_parts
        for first_row in range(0, num_rows, row_block):
            stop_row = min(first_row + row_block, num_rows)
            rows = stop_row - first_row
            num_tiles = (rows + _ROWS - 1) // _ROWS
            panel = part * num_panels // num_parts
            while panel < stop:
                count = together if panel + together <= stop else 1
                for k in range(0, width, width_block):
                    for tile in range(num_tiles):
                        # Every tile asks for its share of the next panel: memory works while the sums do.
                        at = (panel * width + k) * PANEL
                        ahead, step = at + AHEAD_BYTES // weights.itemsize, element_bytes
                        if num_tiles > 1:
                            step = (element_bytes + num_tiles - 1) // num_tiles
                            ahead = at + panel_size + tile * panel_size // num_tiles
                        row, next_row = tile * rows // num_tiles, (tile + 1) * rows // num_tiles
                        _rows_times_panels(
                            weights, at, panel_size, count,
                            flat_x, (first_row + row) * width + k, width,
                            flat_out, (first_row + row) * out_width + panel * PANEL, out_width,
                            min(width_block, width - k), k == 0, ahead, step, next_row - row,
                        )  # fmt: skip
                _finish(out, first_row, stop_row, panel * PANEL, count, scales, bias)
                panel += count
