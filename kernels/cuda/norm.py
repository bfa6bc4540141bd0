"""Root-mean-square norm, with and without the residual sum before it, one block a row."""

import torch

from kernels.cuda.launch import Launcher, flat, instance, is_float
from kernels.reference import ReferenceOps

_MAX_THREADS = 1024


def rms_norm(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not _fits(x, weight):
        return ReferenceOps().rms_norm(x, weight, eps)
    num_rows, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        kernel = instance("norm", "rms_norm", x.dtype)
        launcher.launch(kernel, (num_rows, 1, 1), _threads(width), flat(x), flat(weight), out, width, eps)
    return out


def add_rms_norm(
    launcher: Launcher, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _fits(x, weight) or residual.dtype != x.dtype:
        return ReferenceOps().add_rms_norm(x, residual, weight, eps)
    num_rows, width = x.shape
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if num_rows:
        kernel = instance("norm", "add_rms_norm", x.dtype)
        arguments = (flat(x), flat(residual), flat(weight), out, total, width, eps)
        launcher.launch(kernel, (num_rows, 1, 1), _threads(width), *arguments)
    return out, total


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return is_float(x, weight) and x.dim() == 2 and x.shape[1] % 4 == 0


def _threads(width: int) -> int:
    """Whole warps, four elements a thread where the row is no longer than a block can hold so."""
    return min(_MAX_THREADS, max(32, -(-width // 128) * 32))
