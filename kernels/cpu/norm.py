"""Root-mean-square norm, with and without the residual sum before it, one pass a row. Kernels are told where in memory
tensors begin.

A row's squares are summed in an order that is written out here. Left to the compiler, it is one thing in the kernel
for one thread and another in the kernel for all of them, and a row would depend on how many there are.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import floats_at
from kernels.cpu.compiling import OPTIONS, F
from kernels.cpu.kv_rows import load, store
from kernels.cpu.threads import compiled_exactly
from kernels.cpu.vector import LANES, add, add_product, multiply, splat, total, zeros
from kernels.reference import ReferenceOps

SERIAL_ROWS = 32
_ABREAST = 4 * LANES
"""Sums that are made side by side, or each would wait for the one before."""


def _inlined_exactly(function: F) -> F:
    """A part of a kernel of which every operation rounds in its place, but for products that are fused with sums."""
    part: Any = numba.njit(**{**OPTIONS, "cache": False, "fastmath": False})(function)
    return part  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return ReferenceOps().rms_norm(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out = np.empty(x.shape, np.float32)
    run = _norm.serial if len(out) <= SERIAL_ROWS else _norm
    run(x.data_ptr(), weight.data_ptr(), np.float32(eps), out)
    return torch.from_numpy(out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.dtype == residual.dtype == weight.dtype == torch.float32:
        return ReferenceOps().add_rms_norm(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out = np.empty(x.shape, np.float32)
    summed = np.empty_like(out)
    run = _add_norm.serial if len(out) <= SERIAL_ROWS else _add_norm
    run(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), np.float32(eps), out, summed)
    return torch.from_numpy(out), torch.from_numpy(summed)


@_inlined_exactly
def _normed(x: np.ndarray, at: int, width: int, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """x[at : at + width], a row, to the same place of `out`."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    side_by_side = at + width - width % _ABREAST
    for i in range(at, side_by_side, _ABREAST):
        p, q, r, s = load(x, i), load(x, i + LANES), load(x, i + 2 * LANES), load(x, i + 3 * LANES)
        a, b, c, d = add_product(a, p, p), add_product(b, q, q), add_product(c, r, r), add_product(d, s, s)
    squares = total(add(add(a, b), add(c, d)))
    for i in range(side_by_side, at + width):
        squares += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
    each = splat(factor)
    for i in range(at, side_by_side, _ABREAST):
        p, q, r, s = load(x, i), load(x, i + LANES), load(x, i + 2 * LANES), load(x, i + 3 * LANES)
        p, q, r, s = multiply(p, each), multiply(q, each), multiply(r, each), multiply(s, each)
        k = i - at
        store(out, i, multiply(p, load(weight, k)))
        store(out, i + LANES, multiply(q, load(weight, k + LANES)))
        store(out, i + 2 * LANES, multiply(r, load(weight, k + 2 * LANES)))
        store(out, i + 3 * LANES, multiply(s, load(weight, k + 3 * LANES)))
    for i in range(side_by_side, at + width):
        out[i] = x[i] * factor * weight[i - at]


@_inlined_exactly
def _added(x: np.ndarray, y: np.ndarray, at: int, width: int, out: np.ndarray) -> None:
    """A row of x + y to the same place of `out`."""
    whole = at + width - width % LANES
    for i in range(at, whole, LANES):
        store(out, i, add(load(x, i), load(y, i)))
    for i in range(whole, at + width):
        out[i] = x[i] + y[i]


@compiled_exactly
def _norm(x_at: int, weight_at: int, eps: np.float32, out: np.ndarray) -> None:
    num_rows, width = out.shape
    x, weight = carray(floats_at(x_at), (num_rows * width,)), carray(floats_at(weight_at), (width,))
    flat = out.reshape(-1)
    for t in prange(num_rows):
        _normed(x, t * width, width, weight, eps, flat)


@compiled_exactly
def _add_norm(
    x_at: int, residual_at: int, weight_at: int, eps: np.float32, out: np.ndarray, summed: np.ndarray
) -> None:  # fmt: skip
    num_rows, width = out.shape
    x, residual = carray(floats_at(x_at), (num_rows * width,)), carray(floats_at(residual_at), (num_rows * width,))
    weight, flat, sums = carray(floats_at(weight_at), (width,)), out.reshape(-1), summed.reshape(-1)
    for t in prange(num_rows):
        at = t * width
        _added(x, residual, at, width, sums)
        _normed(sums, at, width, weight, eps, flat)
