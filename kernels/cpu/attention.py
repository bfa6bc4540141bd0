"""Attention over pages, read in place.

Single-token queries (decode) run in a compiled kernel. The work is cut into equal spans of one sequence's
context for one key/value head; a span's partial softmax is merged afterwards, so that a long context next to
short ones keeps all threads busy. Spans begin at multiples of a constant: how a row is summed does not depend
on the rest of the batch. Longer queries (prefill) gather their sequence once a layer and use torch's fused
attention.
"""

import functools

import numpy as np
import torch
from numba import prange

from kernels.cpu.exponential import exp_shifted
from kernels.cpu.prefetch import prefetch
from kernels.cpu.threads import compiled, inlined
from kernels.reference import ReferenceOps, gather_context

SPAN_TOKENS = 256
_LINE_FLOATS = 16


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    if q.dtype != torch.float32 or kv_layer.dtype != torch.float32:
        return ReferenceOps().paged_attention(q, kv_layer, block_tables, query_start, context_lens, scale)
    q = q.contiguous()
    out = torch.empty_like(q)
    starts = query_start.numpy()
    _decode(
        q.numpy(),
        kv_layer.numpy(),
        block_tables.numpy(),
        starts,
        context_lens.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    if len(q) > len(context_lens):
        for s in np.flatnonzero(np.diff(starts) > 1).tolist():
            rows = slice(int(starts[s]), int(starts[s + 1]))
            key, value = gather_context(kv_layer, block_tables[s], int(context_lens[s]))
            out[rows] = _prefill(q[rows], key, value, scale)
    return out


def _prefill(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    num_new, context_len = q.shape[0], key.shape[1]
    whole = num_new == context_len
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=None if whole else _causal_bias(num_new, context_len),
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


@functools.lru_cache(maxsize=2)
def _causal_bias(num_new: int, context_len: int) -> torch.Tensor:
    """[num_new, context_len], 0 where a new position may look and -inf where not; kept for a step's other
    layers."""
    position = torch.arange(context_len - num_new, context_len).unsqueeze(1)
    future = torch.arange(context_len) > position
    return torch.zeros(num_new, context_len).masked_fill_(future, float("-inf"))


@inlined
def _scores(
    q: np.ndarray, keys: np.ndarray, row: int, take: int, scale: np.float32, scores: np.ndarray, at: int,
    kv_flat: np.ndarray, ahead: int,
) -> None:  # fmt: skip
    """scores[g, at + t] = q[g] . keys[row + t] * scale for a page's rows. `ahead` is where in `kv_flat` the
    next page begins: its lines are asked for evenly while this one is computed."""
    head_dim = keys.shape[1]
    share = (4 * head_dim // _LINE_FLOATS + len(q) - 1) // len(q)
    zero = np.float32(0)
    for g in range(len(q)):
        query = q[g]
        t = 0
        while t + 4 <= take:
            for _ in range(share):
                prefetch(kv_flat, ahead)
                ahead += _LINE_FLOATS
            k0, k1, k2, k3 = keys[row + t], keys[row + t + 1], keys[row + t + 2], keys[row + t + 3]
            s0, s1, s2, s3 = zero, zero, zero, zero
            for d in range(head_dim):
                x = query[d]
                s0 += x * k0[d]
                s1 += x * k1[d]
                s2 += x * k2[d]
                s3 += x * k3[d]
            scores[g, at + t], scores[g, at + t + 1] = s0 * scale, s1 * scale
            scores[g, at + t + 2], scores[g, at + t + 3] = s2 * scale, s3 * scale
            t += 4
        while t < take:
            k0 = keys[row + t]
            s0 = zero
            for d in range(head_dim):
                s0 += query[d] * k0[d]
            scores[g, at + t] = s0 * scale
            t += 1


@inlined
def _add_values(
    scores: np.ndarray, at: int, values: np.ndarray, row: int, take: int, acc: np.ndarray,
    kv_flat: np.ndarray, ahead: int,
) -> None:  # fmt: skip
    """acc[g] += scores[g, at + t] * values[row + t] over a page's rows."""
    head_dim = values.shape[1]
    share = (4 * head_dim // _LINE_FLOATS + len(acc) - 1) // len(acc)
    for g in range(len(acc)):
        total = acc[g]
        t = 0
        while t + 4 <= take:
            for _ in range(share):
                prefetch(kv_flat, ahead)
                ahead += _LINE_FLOATS
            v0, v1, v2, v3 = values[row + t], values[row + t + 1], values[row + t + 2], values[row + t + 3]
            s0, s1 = scores[g, at + t], scores[g, at + t + 1]
            s2, s3 = scores[g, at + t + 2], scores[g, at + t + 3]
            for d in range(head_dim):
                total[d] += s0 * v0[d] + s1 * v1[d] + s2 * v2[d] + s3 * v3[d]
            t += 4
        while t < take:
            v0 = values[row + t]
            s0 = scores[g, at + t]
            for d in range(head_dim):
                total[d] += s0 * v0[d]
            t += 1


@inlined
def _span(
    q: np.ndarray,
    kv_layer: np.ndarray,
    kv_flat: np.ndarray,
    table: np.ndarray,
    head: int,
    begin: int,
    end: int,
    scale: np.float32,
    acc: np.ndarray,
    stats: np.ndarray,
) -> None:
    """One key/value head over positions [begin, end): acc [group, D] = sum of exp(score - max) * value, and
    stats [group, 2] = that max and the sum of the exps."""
    page_tokens, head_dim = kv_layer.shape[3], kv_layer.shape[4]
    head_size = page_tokens * head_dim
    side_size = kv_layer.shape[2] * head_size
    scores = np.empty((len(q), SPAN_TOKENS), np.float32)
    for side in range(2):
        position = begin
        while position < end:
            row = position % page_tokens
            take = min(page_tokens - row, end - position)
            following = position + take
            next_page = table[(following if following < end else begin) // page_tokens]
            next_side = side if following < end else 1
            ahead = (next_page * 2 + next_side) * side_size + head * head_size
            rows = kv_layer[table[position // page_tokens], side, head]
            if side == 0:
                _scores(q, rows, row, take, scale, scores, position - begin, kv_flat, ahead)
            else:
                _add_values(scores, position - begin, rows, row, take, acc, kv_flat, ahead)
            position = following
        if side == 0:
            for g in range(len(q)):
                stats[g, 0], stats[g, 1] = exp_shifted(scores[g], end - begin)
                acc[g] = np.float32(0)


@inlined
def _merge(acc: np.ndarray, stats: np.ndarray, out: np.ndarray) -> None:
    """out [Hq, D] = the spans of one query (acc [spans, Hq, D]), each weighted by its share of the
    softmax."""
    num_spans, num_heads, head_dim = acc.shape
    for head in range(num_heads):
        top = stats[0, head, 0]
        for span in range(1, num_spans):
            top = max(top, stats[span, head, 0])
        total = np.float32(0)
        for span in range(num_spans):
            total += stats[span, head, 1] * np.exp(stats[span, head, 0] - top)
        target = out[head]
        target[:] = np.float32(0)
        for span in range(num_spans):
            weight = np.exp(stats[span, head, 0] - top) / total
            part = acc[span, head]
            for d in range(head_dim):
                target[d] += weight * part[d]


@compiled
def _decode(
    q: np.ndarray,
    kv_layer: np.ndarray,
    block_tables: np.ndarray,
    query_start: np.ndarray,
    context_lens: np.ndarray,
    scale: np.float32,
    out: np.ndarray,
) -> None:
    """Fills the rows of `out` that belong to single-token queries."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = kv_layer.shape[2]
    group = num_heads // num_kv_heads
    num_sequences = len(context_lens)
    first_span = np.zeros(num_sequences + 1, np.int64)
    for s in range(num_sequences):
        first_span[s + 1] = first_span[s]
        if query_start[s + 1] - query_start[s] == 1:
            first_span[s + 1] += (context_lens[s] + SPAN_TOKENS - 1) // SPAN_TOKENS
    num_spans = first_span[num_sequences]
    sequence_of = np.empty(num_spans, np.int64)
    for s in range(num_sequences):
        sequence_of[first_span[s] : first_span[s + 1]] = s
    acc = np.empty((num_spans, num_heads, head_dim), np.float32)
    stats = np.empty((num_spans, num_heads, 2), np.float32)
    kv_flat = kv_layer.reshape(-1)
    for task in prange(num_spans * num_kv_heads):
        span, head = task // num_kv_heads, task % num_kv_heads
        s = sequence_of[span]
        begin = (span - first_span[s]) * SPAN_TOKENS
        end = min(begin + SPAN_TOKENS, context_lens[s])
        heads = slice(head * group, (head + 1) * group)
        query, table = q[query_start[s], heads], block_tables[s]
        _span(
            query, kv_layer, kv_flat, table, head, begin, end, scale, acc[span, heads], stats[span, heads]
        )  # fmt: skip
    for s in prange(num_sequences):
        spans = slice(first_span[s], first_span[s + 1])
        if first_span[s + 1] > first_span[s]:
            _merge(acc[spans], stats[spans], out[query_start[s]])
