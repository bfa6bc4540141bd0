"""Units of a pool into one buffer and back, so that a single copy takes them to the host or brings them from there."""

import torch

from kernels.cuda.launch import Kernel, Launcher
from kernels.reference import ReferenceOps

_THREADS = 256
_WARP_TILE = 4096
"""Bytes that a warp copies at a time: `TILE` of the source."""
_BLOCKS_PER_PROCESSOR = 4
"""As many as run at once, by the registers they take; each then goes on to further tiles."""
_MAX_UNIT_BYTES = 1 << 30


def gather_units(launcher: Launcher, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
    if _fits(state, units, buffer):
        _launch(launcher, "gather_units", state, units, buffer)
    else:
        ReferenceOps().gather_units(state, units, buffer)


def scatter_units(launcher: Launcher, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
    if _fits(state, units, buffer):
        _launch(launcher, "scatter_units", state, units, buffer)
    else:
        ReferenceOps().scatter_units(state, units, buffer)


def _fits(state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> bool:
    near = state.device == units.device == buffer.device
    plain = all(x.is_contiguous() for x in (state, units, buffer))
    return near and plain and units.dtype == torch.int64 and state.shape[2] <= _MAX_UNIT_BYTES


def _launch(launcher: Launcher, name: str, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
    num_layers, num_units, unit_bytes = state.shape
    bytes_a_block = _WARP_TILE * _THREADS // 32
    num_blocks = min(-(-buffer.nbytes // bytes_a_block), _BLOCKS_PER_PROCESSOR * launcher.num_processors)
    if num_blocks:
        launcher.launch(
            Kernel("gather", name), (num_blocks, 1, 1), _THREADS,
            state, units, buffer, num_layers, num_units, len(units), unit_bytes,
        )  # fmt: skip
