"""The gated activation between the two halves of an MLP."""

import torch

from kernels.cuda.launch import Launcher, flat, instance, is_float
from kernels.reference import ReferenceOps

_THREADS = 256


def silu_mul(launcher: Launcher, gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not is_float(gate_up) or width % 4:
        return ReferenceOps().silu_mul(gate_up)
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = -(-num_rows * width // (4 * _THREADS))
    if num_blocks:
        kernel = instance("activation", "silu_mul", gate_up.dtype)
        launcher.launch(kernel, (num_blocks, 1, 1), _THREADS, flat(gate_up), out, num_rows, width)
    return out
