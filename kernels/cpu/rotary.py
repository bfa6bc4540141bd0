"""Rotary embedding and the write of new keys and values into their pages, in one pass over the step's tokens.

Queries, keys and values usually are slices of one projection, so the kernel takes flat memory and row
strides.
"""

import numpy as np
import torch
from numba import prange

from kernels.cpu.kv_rows import as_rows, load, store, store_scale
from kernels.cpu.threads import compiled, inlined
from kernels.cpu.vector import LANES, add_product, larger, largest, multiply, splat, subtract, total, zeros
from kernels.reference import ReferenceOps

SERIAL_TOKENS = 16


def rotary_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
) -> torch.Tensor:
    rows = as_rows(kv_layer, q.shape[2])
    if rows is None or any(x.dtype != torch.float32 for x in (q, k, v, cos_sin)):
        return ReferenceOps().rotary_and_store(
            q, k, v, cos_sin, positions, kv_layer, block_tables, query_start
        )  # fmt: skip
    out, turned = np.empty(q.shape, np.float32), np.empty(k.shape, np.float32)
    (flat_q, stride_q), (flat_k, stride_k), (flat_v, stride_v) = _flat(q), _flat(k), _flat(v)
    run = _rotate_and_store.serial if len(q) <= SERIAL_TOKENS else _rotate_and_store
    run(
        flat_q, stride_q, flat_k, stride_k, flat_v, stride_v, cos_sin.contiguous().numpy(), positions.numpy(),
        rows, block_tables.numpy(), query_start.numpy(), turned, out,
    )  # fmt: skip
    return torch.from_numpy(out)


def _flat(x: torch.Tensor) -> tuple[np.ndarray, int]:
    """The memory that x [T, H, D] spans, and the distance of its tokens; copies where heads are not
    adjacent."""
    num_tokens, num_heads, head_dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != head_dim:
        x = x.contiguous()
    stride = x.stride(0)
    return x.as_strided(((num_tokens - 1) * stride + num_heads * head_dim,), (1,)).numpy(), stride


@compiled
def _rotate_and_store(
    q: np.ndarray,
    stride_q: int,
    k: np.ndarray,
    stride_k: int,
    v: np.ndarray,
    stride_v: int,
    cos_sin: np.ndarray,
    positions: np.ndarray,
    kv_layer: np.ndarray,
    block_tables: np.ndarray,
    query_start: np.ndarray,
    turned: np.ndarray,
    out: np.ndarray,
) -> None:
    """turned [T, Hkv, D]: room for the rotated keys before they are narrowed."""
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads, page_tokens = kv_layer.shape[2], kv_layer.shape[3]
    half = head_dim // 2
    row_size = kv_layer.shape[4]
    side_size = num_kv_heads * page_tokens * row_size
    kv, flat_turned = kv_layer.reshape(-1), turned.reshape(-1)
    for t in prange(num_tokens):
        position = positions[t]
        sequence = np.searchsorted(query_start, t, side="right") - 1
        page, row = block_tables[sequence, position // page_tokens], position % page_tokens
        cos, sin = cos_sin[position, :half], cos_sin[position, half:]
        for h in range(num_heads):
            source = q[t * stride_q + h * head_dim : t * stride_q + (h + 1) * head_dim]
            target = out[t, h]
            for d in range(half):
                target[d] = source[d] * cos[d] - source[d + half] * sin[d]
                target[d + half] = source[d + half] * cos[d] + source[d] * sin[d]
        for h in range(num_kv_heads):
            source = k[t * stride_k + h * head_dim : t * stride_k + (h + 1) * head_dim]
            target = turned[t, h]
            for d in range(half):
                target[d] = source[d] * cos[d] - source[d + half] * sin[d]
                target[d + half] = source[d + half] * cos[d] + source[d] * sin[d]
            at = page * 2 * side_size + (h * page_tokens + row) * row_size
            _store_row(flat_turned, (t * num_kv_heads + h) * head_dim, head_dim, kv, at)
            _store_row(v, t * stride_v + h * head_dim, head_dim, kv, at + side_size)


@inlined
def _store_row(source: np.ndarray, first: int, head_dim: int, kv: np.ndarray, at: int) -> None:
    tops, spoiled = zeros(), zeros()
    for d in range(first, first + head_dim, LANES):
        x = load(source, d)
        size = larger(x, subtract(zeros(), x))
        tops = larger(size, tops)
        spoiled = add_product(spoiled, x, zeros())  # NaN where x is no number: the whole row then is none
    factor = splat(store_scale(kv, at + head_dim, largest(tops) + total(spoiled)))
    for d in range(0, head_dim, LANES):
        store(kv, at + d, multiply(factor, load(source, first + d)))
