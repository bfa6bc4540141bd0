"""x times weight transposed: plain float32 here, packed weights by panels.py and nibbles.py.

A decode step multiplies a few rows by all weights, so it is bound by reading them once: torch does not thread
a single row at all and reaches half of the memory's speed at a handful. The compiled product reads each
weight once, for two outputs and four rows at a time. Measured for the 135M model, all products of a step, 2
threads, ms: 1 row 22 (torch's best form 49), 8 rows 40 (51), 32 rows 83 (103); from some 50 rows on torch's
blocked product wins.
"""

import numpy as np
import torch
from numba import prange

from kernels.cpu import nibbles, panels
from kernels.cpu.threads import compiled
from kernels.cpu.vectors import has_vectors
from kernels.packing import PANEL, PackedWeight, unpack

MAX_COMPILED_ROWS = 40

_NO_BIAS = np.empty(0, np.float32)


def linear(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    if isinstance(weight, PackedWeight):
        return _packed(x, weight, bias)
    num_rows = x.shape[0]
    plain = x.dtype == weight.dtype == torch.float32 and weight.is_contiguous()
    if num_rows > MAX_COMPILED_ROWS or not plain:
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.empty(num_rows, weight.shape[0])
    _few_rows(x.contiguous().numpy(), weight.numpy(), out.numpy(), torch.get_num_threads())
    return out if bias is None else out.add_(bias)


def _packed(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_out = x.shape[0], weight.num_out
    out = np.empty((num_rows, -(-num_out // PANEL) * PANEL), np.float32)
    shift = _NO_BIAS if bias is None else bias.contiguous().numpy()
    multiply = nibbles.multiply if weight.format == "int4" else panels.multiply
    x = (x if x.dtype == torch.float32 else x.float()).contiguous()
    if x.shape[1:] != (weight.width,):
        raise ValueError(f"x is {tuple(x.shape)}, the weights are of rows of {weight.width}")
    multiply(x.data_ptr(), weight, shift, out, torch.get_num_threads())
    return torch.from_numpy(out if num_out == out.shape[1] else np.ascontiguousarray(out[:, :num_out]))


def fit_for_this_machine(weight: PackedWeight) -> PackedWeight | torch.Tensor:
    """The weight as `linear` takes it fastest: as it is, or unpacked, in memory of this process alone, on a processor
    that lacks the vector instructions the panels are made for."""
    return weight if has_vectors() else torch.from_numpy(unpack(weight))


@compiled
def _few_rows(x: np.ndarray, weight: np.ndarray, out: np.ndarray, num_parts: int) -> None:
    """out [T, N] = x [T, K] weight [N, K] transposed; each part takes an equal share of the outputs."""
    num_rows, width = x.shape
    num_out = weight.shape[0]
    zero = np.float32(0)
    for part in prange(num_parts):
        stop = (part + 1) * num_out // num_parts
        n = part * num_out // num_parts
        while n + 2 <= stop:
            u, v = weight[n], weight[n + 1]
            t = 0
            while t + 4 <= num_rows:
                x0, x1, x2, x3 = x[t], x[t + 1], x[t + 2], x[t + 3]
                u0, u1, u2, u3, v0, v1, v2, v3 = zero, zero, zero, zero, zero, zero, zero, zero
                for k in range(width):
                    uk, vk = u[k], v[k]
                    u0 += uk * x0[k]
                    u1 += uk * x1[k]
                    u2 += uk * x2[k]
                    u3 += uk * x3[k]
                    v0 += vk * x0[k]
                    v1 += vk * x1[k]
                    v2 += vk * x2[k]
                    v3 += vk * x3[k]
                out[t, n], out[t + 1, n], out[t + 2, n], out[t + 3, n] = u0, u1, u2, u3
                out[t, n + 1], out[t + 1, n + 1], out[t + 2, n + 1], out[t + 3, n + 1] = v0, v1, v2, v3
                t += 4
            while t < num_rows:
                x0 = x[t]
                u0, v0 = zero, zero
                for k in range(width):
                    u0 += u[k] * x0[k]
                    v0 += v[k] * x0[k]
                out[t, n], out[t, n + 1] = u0, v0
                t += 1
            n += 2
        if n < stop:
            u = weight[n]
            for t in range(num_rows):
                x0 = x[t]
                u0 = zero
                for k in range(width):
                    u0 += u[k] * x0[k]
                out[t, n] = u0
