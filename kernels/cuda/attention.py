"""Attention over pages, read in place: sequences with one new token by one kernel, those with several by another.

Which sequence has how many is known on the device only, so each kernel looks at all and leaves the other's alone. Where
there are as many tokens as sequences, every one decodes, and the second kernel is not launched.
"""

import torch

from kernels.cuda.launch import Launcher, flat, instance, is_float
from kernels.cuda.pages import fits, near
from kernels.reference import ReferenceOps

_DECODE_THREADS = 128
_DECODE_TILE = 64
_PREFILL_THREADS = 128
_PREFILL_QUERIES = 32

_BLOCKS_PER_PROCESSOR = 4
"""So many decode blocks should be there for all of the memory's speed. More could run, but each split has its cost."""
_TILES_PER_SPLIT = 4
"""A split of fewer positions than this many tiles is not worth its part of `combine_splits`."""
_MAX_SPLITS = 64


def paged_attention(
    launcher: Launcher,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    if not fits(q, kv_layer) or not is_float(q):
        return ReferenceOps().paged_attention(q, kv_layer, block_tables, query_start, context_lens, scale)
    q = flat(q)
    out = torch.empty_like(q)
    where = (near(block_tables, q), block_tables.shape[1], near(query_start, q), near(context_lens, q), scale, out)
    num_tokens, num_sequences = len(q), len(context_lens)
    if num_tokens == num_sequences or num_sequences > 1:
        _decode(launcher, q, kv_layer, num_sequences, *where)
    if num_tokens > num_sequences:
        num_heads, num_kv_heads = q.shape[1], kv_layer.shape[2]
        launcher.launch(
            instance("attention_prefill", "prefill_attention", q.dtype, kv_layer.dtype, q.shape[2]),
            (-(-num_tokens // _PREFILL_QUERIES), num_heads, 1), _PREFILL_THREADS,
            q, kv_layer, *where, num_tokens, num_sequences, num_kv_heads, kv_layer.shape[3],
        )  # fmt: skip
    return out


def num_splits(num_sequences: int, num_kv_heads: int, table_tokens: int, num_processors: int) -> int:
    """Into how many parts a decoding context is cut. Depends on shapes only, so that it is fixed in a CUDA graph."""
    wanted = -(-_BLOCKS_PER_PROCESSOR * num_processors // (num_sequences * num_kv_heads))
    useful = -(-table_tokens // (_TILES_PER_SPLIT * _DECODE_TILE))
    return max(1, min(wanted, useful, _MAX_SPLITS))


def _decode(
    launcher: Launcher,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    num_sequences: int,
    block_tables: torch.Tensor,
    table_width: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    _, num_heads, head_dim = q.shape
    num_kv_heads, page_tokens = kv_layer.shape[2:4]
    group = num_heads // num_kv_heads
    splits = num_splits(num_sequences, num_kv_heads, table_width * page_tokens, launcher.num_processors)
    partials = None
    if splits > 1:  # of each split the sum of values, the maximum and the sum of weights
        size = (num_sequences, num_heads, splits, head_dim + 2)
        partials = torch.empty(size, dtype=torch.float32, device=q.device)
    launcher.launch(
        instance("attention_decode", "decode_attention", q.dtype, kv_layer.dtype, head_dim, group),
        (splits, num_kv_heads, num_sequences), _DECODE_THREADS,
        q, kv_layer, block_tables, table_width, query_start, context_lens, scale, out, partials, page_tokens,
    )  # fmt: skip
    if partials is not None:
        kernel = instance("attention_decode", "combine_splits", q.dtype)
        arguments = (partials, query_start, out, splits, head_dim)
        launcher.launch(kernel, (num_heads, num_sequences, 1), _DECODE_THREADS, *arguments)
