"""Rotary embedding and the write of new keys and values into their pages, in one pass over the step's tokens.

Queries, keys and values usually are slices of one projection, so the kernel takes flat memory and row
strides.
"""

import numpy as np
import torch
from numba import carray, prange  # type: ignore[attr-defined]

from kernels.cpu.arrays import Last, floats_at
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
    if rows is None or not q.dtype == k.dtype == v.dtype == cos_sin.dtype == torch.float32:
        return ReferenceOps().rotary_and_store(
            q, k, v, cos_sin, positions, kv_layer, block_tables, query_start
        )  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = np.empty((num_tokens, num_heads, head_dim), np.float32)
    turned = np.empty((num_tokens, num_kv_heads, head_dim), np.float32)
    q, k, v = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v)
    run = _rotate_and_store.serial if num_tokens <= SERIAL_TOKENS else _rotate_and_store
    run(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), _cos_sin(cos_sin),
        _positions(positions), rows, _tables(block_tables), _starts(query_start), turned, out,
    )  # fmt: skip
    return torch.from_numpy(out)


_cos_sin, _positions, _tables, _starts = Last(), Last(), Last(), Last()


def _heads_adjacent(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with each token's values in one piece, wherever its tokens lie."""
    _, head_stride, stride = x.stride()
    return x if stride == 1 and head_stride == x.shape[2] else x.contiguous()


@compiled
def _rotate_and_store(
    q_at: int,
    stride_q: int,
    k_at: int,
    stride_k: int,
    v_at: int,
    stride_v: int,
    cos_sin: np.ndarray,
    positions: np.ndarray,
    kv_layer: np.ndarray,
    block_tables: np.ndarray,
    query_start: np.ndarray,
    turned: np.ndarray,
    out: np.ndarray,
) -> None:
    """q_at and the like: where tokens' values begin in memory, `stride` values apart. turned [T, Hkv, D]: room for the
    rotated keys before they are narrowed."""
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads, page_tokens = kv_layer.shape[2], kv_layer.shape[3]
    q = carray(floats_at(q_at), ((num_tokens - 1) * stride_q + num_heads * head_dim,))
    k = carray(floats_at(k_at), ((num_tokens - 1) * stride_k + num_kv_heads * head_dim,))
    v = carray(floats_at(v_at), ((num_tokens - 1) * stride_v + num_kv_heads * head_dim,))
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
