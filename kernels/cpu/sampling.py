"""From logits to tokens for the rows that need no more than a temperature, and the finiteness of all.

Compiled as written, not for speed alone: every operation rounds as numpy's does, and sums run in token order, so a
token is the one that a search in `np.cumsum(np.exp((x - max) / temperature), dtype=float64)` finds, bit for bit.
"""

import threading

import numpy as np
import torch
from numba import prange

from kernels.cpu.threads import compiled_exactly

_SIGN_CLEAR = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_LEAST = np.int32(-0x80000000)
_BLOCK = 256
_SERIAL_VALUES = 1 << 16

_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

_of_this_thread = threading.local()


def pick(logits: torch.Tensor, temperatures: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """One token for each row of finite float32 logits [R, V] on the CPU: the first of the highest where the temperature
    [R] is 0, else the one at `draws` [R], in [0, 1), of the distribution. int64 [R]; -1 where a row is not finite."""
    values = logits.contiguous().numpy()
    num_rows, vocab_size = values.shape
    temperatures = temperatures.astype(np.float32)
    drawn = np.flatnonzero(temperatures)
    place = np.full(num_rows, -1)
    place[drawn] = np.arange(len(drawn))
    weights = _scratch(len(drawn), vocab_size)
    tokens = np.empty(num_rows, np.int64)
    serial = values.size <= _SERIAL_VALUES
    scan, search = (_scan.serial, _search.serial) if serial else (_scan, _search)
    scan(values, values.view(np.int32), temperatures, place, weights, tokens)
    if len(drawn):
        np.exp(weights, out=weights)
        search(weights, drawn, draws, tokens)
    return tokens


def uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What `shared.engine.philox.uniform` gives, in one go. All uint64 [n] -> float64 [n]."""
    out = np.empty(len(seeds))
    _uniform.serial(seeds, choices, positions, out)
    return out


def _scratch(num_rows: int, vocab_size: int) -> np.ndarray:
    """[num_rows, vocab_size], kept for the thread's next step."""
    size = num_rows * vocab_size
    kept: np.ndarray | None = getattr(_of_this_thread, "weights", None)
    if kept is None or len(kept) < size:
        kept = _of_this_thread.weights = np.empty(size, np.float32)
    return kept[:size].reshape(num_rows, vocab_size)


@compiled_exactly
def _scan(
    values: np.ndarray,
    bits: np.ndarray,
    temperatures: np.ndarray,
    place: np.ndarray,
    weights: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """tokens [R]: the first of the highest, -1 where a value is not finite. weights [place[r]]: the distances to the
    highest, over the temperature. bits: the values' own, compared as integers, which goes eight at a time."""
    num_rows, vocab_size = values.shape
    for r in prange(num_rows):
        row, row_bits = values[r], bits[r]
        largest, top = np.int32(0), _LEAST
        for i in range(vocab_size):
            b = row_bits[i]
            largest = max(largest, np.int32(b & _SIGN_CLEAR))
            top = max(top, np.int32(b ^ np.int32(np.int32(b >> np.int32(31)) & _SIGN_CLEAR)))
        if largest >= _INFINITE:
            tokens[r] = -1
            if place[r] >= 0:
                weights[place[r]] = np.float32(0)
        else:
            highest = np.int32(top ^ np.int32(np.int32(top >> np.int32(31)) & _SIGN_CLEAR)).view(np.float32)
            first = 0
            while row[first] != highest:
                first += 1
            tokens[r] = first
            if place[r] >= 0:
                target, temperature = weights[place[r]], temperatures[r]
                for i in range(vocab_size):
                    target[i] = (row[i] - highest) / temperature


@compiled_exactly
def _search(weights: np.ndarray, rows: np.ndarray, draws: np.ndarray, tokens: np.ndarray) -> None:
    """tokens[rows[k]]: the first whose weight and all before it hold more than its share `draws[rows[k]]` of all.
    Rows that are not finite keep their -1."""
    num_rows, vocab_size = weights.shape
    num_blocks = (vocab_size + _BLOCK - 1) // _BLOCK
    for k in prange(num_rows):
        r = rows[k]
        if tokens[r] >= 0:
            row = weights[k]
            sums = np.empty(num_blocks, np.float64)
            total = 0.0
            for block in range(num_blocks):
                for i in range(block * _BLOCK, min(vocab_size, (block + 1) * _BLOCK)):
                    total += row[i]
                sums[block] = total
            wanted = draws[r] * total
            block = 0
            while block < num_blocks and sums[block] <= wanted:
                block += 1
            if block == num_blocks:  # the product rounded up to the total
                token = vocab_size - 1
                while row[token] == 0:
                    token -= 1
            else:
                token = block * _BLOCK
                held = (0.0 if block == 0 else sums[block - 1]) + row[token]
                while held <= wanted:
                    token += 1
                    held += row[token]
            tokens[r] = token


@compiled_exactly
def _uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    for k in range(len(out)):
        c0, c1, c2, c3 = positions[k] & _LOW, positions[k] >> _32, choices[k], np.uint64(0)
        k0, k1 = seeds[k] & _LOW, seeds[k] >> _32
        for _ in range(10):
            first, second = c0 * _FIRST, c2 * _SECOND
            c0, c1, c2, c3 = (second >> _32) ^ c1 ^ k0, second & _LOW, (first >> _32) ^ c3 ^ k1, first & _LOW
            k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
        high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
        out[k] = (high * 67108864.0 + low) / 9007199254740992.0
