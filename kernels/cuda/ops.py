"""The ops on a GPU: kernels of our own where the order of reading decides, torch where it is as good.

Everything is queued on torch's current stream, nothing waits. A kernel instance is compiled at its first launch and a
packed weight is copied to the device at its first product; neither can be part of a CUDA graph's capture, so run once
what is to be captured.
"""

from functools import cache

import numpy as np
import torch

from kernels.cuda import activation, attention, gather, linear, norm, rotary
from kernels.cuda.launch import Launcher
from kernels.cuda.traffic import KERNELS
from kernels.packing import FORMATS, PANEL, PackedWeight, pack
from kernels.reference import FP8_SCALE_BYTES

__all__ = ["KERNELS", "KV_TYPES", "CudaOps", "warm_up"]

KV_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.uint8}


class CudaOps:
    """launcher: how kernels reach a device; CuPy on torch's current device unless a test brings another."""

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher or _cupy_launcher()
        self._placed: dict[int, tuple[PackedWeight, linear.PlacedWeight]] = {}
        """By the packed weight's id, which is its own as long as it is kept here."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return torch.nn.functional.linear(x, weight, bias)
        if id(weight) not in self._placed:
            self._placed[id(weight)] = (weight, linear.place(weight, x.device))
        return linear.multiply(self._launcher, x, self._placed[id(weight)][1], bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(self._launcher, x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(self._launcher, x, residual, weight, eps)

    def rotary_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
    ) -> torch.Tensor:
        return rotary.rotary_and_store(
            self._launcher, q, k, v, cos_sin, positions, kv_layer, block_tables, query_start
        )  # fmt: skip

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        return attention.paged_attention(
            self._launcher, q, kv_layer, block_tables, query_start, context_lens, scale
        )  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(self._launcher, gate_up)

    def gather_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        gather.gather_units(self._launcher, state, units, buffer)

    def scatter_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        gather.scatter_units(self._launcher, state, units, buffer)


def warm_up(
    kv_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    group: int = 3,
    ops: CudaOps | None = None,
    device: str = "cuda",
) -> None:
    """Compiles the kernels a model with these numbers uses, or loads them from the cache. Kernels of attention are made
    for one head_dim and one number of query heads over a kv head, so others are compiled at their first launch."""
    ops = ops or CudaOps()
    for num_tokens in (1, 2, 4, 8):  # the products with packed weights have kernels for so many rows
        _step(ops, num_tokens, KV_TYPES[kv_dtype], dtype, head_dim, group, device)


def _step(
    ops: CudaOps, num_tokens: int, kv_type: torch.dtype, dtype: torch.dtype, head_dim: int, group: int, device: str
) -> None:
    """One pass through every op over tokens of one sequence each, and attention once more as if they were of one."""
    x = torch.ones(num_tokens, group * head_dim, dtype=dtype, device=device)
    ops.rms_norm(x, x[0], 1e-5)
    ops.add_rms_norm(x, x, x[0], 1e-5)
    ops.silu_mul(x)
    if dtype == torch.float32:
        for name in FORMATS:
            ops.linear(x, pack(np.ones((PANEL, x.shape[1]), np.float32), name))
    heads, kv = x.view(num_tokens, group, head_dim), x[:, :head_dim].view(num_tokens, 1, head_dim)
    row = head_dim + (FP8_SCALE_BYTES if kv_type == torch.uint8 else 0)
    page_tokens = 1024  # long enough for several splits
    kv_layer = torch.zeros(num_tokens, 2, 1, page_tokens, row, dtype=kv_type, device=device)
    numbers = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    tables, ones = numbers[:-1].unsqueeze(1), torch.ones_like(numbers)
    q = ops.rotary_and_store(heads, kv, kv, x[:1, :head_dim], numbers[:-1].long() * 0, kv_layer, tables, numbers)
    ops.paged_attention(q, kv_layer, tables, numbers, ones[:-1], 1.0)
    ops.paged_attention(q, kv_layer, tables[:1], numbers[[0, -1]], numbers[-1:], 1.0)
    units = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
    ops.gather_units(units, numbers[:1].long(), units.clone())
    ops.scatter_units(units, numbers[:1].long(), units.clone())


@cache
def _cupy_launcher() -> Launcher:
    """One a process: what one model's warm-up compiled, the next need not."""
    try:
        from kernels.cuda.cupy_launcher import CupyLauncher
    except ImportError as error:
        why = "kernels for a GPU are compiled by CuPy, which cannot be imported here: install baton-serving[cuda]"
        raise ImportError(f"{why} ({error})") from error
    return CupyLauncher()
