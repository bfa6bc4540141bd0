"""What a call of an op must move at least: bytes read and written once. Over the time it took, beside what the card
copies in that time, this says how good a kernel is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.packing import PackedWeight


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """op: the op that launches it. num_bytes: of that op's arguments; may wait for the device."""

    name: str
    op: str
    num_bytes: Callable[..., int]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> int:
    return 2 * x.nbytes + weight.nbytes


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> int:
    return 4 * x.nbytes + weight.nbytes


def silu_mul(gate_up: torch.Tensor) -> int:
    return gate_up.nbytes + gate_up.nbytes // 2


def rotary_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
) -> int:
    num_real = int((positions >= 0).sum())
    a_token = (2 * q.nbytes + k.nbytes + v.nbytes) // len(q) + cos_sin[0].nbytes + _position_bytes(kv_layer)
    return num_real * a_token + positions.nbytes


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> int:
    return 2 * q.nbytes + int(context_lens.sum()) * _position_bytes(kv_layer)


def moved_units(state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> int:
    return 2 * buffer.nbytes + units.nbytes


def linear(x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None) -> int:
    """The output is of x's type. A packed float16 weight is multiplied by torch, as a plain one is."""
    if isinstance(weight, PackedWeight):
        weight_bytes, num_out = weight.panels.nbytes + weight.scales.nbytes, weight.num_out
    else:
        weight_bytes, num_out = weight.nbytes, len(weight)
    return x.nbytes + weight_bytes + len(x) * num_out * x.element_size() + (0 if bias is None else bias.nbytes)


def _position_bytes(kv_layer: torch.Tensor) -> int:
    """Of the keys and values of one position."""
    _, sides, num_kv_heads, _, row = kv_layer.shape
    return int(sides * num_kv_heads * row * kv_layer.element_size())


KERNELS = (
    MeasuredKernel("rms_norm", "rms_norm", rms_norm),
    MeasuredKernel("add_rms_norm", "add_rms_norm", add_rms_norm),
    MeasuredKernel("silu_mul", "silu_mul", silu_mul),
    MeasuredKernel("rotary_and_store", "rotary_and_store", rotary_and_store),
    MeasuredKernel("decode_attention", "paged_attention", paged_attention),
    MeasuredKernel("prefill_attention", "paged_attention", paged_attention),
    MeasuredKernel("gather_units", "gather_units", moved_units),
    MeasuredKernel("scatter_units", "scatter_units", moved_units),
    MeasuredKernel("linear_int8", "linear", linear),
    MeasuredKernel("linear_int4", "linear", linear),
)
"""Every kernel of ours. decode_attention with `combine_splits`: paged_attention where every sequence has one new token;
prefill_attention: where it has several. linear_int8 and linear_int4: linear with few rows."""
