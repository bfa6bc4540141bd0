"""Root-mean-square norm, with and without the residual sum before it, one pass a row. Kernels are told where in memory
tensors begin."""

import numpy as np
import torch
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import floats_at
from kernels.cpu.threads import compiled
from kernels.reference import ReferenceOps

SERIAL_ROWS = 32


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
    total = np.empty_like(out)
    run = _add_norm.serial if len(out) <= SERIAL_ROWS else _add_norm
    run(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), np.float32(eps), out, total)
    return torch.from_numpy(out), torch.from_numpy(total)


@compiled
def _norm(x_at: int, weight_at: int, eps: np.float32, out: np.ndarray) -> None:
    num_rows, width = out.shape
    x, weight = carray(floats_at(x_at), (num_rows, width)), carray(floats_at(weight_at), (width,))
    for t in prange(num_rows):
        row, target = x[t], out[t]
        squares = np.float32(0)
        for i in range(width):
            squares += row[i] * row[i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            target[i] = row[i] * factor * weight[i]


@compiled
def _add_norm(
    x_at: int, residual_at: int, weight_at: int, eps: np.float32, out: np.ndarray, total: np.ndarray
) -> None:  # fmt: skip
    num_rows, width = out.shape
    x, residual = carray(floats_at(x_at), (num_rows, width)), carray(floats_at(residual_at), (num_rows, width))
    weight = carray(floats_at(weight_at), (width,))
    for t in prange(num_rows):
        left, right, summed, target = x[t], residual[t], total[t], out[t]
        squares = np.float32(0)
        for i in range(width):
            value = left[i] + right[i]
            summed[i] = value
            squares += value * value
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            target[i] = summed[i] * factor * weight[i]
