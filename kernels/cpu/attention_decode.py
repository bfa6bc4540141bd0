"""Attention of one new token a sequence: what costs is reading the pages, so each is read once for all query heads that
share it.

The work is cut into spans of one sequence's context, of which each thread takes its share by tokens; a span's partial
softmax is merged afterwards, so that a long context next to short ones keeps all threads busy. Spans begin at multiples
of a constant: how a row is summed does not depend on the rest of the batch. Scores are in powers of two.
"""

import numpy as np
from numba import prange

from kernels.cpu.attention_rows import (
    SPAN_TOKENS,
    narrow_values_of_1,
    scores_of_1,
    scores_of_2,
    scores_of_3,
    values_of_1,
    values_of_2,
    values_of_3,
)  # fmt: skip
from kernels.cpu.kv_rows import load, scale_at, store
from kernels.cpu.prefetch import prefetch
from kernels.cpu.threads import compiled, inlined
from kernels.cpu.vector import LANES, add, add_product, exp2, larger, largest, splat, subtract, total, zeros

_LOG2_E = np.float32(1.4426950408889634)
_LINE_BYTES = 64
_WIDE = 4 * LANES
_MERGED_ALONE, _SPANS_ALONE = 16, 128


@inlined
def _page_scores(
    query: np.ndarray, group: int, head_dim: int, kv: np.ndarray, row: int, row_size: int, take: int, room: int,
    scores: np.ndarray, out: int, ahead: int,
) -> None:  # fmt: skip
    """Scores of `take` rows of a page from kv[row] on. Where four rows are at hand (`room` counts those left in the
    page) they are taken together; what lies beyond `take` is overwritten later. At kv[ahead] the next page begins."""
    t = 0
    while t + 4 <= room and t < take:
        stop = ahead + 4 * row_size
        while ahead < stop:
            prefetch(kv, ahead)
            ahead += _LINE_BYTES // kv.itemsize
        ahead = stop
        g = 0
        at = row + t * row_size
        while g + 3 <= group and g + 4 != group:
            scores_of_3(query, g * head_dim, kv, at, row_size, head_dim, scores, out + g * SPAN_TOKENS + t)
            g += 3
        while g + 2 <= group:
            scores_of_2(query, g * head_dim, kv, at, row_size, head_dim, scores, out + g * SPAN_TOKENS + t)
            g += 2
        if g < group:
            scores_of_1(query, g * head_dim, kv, at, row_size, head_dim, scores, out + g * SPAN_TOKENS + t)
        t += 4
    while t < take:
        for g in range(group):
            found = zeros()
            for d in range(0, head_dim, LANES):
                found = add_product(found, load(query, g * head_dim + d), load(kv, row + t * row_size + d))
            scores[out + g * SPAN_TOKENS + t] = total(found)
        t += 1
    for t in range(take):
        scale = scale_at(kv, row + t * row_size + head_dim)
        for g in range(group):
            scores[out + g * SPAN_TOKENS + t] *= scale


@inlined
def _softmax(scores: np.ndarray, begin: int, count: int) -> tuple[np.float32, np.float32]:
    """scores[begin:][:count] become 2 ** (score - max); (max, their sum). The rest of a vector is overwritten."""
    stop = (count + LANES - 1) // LANES * LANES
    for t in range(count, stop):
        scores[begin + t] = -np.inf
    tops = load(scores, begin)
    for t in range(LANES, stop, LANES):
        tops = larger(tops, load(scores, begin + t))
    top = largest(tops)
    sums = zeros()
    for t in range(0, stop, LANES):
        weight = exp2(subtract(load(scores, begin + t), splat(top)))
        store(scores, begin + t, weight)
        sums = add(sums, weight)
    return top, total(sums)


@inlined
def _page_values(
    weights: np.ndarray, at: int, group: int, head_dim: int, kv: np.ndarray, row: int, row_size: int, take: int,
    acc: np.ndarray, ahead: int,
) -> None:  # fmt: skip
    """acc [group, D] += the weights, from weights[at] on, times `take` rows of a page from kv[row] on."""
    for t in range(take):
        scale = scale_at(kv, row + t * row_size + head_dim)
        for g in range(group):
            weights[at + g * SPAN_TOKENS + t] *= scale
    stop = ahead + take * row_size
    while ahead < stop:
        prefetch(kv, ahead)
        ahead += _LINE_BYTES // kv.itemsize
    d = 0
    while d < head_dim:
        wide = d + _WIDE <= head_dim
        g = 0
        while wide and g + 3 <= group and g + 4 != group:
            first, out = at + g * SPAN_TOKENS, g * head_dim + d
            values_of_3(weights, first, kv, row + d, row_size, take, acc, out, head_dim)
            g += 3
        while wide and g + 2 <= group:
            first, out = at + g * SPAN_TOKENS, g * head_dim + d
            values_of_2(weights, first, kv, row + d, row_size, take, acc, out, head_dim)
            g += 2
        while g < group:
            first, out = at + g * SPAN_TOKENS, g * head_dim + d
            if wide:
                values_of_1(weights, first, kv, row + d, row_size, take, acc, out)
            else:
                narrow_values_of_1(weights, first, kv, row + d, row_size, take, acc, out)
            g += 1
        d += _WIDE if wide else LANES


@inlined
def _span(
    query: np.ndarray, group: int, kv_layer: np.ndarray, kv: np.ndarray, table: np.ndarray, first_head: int,
    begin: int, end: int, acc: np.ndarray, stats: np.ndarray,
) -> None:  # fmt: skip
    """Some key/value heads, from `first_head` on, over positions [begin, end): acc [Hq of them, D] = sum of
    2 ** (score - max) * value, and stats [Hq of them, 2] = that max and the sum of the powers. All flat but the layer
    and the table. A page's heads lie side by side and are read in that order."""
    num_sides_heads, page_tokens, row_size = kv_layer.shape[2], kv_layer.shape[3], kv_layer.shape[4]
    num_rows = len(stats) // 2
    head_dim = len(query) // num_rows
    num_heads = num_rows // group
    head_size = page_tokens * row_size
    scores = np.empty(num_rows * SPAN_TOKENS + 4, np.float32)
    for side in range(2):
        position = begin
        while position < end:
            first = position % page_tokens
            take = min(page_tokens - first, end - position)
            following = position + take
            next_page = table[(following if following < end else begin) // page_tokens]
            next_side = side if following < end else 1
            next_base = ((next_page * 2 + next_side) * num_sides_heads + first_head) * head_size
            base = ((table[position // page_tokens] * 2 + side) * num_sides_heads + first_head) * head_size
            at = position - begin
            room = min(page_tokens - first, SPAN_TOKENS - at)
            for h in range(num_heads):
                row = base + h * head_size + first * row_size
                ahead = next_base + h * head_size
                out = h * group * SPAN_TOKENS + at
                if side == 0:
                    part = query[h * group * head_dim : (h + 1) * group * head_dim]
                    _page_scores(part, group, head_dim, kv, row, row_size, take, room, scores, out, ahead)
                else:
                    found = acc[h * group * head_dim : (h + 1) * group * head_dim]
                    _page_values(scores, out, group, head_dim, kv, row, row_size, take, found, ahead)
            position = following
        if side == 0:
            for g in range(num_rows):
                stats[2 * g], stats[2 * g + 1] = _softmax(scores, g * SPAN_TOKENS, end - begin)
            acc[:] = np.float32(0)


@inlined
def _merge(acc: np.ndarray, stats: np.ndarray, out: np.ndarray) -> None:
    """out [Hq, D] = the spans of one query (acc [spans, Hq, D]), each weighted by its share of the
    softmax."""
    num_spans, num_heads, head_dim = acc.shape
    for head in range(num_heads):
        top = stats[0, head, 0]
        for span in range(1, num_spans):
            top = max(top, stats[span, head, 0])
        whole = np.float32(0)
        for span in range(num_spans):
            whole += stats[span, head, 1] * np.exp2(stats[span, head, 0] - top)
        target = out[head]
        target[:] = np.float32(0)
        for span in range(num_spans):
            weight = np.exp2(stats[span, head, 0] - top) / whole
            part = acc[span, head]
            for d in range(head_dim):
                target[d] += weight * part[d]


@inlined
def _merge_one(
    s: int, first_span: np.ndarray, acc: np.ndarray, stats: np.ndarray, query_start: np.ndarray, out: np.ndarray
) -> None:
    spans = slice(first_span[s], first_span[s + 1])
    if first_span[s + 1] > first_span[s]:
        _merge(acc[spans], stats[spans], out[query_start[s]])


@compiled
def decode(
    q: np.ndarray, kv_layer: np.ndarray, block_tables: np.ndarray, query_start: np.ndarray, context_lens: np.ndarray,
    scale: np.float32, out: np.ndarray, num_threads: int,
) -> None:  # fmt: skip
    """Fills the rows of `out` that belong to single-token queries. kv_layer [P, 2, Hkv, B, row] of a kind that
    `kv_rows` knows; D is a multiple of 8."""
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
    kv = kv_layer.reshape(-1)
    factor = scale * _LOG2_E
    num_parts = 1 if num_spans >= num_kv_heads * num_threads else num_kv_heads
    part_heads = num_kv_heads // num_parts
    all_tokens = np.int64(0)
    for span in range(num_spans):
        s = sequence_of[span]
        all_tokens += min(SPAN_TOKENS, context_lens[s] - (span - first_span[s]) * SPAN_TOKENS)
    for thread in prange(num_threads):
        before = np.int64(0)
        for task in range(num_spans * num_parts):
            span, part = task // num_parts, task % num_parts
            s = sequence_of[span]
            begin = (span - first_span[s]) * SPAN_TOKENS
            end = min(begin + SPAN_TOKENS, context_lens[s])
            middle = before + (end - begin) // 2
            before += end - begin
            if middle * num_threads // (all_tokens * num_parts) != thread:
                continue
            heads = slice(part * part_heads * group, (part + 1) * part_heads * group)
            query = (q[query_start[s], heads] * factor).reshape(-1)
            found, statistics = acc[span, heads].reshape(-1), stats[span, heads].reshape(-1)
            _span(query, group, kv_layer, kv, block_tables[s], part * part_heads, begin, end, found, statistics)
    # Waking the other threads once more would cost more than merging few.
    num_merged = min(num_sequences, _MERGED_ALONE) if num_spans <= _SPANS_ALONE else 0
    for s in range(num_merged):
        _merge_one(s, first_span, acc, stats, query_start, out)
    if num_sequences > num_merged:
        for s in prange(num_merged, num_sequences):
            _merge_one(s, first_span, acc, stats, query_start, out)
