"""The innermost loops of decoding: one, two or three query heads against rows of keys or values, loaded once for all of
them. What they add up stays in registers, which is why each number of heads is written out.
"""

import numpy as np

from kernels.cpu.kv_rows import load, store
from kernels.cpu.threads import inlined
from kernels.cpu.vector import LANES, add_product, splat_at, store_totals, zeros

SPAN_TOKENS = 256
"""The scores of two heads lie so far apart."""


@inlined
def scores_of_3(
    query: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, head_dim: int, scores: np.ndarray, out: int,
) -> None:  # fmt: skip
    """Three query heads, from query[at] on, times four rows of keys, from kv[row] on."""
    a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
    b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
    c0, c1, c2, c3 = zeros(), zeros(), zeros(), zeros()
    for d in range(0, head_dim, LANES):
        x, y, z = load(query, at + d), load(query, at + head_dim + d), load(query, at + 2 * head_dim + d)
        k = load(kv, row + d)
        a0, b0, c0 = add_product(a0, x, k), add_product(b0, y, k), add_product(c0, z, k)
        k = load(kv, row + row_size + d)
        a1, b1, c1 = add_product(a1, x, k), add_product(b1, y, k), add_product(c1, z, k)
        k = load(kv, row + 2 * row_size + d)
        a2, b2, c2 = add_product(a2, x, k), add_product(b2, y, k), add_product(c2, z, k)
        k = load(kv, row + 3 * row_size + d)
        a3, b3, c3 = add_product(a3, x, k), add_product(b3, y, k), add_product(c3, z, k)
    store_totals(scores, out, a0, a1, a2, a3)
    store_totals(scores, out + SPAN_TOKENS, b0, b1, b2, b3)
    store_totals(scores, out + 2 * SPAN_TOKENS, c0, c1, c2, c3)


@inlined
def scores_of_2(
    query: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, head_dim: int, scores: np.ndarray, out: int,
) -> None:  # fmt: skip
    a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
    b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
    for d in range(0, head_dim, LANES):
        x, y = load(query, at + d), load(query, at + head_dim + d)
        k0, k1 = load(kv, row + d), load(kv, row + row_size + d)
        k2, k3 = load(kv, row + 2 * row_size + d), load(kv, row + 3 * row_size + d)
        a0, a1, a2, a3 = add_product(a0, x, k0), add_product(a1, x, k1), add_product(a2, x, k2), add_product(a3, x, k3)
        b0, b1, b2, b3 = add_product(b0, y, k0), add_product(b1, y, k1), add_product(b2, y, k2), add_product(b3, y, k3)
    store_totals(scores, out, a0, a1, a2, a3)
    store_totals(scores, out + SPAN_TOKENS, b0, b1, b2, b3)


@inlined
def scores_of_1(
    query: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, head_dim: int, scores: np.ndarray, out: int,
) -> None:  # fmt: skip
    a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
    for d in range(0, head_dim, LANES):
        x = load(query, at + d)
        a0, a1 = add_product(a0, x, load(kv, row + d)), add_product(a1, x, load(kv, row + row_size + d))
        a2 = add_product(a2, x, load(kv, row + 2 * row_size + d))
        a3 = add_product(a3, x, load(kv, row + 3 * row_size + d))
    store_totals(scores, out, a0, a1, a2, a3)


@inlined
def values_of_3(
    weights: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, take: int, acc: np.ndarray, out: int,
    head_dim: int,
) -> None:  # fmt: skip
    """acc[out:] of three heads, 32 wide, += weight * row of values, over `take` rows from kv[row] on."""
    b, c = out + head_dim, out + 2 * head_dim
    a0, a1, a2, a3 = load(acc, out), load(acc, out + 8), load(acc, out + 16), load(acc, out + 24)
    b0, b1, b2, b3 = load(acc, b), load(acc, b + 8), load(acc, b + 16), load(acc, b + 24)
    c0, c1, c2, c3 = load(acc, c), load(acc, c + 8), load(acc, c + 16), load(acc, c + 24)
    for t in range(at, at + take):
        x, y, z = splat_at(weights, t), splat_at(weights, t + SPAN_TOKENS), splat_at(weights, t + 2 * SPAN_TOKENS)
        v = load(kv, row)
        a0, b0, c0 = add_product(a0, x, v), add_product(b0, y, v), add_product(c0, z, v)
        v = load(kv, row + 8)
        a1, b1, c1 = add_product(a1, x, v), add_product(b1, y, v), add_product(c1, z, v)
        v = load(kv, row + 16)
        a2, b2, c2 = add_product(a2, x, v), add_product(b2, y, v), add_product(c2, z, v)
        v = load(kv, row + 24)
        a3, b3, c3 = add_product(a3, x, v), add_product(b3, y, v), add_product(c3, z, v)
        row += row_size
    _store_4(acc, out, a0, a1, a2, a3)
    _store_4(acc, b, b0, b1, b2, b3)
    _store_4(acc, c, c0, c1, c2, c3)


@inlined
def values_of_2(
    weights: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, take: int, acc: np.ndarray, out: int,
    head_dim: int,
) -> None:  # fmt: skip
    b = out + head_dim
    a0, a1, a2, a3 = load(acc, out), load(acc, out + 8), load(acc, out + 16), load(acc, out + 24)
    b0, b1, b2, b3 = load(acc, b), load(acc, b + 8), load(acc, b + 16), load(acc, b + 24)
    for t in range(at, at + take):
        x, y = splat_at(weights, t), splat_at(weights, t + SPAN_TOKENS)
        v0, v1, v2, v3 = load(kv, row), load(kv, row + 8), load(kv, row + 16), load(kv, row + 24)
        a0, a1, a2, a3 = add_product(a0, x, v0), add_product(a1, x, v1), add_product(a2, x, v2), add_product(a3, x, v3)
        b0, b1, b2, b3 = add_product(b0, y, v0), add_product(b1, y, v1), add_product(b2, y, v2), add_product(b3, y, v3)
        row += row_size
    _store_4(acc, out, a0, a1, a2, a3)
    _store_4(acc, b, b0, b1, b2, b3)


@inlined
def values_of_1(
    weights: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, take: int, acc: np.ndarray, out: int,
) -> None:  # fmt: skip
    a0, a1, a2, a3 = load(acc, out), load(acc, out + 8), load(acc, out + 16), load(acc, out + 24)
    for t in range(at, at + take):
        x = splat_at(weights, t)
        a0, a1 = add_product(a0, x, load(kv, row)), add_product(a1, x, load(kv, row + 8))
        a2, a3 = add_product(a2, x, load(kv, row + 16)), add_product(a3, x, load(kv, row + 24))
        row += row_size
    _store_4(acc, out, a0, a1, a2, a3)


@inlined
def narrow_values_of_1(
    weights: np.ndarray, at: int, kv: np.ndarray, row: int, row_size: int, take: int, acc: np.ndarray, out: int,
) -> None:  # fmt: skip
    """The same, 8 wide: what head dims that are no multiple of 32 leave."""
    found = load(acc, out)
    for t in range(at, at + take):
        found = add_product(found, splat_at(weights, t), load(kv, row))
        row += row_size
    store(acc, out, found)


@inlined
def _store_4(array: np.ndarray, at: int, a: object, b: object, c: object, d: object) -> None:
    store(array, at, a)
    store(array, at + 8, b)
    store(array, at + 16, c)
    store(array, at + 24, d)
