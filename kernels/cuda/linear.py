"""x times weight transposed. Plain weights are torch's business; packed ones are multiplied as they lie where few rows
of x ask for it, and unpacked a part at a time where many do.

A step of a few rows is bound by reading the weights once, which packed ones make shorter; with many rows the sums
themselves take the time, and torch's product makes them fastest. A float16 weight is a plain half matrix here: x is
rounded to half too, unlike on a CPU.
"""

from dataclasses import dataclass

import torch

from kernels.cuda.launch import Kernel, Launcher, flat
from kernels.packing import BLOCK, PANEL, PackedWeight, unpack

MAX_KERNEL_ROWS = 32
_THREADS = 256
_ROWS_AT_ONCE = (1, 2, 4, 8)
_UNPACKED_BYTES = 64 << 20
"""Of float32 that is made of packed weights at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class PlacedWeight:
    """A PackedWeight's arrays as tensors on the device; float16: one plain matrix [num_out, width]."""

    format: str
    num_out: int
    width: int
    panels: torch.Tensor
    scales: torch.Tensor


def place(weight: PackedWeight, device: torch.device) -> PlacedWeight:
    """A copy; float16 panels become the matrix they are of."""
    shape = (weight.format, weight.num_out, weight.width)
    if weight.format == "float16":
        matrix = torch.from_numpy(unpack(weight)).to(device, torch.float16)
        return PlacedWeight(*shape, matrix, matrix.new_empty(0))
    panels, scales = (torch.tensor(part, device=device) for part in (weight.panels, weight.scales))
    return PlacedWeight(*shape, panels, scales)


def multiply(launcher: Launcher, x: torch.Tensor, weight: PlacedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, width] -> [T, num_out] of x's type."""
    if weight.format == "float16":
        product = torch.nn.functional.linear(x.half(), weight.panels).to(x.dtype)
        return product if bias is None else product.add_(bias)
    x32, bias32 = x.float(), None if bias is None else bias.float()
    is_regular = weight.format == "int8" or weight.width % 8 == 0
    if 0 < len(x) <= MAX_KERNEL_ROWS and is_regular:
        return _few_rows(launcher, flat(x32), weight, bias32).to(x.dtype)
    return _many_rows(x32, weight, bias32).to(x.dtype)


def _few_rows(launcher: Launcher, x: torch.Tensor, weight: PlacedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_out = len(x), weight.num_out
    out = torch.empty((num_rows, num_out), dtype=torch.float32, device=x.device)
    at_once = next((rows for rows in _ROWS_AT_ONCE if rows >= num_rows), _ROWS_AT_ONCE[-1])
    name = f"linear_{weight.format}"
    launcher.launch(
        Kernel(name, f"{name}<{at_once}>"), (len(weight.panels), -(-num_rows // at_once), 1), _THREADS,
        x, weight.panels, weight.scales, None if bias is None else bias.contiguous(), out, num_rows, num_out,
        weight.width,
    )  # fmt: skip
    return out


def _many_rows(x: torch.Tensor, weight: PlacedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((len(x), weight.num_out), dtype=torch.float32, device=x.device)
    panels_at_once = max(1, _UNPACKED_BYTES // (4 * PANEL * weight.width))
    for first in range(0, len(weight.panels), panels_at_once):
        matrix = unpack_panels(weight, first, first + panels_at_once)
        columns = slice(first * PANEL, min((first + panels_at_once) * PANEL, weight.num_out))
        out[:, columns] = x @ matrix[: columns.stop - columns.start].T
    return out if bias is None else out.add_(bias)


def unpack_panels(weight: PlacedWeight, first: int, end: int) -> torch.Tensor:
    """Panels [first, end) of int8 or int4 as float32 [16 · panels, width], on the device."""
    panels, scales = weight.panels[first:end], weight.scales[first:end]
    if weight.format == "int8":
        rows = panels.float() * scales.unsqueeze(1)  # [P, width, 16]
        return rows.transpose(1, 2).reshape(-1, weight.width)
    num_panels, num_blocks = panels.shape[:2]
    packed = panels.view(num_panels, num_blocks, 4, 2, 8, 4)
    pairs = torch.stack((packed & 15, packed >> 4), dim=3)  # [P, block, pair, group, half, output, weight]
    values = pairs.permute(0, 4, 5, 1, 2, 3, 6).reshape(num_panels, PANEL, num_blocks, BLOCK)
    step, least = scales.float().permute(2, 0, 3, 1).unsqueeze(-1)  # [P, 16, block, 1] each
    whole: torch.Tensor = values * step + least
    return whole.view(num_panels * PANEL, num_blocks * BLOCK)[:, : weight.width]
