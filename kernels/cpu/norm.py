"""Root-mean-square norm, with and without the residual sum before it, one pass a row."""

import numpy as np
import torch
from numba import prange

from kernels.cpu.threads import compiled
from kernels.reference import ReferenceOps

SERIAL_ROWS = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return ReferenceOps().rms_norm(x, weight, eps)
    out = np.empty(x.shape, np.float32)
    run = _norm.serial if x.shape[0] <= SERIAL_ROWS else _norm
    run(x.contiguous().numpy(), weight.numpy(), np.float32(eps), out)
    return torch.from_numpy(out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return ReferenceOps().add_rms_norm(x, residual, weight, eps)
    out, total = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    x, residual = x.contiguous(), residual.contiguous()
    run = _add_norm.serial if x.shape[0] <= SERIAL_ROWS else _add_norm
    run(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out, total)
    return torch.from_numpy(out), torch.from_numpy(total)


@compiled
def _norm(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    num_rows, width = x.shape
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
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
    total: np.ndarray,
) -> None:
    num_rows, width = x.shape
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
