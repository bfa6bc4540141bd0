"""Rotary embedding and the write of new keys and values into their pages, in one pass over the step's tokens."""

import torch

from kernels.cuda.launch import Launcher, instance, is_float
from kernels.cuda.pages import fits, near
from kernels.reference import ReferenceOps

_THREADS = 256


def rotary_and_store(
    launcher: Launcher,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
) -> torch.Tensor:
    if not fits(q, kv_layer) or not is_float(q, k, v, cos_sin):
        return ReferenceOps().rotary_and_store(
            q, k, v, cos_sin, positions, kv_layer, block_tables, query_start
        )  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = _heads_together(q), _heads_together(k), _heads_together(v)
    launcher.launch(
        instance("rotary", "rotary_and_store", q.dtype, kv_layer.dtype), (num_tokens, 1, 1), _THREADS,
        q, k, v, q.stride(0), k.stride(0), v.stride(0), cos_sin.contiguous(), near(positions, q), kv_layer,
        near(block_tables, q), block_tables.shape[1], near(query_start, q), len(query_start) - 1,
        out, num_heads, k.shape[1], head_dim, kv_layer.shape[3],
    )  # fmt: skip
    return out


def _heads_together(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]: tokens may lie apart, as slices of one projection do; what is of one token may not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
