"""The one public interface of the kernels: what a model may ask for, on any device.

`reference.py` says in plain torch what each op computes; `cpu/` and `cuda/` implement it; `get_ops` picks by
device. Shapes: T new tokens of S sequences, Hq query heads, Hkv key/value heads, D head dim, P pages, B page
tokens, F hidden of the gated MLP. A layer of the KV component is contiguous [P, 2, Hkv, B, row]: keys at 0,
values at 1. A row is D floats of any type, or, where the layer is uint8, D fp8 codes and their float32 scale
(`reference.encode_fp8`). positions are int64, block_tables, query_start and context_lens int32; each sequence has a new
token.

State that moves is bytes to whoever moves it: a component is uint8 [layers, U units, unit bytes], contiguous, `units`
int64 [n] beside it, and the buffer uint8 [layers, n, unit bytes]. Some layers of a component are state too.

CUDA graphs have fixed shapes, so their batches are padded. A padding row is a sequence of one token (query_start goes
on ascending by one) with position -1 and context_len 0: `rotary_and_store` writes nothing into pages for it, and its
rotated q is undefined; `paged_attention` gives zeros; the other ops treat every row alike. `reference` and `cuda` know
padding; `cpu` does not, for nothing pads there.
"""

from typing import Protocol

import torch

from kernels.packing import PackedWeight


class Ops(Protocol):
    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] -> [T, out]. Where the weight is packed, x and the sums are float32."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, H] -> [T, H], statistics in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""

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
        """Rotates q [T, Hq, D] and k [T, Hkv, D] half-split (GPT-NeoX order) by `cos_sin` [max_len, D] (first
        half cos, second half sin), writes k and v of each token into its sequence's page, and returns the
        rotated q."""

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the pages, which already hold the new tokens. Token i of
        sequence s stands at position context_lens[s] - (query_start[s+1] - query_start[s]) + i. Returns [T,
        Hq, D]. Rows of a page at or beyond the context never reach the result."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2F] -> [T, F]."""

    def gather_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fills the buffer with these units of each layer, in this order. They must be there: a GPU does not check."""

    def scatter_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        """The way back; other units stay as they are. No unit may be there twice."""


def get_ops(device: str) -> Ops:
    """The implementation for `cpu` or `cuda`; imports only what it needs. ImportError, saying what to install, where
    `cuda` lacks CuPy."""
    if device == "cpu":
        from kernels.cpu.ops import CpuOps

        return CpuOps()
    from kernels.cuda.ops import CudaOps

    return CudaOps()
