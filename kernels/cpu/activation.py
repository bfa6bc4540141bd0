"""The gated activation between the two halves of an MLP, in one pass."""

import numpy as np
import torch
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import floats_at
from kernels.cpu.kv_rows import load, store
from kernels.cpu.threads import compiled
from kernels.cpu.vector import LANES, add, divide, exp2, larger, multiply, splat, subtract, where_at_most, zeros
from kernels.reference import ReferenceOps

SERIAL_ROWS = 8

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-86)
"""From there down `exp2` knows no smaller power, and the sigmoid is taken for 0."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape
    if gate_up.dtype != torch.float32 or width % (2 * LANES):
        return ReferenceOps().silu_mul(gate_up)
    out = np.empty((num_rows, width // 2), np.float32)
    run = _silu_mul.serial if num_rows <= SERIAL_ROWS else _silu_mul
    gate_up = gate_up.contiguous()
    run(gate_up.data_ptr(), out)
    return torch.from_numpy(out)


@compiled
def _silu_mul(gate_up_at: int, out: np.ndarray) -> None:
    num_rows, width = out.shape
    flat, target = carray(floats_at(gate_up_at), (2 * num_rows * width,)), out.reshape(-1)
    for t in prange(num_rows):
        gate, up, at = 2 * t * width, (2 * t + 1) * width, t * width
        one = splat(np.float32(1))
        for i in range(0, width, LANES):
            x = load(flat, gate + i)
            # Of e^-|x|, which never overflows: 1 / (1 + it) where x is positive, else it / (1 + it).
            small = exp2(multiply(splat(-_LOG2_E), larger(subtract(zeros(), x), x)))
            share = divide(where_at_most(x, zeros(), small, one), add(one, small))
            share = where_at_most(x, splat(_LOWEST), zeros(), share)
            store(target, at + i, multiply(multiply(x, share), load(flat, up + i)))
