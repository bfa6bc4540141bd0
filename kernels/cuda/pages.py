"""Which pages and steps the attention kernels take."""

import torch

from kernels.reference import FP8_SCALE_BYTES

MAX_HEAD_DIM = 128
MAX_GROUP = 16
_KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def fits(q: torch.Tensor, kv_layer: torch.Tensor) -> bool:
    """Whether kernels know queries [T, Hq, D] over this layer; what they do not know takes the reference's way."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, _, row = kv_layer.shape[2:]
    return (
        kv_layer.device == q.device
        and kv_layer.dtype in _KINDS
        and kv_layer.is_contiguous()
        and kv_layer.data_ptr() % (4 * kv_layer.element_size()) == 0
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and num_heads <= MAX_GROUP * num_kv_heads
        and row == head_dim + (FP8_SCALE_BYTES if kv_layer.dtype == torch.uint8 else 0)
    )


def near(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """x where q is. Whoever calls often keeps it there."""
    return x.to(q.device).contiguous()
