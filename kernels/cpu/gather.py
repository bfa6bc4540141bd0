"""Units of a pool into one buffer and back, by the copies that links make."""

import torch

from kernels.cpu.units import Units


def gather_units(state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
    from kernels.cpu.copy_runs import copy_units  # compiles when imported, and an engine on a CPU never needs it

    copy_units(_whole(buffer), _chosen(state, units))


def scatter_units(state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
    from kernels.cpu.copy_runs import copy_units

    copy_units(_chosen(state, units), _whole(buffer))


def _chosen(state: torch.Tensor, units: torch.Tensor) -> Units:
    num_layers, num_units, unit_bytes = state.shape
    return Units(state.view(-1).numpy(), units.numpy(), unit_bytes, 0, num_units * unit_bytes, num_layers)


def _whole(buffer: torch.Tensor) -> Units:
    num_layers, num_units, unit_bytes = buffer.shape
    return Units.contiguous(buffer.view(-1).numpy(), num_units, unit_bytes, num_layers)
