"""Attention of several new tokens a sequence, page by page: no copy of the history, no matrix of scores.

A task is one key/value head and as many new tokens as make BLOCK_ROWS rows with their query heads. It walks the context
in tiles: a tile's keys and values are widened to float32 once for all rows, and scores are kept transposed
[tokens, rows], so that neither keys nor values are ever transposed and the softmax never adds across lanes. Both
products are blocks of 6 by 16 whose sums stay in registers. Scores are in powers of two.
"""

import numpy as np
from numba import prange

from kernels.cpu.kv_rows import load, scale_at, store
from kernels.cpu.threads import compiled, inlined
from kernels.cpu.vector import (
    LANES,
    add,
    add_product,
    exp2,
    larger,
    multiply,
    splat,
    splat_at,
    subtract,
    where_at_most,
    zeros,
)  # fmt: skip

BLOCK_ROWS = 192
TILE_TOKENS = 96
_LOG2_E = np.float32(1.4426950408889634)
_PANEL = 2 * LANES


@inlined
def _scores_6x16(
    keys: np.ndarray, at: int, head_dim: int, panel: np.ndarray, first: int, scores: np.ndarray, out: int, width: int
) -> None:
    """scores[out + t * width + r] = key t . query r, for 6 keys from keys[at] on and a panel [D, 16] of queries."""
    a0, a1, b0, b1, c0, c1 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    d0, d1, e0, e1, f0, f1 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for d in range(head_dim):
        x, y = load(panel, first), load(panel, first + LANES)
        k = splat_at(keys, at + d)
        a0, a1 = add_product(a0, k, x), add_product(a1, k, y)
        k = splat_at(keys, at + head_dim + d)
        b0, b1 = add_product(b0, k, x), add_product(b1, k, y)
        k = splat_at(keys, at + 2 * head_dim + d)
        c0, c1 = add_product(c0, k, x), add_product(c1, k, y)
        k = splat_at(keys, at + 3 * head_dim + d)
        d0, d1 = add_product(d0, k, x), add_product(d1, k, y)
        k = splat_at(keys, at + 4 * head_dim + d)
        e0, e1 = add_product(e0, k, x), add_product(e1, k, y)
        k = splat_at(keys, at + 5 * head_dim + d)
        f0, f1 = add_product(f0, k, x), add_product(f1, k, y)
        first += _PANEL
    _store_pair(scores, out, a0, a1)
    _store_pair(scores, out + width, b0, b1)
    _store_pair(scores, out + 2 * width, c0, c1)
    _store_pair(scores, out + 3 * width, d0, d1)
    _store_pair(scores, out + 4 * width, e0, e1)
    _store_pair(scores, out + 5 * width, f0, f1)


@inlined
def _store_pair(array: np.ndarray, at: int, x: object, y: object) -> None:
    store(array, at, x)
    store(array, at + LANES, y)


@inlined
def _values_6x16(
    weights: np.ndarray, at: int, width: int, count: int, values: np.ndarray, column: int, head_dim: int,
    acc: np.ndarray, shrink: np.ndarray, row: int,
) -> None:  # fmt: skip
    """acc[row..row+5, column..column+15] = that times shrink[row] + weights[:, row] . values[:, column]."""
    out = row * head_dim + column
    s = splat_at(shrink, row)
    a0, a1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    s, out = splat_at(shrink, row + 1), out + head_dim
    b0, b1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    s, out = splat_at(shrink, row + 2), out + head_dim
    c0, c1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    s, out = splat_at(shrink, row + 3), out + head_dim
    d0, d1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    s, out = splat_at(shrink, row + 4), out + head_dim
    e0, e1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    s, out = splat_at(shrink, row + 5), out + head_dim
    f0, f1 = multiply(s, load(acc, out)), multiply(s, load(acc, out + LANES))
    for t in range(count):
        v, w = load(values, column + t * head_dim), load(values, column + t * head_dim + LANES)
        p = splat_at(weights, at)
        a0, a1 = add_product(a0, p, v), add_product(a1, p, w)
        p = splat_at(weights, at + 1)
        b0, b1 = add_product(b0, p, v), add_product(b1, p, w)
        p = splat_at(weights, at + 2)
        c0, c1 = add_product(c0, p, v), add_product(c1, p, w)
        p = splat_at(weights, at + 3)
        d0, d1 = add_product(d0, p, v), add_product(d1, p, w)
        p = splat_at(weights, at + 4)
        e0, e1 = add_product(e0, p, v), add_product(e1, p, w)
        p = splat_at(weights, at + 5)
        f0, f1 = add_product(f0, p, v), add_product(f1, p, w)
        at += width
    out = row * head_dim + column
    _store_pair(acc, out, a0, a1)
    _store_pair(acc, out + head_dim, b0, b1)
    _store_pair(acc, out + 2 * head_dim, c0, c1)
    _store_pair(acc, out + 3 * head_dim, d0, d1)
    _store_pair(acc, out + 4 * head_dim, e0, e1)
    _store_pair(acc, out + 5 * head_dim, f0, f1)


@inlined
def _values_1x8(
    weights: np.ndarray, at: int, width: int, count: int, values: np.ndarray, column: int, head_dim: int,
    acc: np.ndarray, shrink: np.ndarray, row: int,
) -> None:  # fmt: skip
    """What head dims that are no multiple of 16 leave."""
    found = multiply(splat_at(shrink, row), load(acc, row * head_dim + column))
    for t in range(count):
        found = add_product(found, splat_at(weights, at + t * width), load(values, column + t * head_dim))
    store(acc, row * head_dim + column, found)


@inlined
def _widen_tile(
    kv_layer: np.ndarray, kv: np.ndarray, table: np.ndarray, head: int, begin: int, count: int, head_dim: int,
    keys: np.ndarray, values: np.ndarray,
) -> None:  # fmt: skip
    """Positions begin, begin + 1 … of one head, and zero keys up to a multiple of 6."""
    page_tokens, row_size = kv_layer.shape[3], kv_layer.shape[4]
    head_size = page_tokens * row_size
    side_size = kv_layer.shape[2] * head_size
    for t in range(count):
        position = begin + t
        page = table[position // page_tokens]
        row = page * 2 * side_size + head * head_size + position % page_tokens * row_size
        scale = splat(scale_at(kv, row + head_dim))
        for d in range(0, head_dim, LANES):
            store(keys, t * head_dim + d, multiply(scale, load(kv, row + d)))
        row += side_size
        scale = splat(scale_at(kv, row + head_dim))
        for d in range(0, head_dim, LANES):
            store(values, t * head_dim + d, multiply(scale, load(kv, row + d)))
    keys[count * head_dim : (count + 5) // 6 * 6 * head_dim] = np.float32(0)


@inlined
def _softmax_tile(
    scores: np.ndarray, width: int, num_rows: int, count: int, begin: int, last: np.ndarray, masked: bool,
    tops: np.ndarray, sums: np.ndarray, shrink: np.ndarray,
) -> None:  # fmt: skip
    """scores become weights relative to each row's largest score so far; `shrink` is what earlier weights, and their
    `sums`, are worth now. Rows look no further than position last[row]."""
    for r in range(0, num_rows, LANES):
        limit, top = load(last, r), load(tops, r)
        if masked:
            for t in range(count):
                score = load(scores, t * width + r)
                hidden = where_at_most(splat(np.float32(begin + t)), limit, score, splat(np.float32(-np.inf)))
                store(scores, t * width + r, hidden)
        highest = top
        for t in range(count):
            highest = larger(load(scores, t * width + r), highest)
        worth = exp2(subtract(top, highest))
        total = multiply(worth, load(sums, r))
        for t in range(count):
            weight = exp2(subtract(load(scores, t * width + r), highest))
            if masked:
                weight = where_at_most(splat(np.float32(begin + t)), limit, weight, zeros())
            store(scores, t * width + r, weight)
            total = add(total, weight)
        store(tops, r, highest)
        store(sums, r, total)
        store(shrink, r, worth)


@inlined
def _block(
    q: np.ndarray, kv_layer: np.ndarray, kv: np.ndarray, table: np.ndarray, head: int, group: int, start: int,
    factor: np.float32, out: np.ndarray, scratch: np.ndarray,
) -> None:  # fmt: skip
    """Queries q [t, group, D] of one key/value head, whose first token is at position `start`, to out [t, group, D].
    A row is a token's query head."""
    num_tokens, head_dim = q.shape[0], q.shape[2]
    num_rows = num_tokens * group
    width = (num_rows + 47) // 48 * 48
    panels = scratch[: width * head_dim]
    acc = scratch[width * head_dim : 2 * width * head_dim]
    at = 2 * width * head_dim
    scores = scratch[at : at + TILE_TOKENS * width]
    at += TILE_TOKENS * width
    keys = scratch[at : at + TILE_TOKENS * head_dim]
    at += TILE_TOKENS * head_dim
    values = scratch[at : at + TILE_TOKENS * head_dim]
    at += TILE_TOKENS * head_dim
    last, tops = scratch[at : at + width], scratch[at + width : at + 2 * width]
    sums, shrink = scratch[at + 2 * width : at + 3 * width], scratch[at + 3 * width : at + 4 * width]
    for r in range(width):
        first = r // _PANEL * _PANEL * head_dim + r % _PANEL
        for d in range(head_dim):
            panels[first + d * _PANEL] = q[r // group, r % group, d] * factor if r < num_rows else np.float32(0)
        last[r] = start + r // group
    acc[:], tops[:], sums[:] = np.float32(0), np.float32(-np.inf), np.float32(0)
    end = start + num_tokens
    for begin in range(0, end, TILE_TOKENS):
        count = min(TILE_TOKENS, end - begin)
        _widen_tile(kv_layer, kv, table, head, begin, count, head_dim, keys, values)
        for r in range(0, num_rows, _PANEL):
            for t in range(0, count, 6):
                _scores_6x16(keys, t * head_dim, head_dim, panels, r * head_dim, scores, t * width + r, width)
        masked = begin + count - 1 > start
        _softmax_tile(scores, width, num_rows, count, begin, last, masked, tops, sums, shrink)
        for r in range(0, num_rows, 6):
            for d in range(0, head_dim - _PANEL + 1, _PANEL):
                _values_6x16(scores, r, width, count, values, d, head_dim, acc, shrink, r)
            if head_dim % _PANEL:
                for i in range(r, r + 6):
                    _values_1x8(scores, i, width, count, values, head_dim - LANES, head_dim, acc, shrink, i)
    for r in range(num_rows):
        inverse = np.float32(1) / sums[r]
        for d in range(head_dim):
            out[r // group, r % group, d] = acc[r * head_dim + d] * inverse


@compiled
def prefill(
    q: np.ndarray, kv_layer: np.ndarray, block_tables: np.ndarray, query_start: np.ndarray, context_lens: np.ndarray,
    scale: np.float32, out: np.ndarray, num_parts: int,
) -> None:  # fmt: skip
    """Fills the rows of `out` that belong to queries of several tokens. kv_layer as in `decode`. Each of `num_parts`
    takes every so many blocks, so that short and long ones are shared out evenly."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = kv_layer.shape[2]
    group = num_heads // num_kv_heads
    block_tokens = max(1, BLOCK_ROWS // group)
    num_sequences = len(context_lens)
    first_block = np.zeros(num_sequences + 1, np.int64)
    for s in range(num_sequences):
        num_new = query_start[s + 1] - query_start[s]
        first_block[s + 1] = first_block[s]
        if num_new > 1:
            first_block[s + 1] += (num_new + block_tokens - 1) // block_tokens
    num_tasks = first_block[num_sequences] * num_kv_heads
    width = (block_tokens * group + 47) // 48 * 48
    scratch = np.empty((num_parts, 2 * (width + TILE_TOKENS) * head_dim + (TILE_TOKENS + 4) * width), np.float32)
    kv = kv_layer.reshape(-1)
    factor = scale * _LOG2_E
    for part in prange(num_parts):
        s = 0
        for task in range(part, num_tasks, num_parts):
            block, head = task // num_kv_heads, task % num_kv_heads
            while first_block[s + 1] <= block:
                s += 1
            begin = query_start[s] + (block - first_block[s]) * block_tokens
            end = min(begin + block_tokens, query_start[s + 1])
            heads = slice(head * group, (head + 1) * group)
            start = context_lens[s] - (query_start[s + 1] - begin)
            _block(
                q[begin:end, heads], kv_layer, kv, block_tables[s], head, group, start, factor, out[begin:end, heads],
                scratch[part],
            )  # fmt: skip
