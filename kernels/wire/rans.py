"""An entropy coder for streams of bytes: range coding by asymmetric numeral systems, one state, static frequencies.

A symbol of frequency f out of TOTAL costs log2(TOTAL / f) bits. The decoder never reads outside its input nor writes
outside its output, whatever the input holds.
"""

from typing import Any

import numba
import numpy as np

PROB_BITS = 12
TOTAL = 1 << PROB_BITS
_LOW = 1 << 23
"""The state stays in [_LOW, _LOW << 8): a byte leaves or enters whenever it would not."""
_STATE_BYTES = 4


def frequencies(symbols: np.ndarray) -> np.ndarray:
    """How often each byte comes, out of TOTAL: int32 [256] of that sum, at least 1 for a byte that comes at all."""
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    if not symbols.size:
        counts[0] = 1
    scaled = np.maximum(counts * TOTAL // counts.sum(), counts > 0)
    while (excess := int(scaled.sum()) - TOTAL) > 0:
        most = int(scaled.argmax())
        scaled[most] -= min(excess, max(1, int(scaled[most]) // 2))
    scaled[scaled.argmax()] -= excess
    freq: np.ndarray = scaled.astype(np.int32)
    return freq


def encode(symbols: np.ndarray, freq: np.ndarray) -> bytes:
    """symbols: uint8, flat. freq: as `frequencies` gives it; ValueError if a symbol has none."""
    if np.bincount(symbols, minlength=256)[freq == 0].any():
        raise ValueError("a symbol that comes has no frequency")
    room = np.empty(2 * symbols.size + _STATE_BYTES, dtype=np.uint8)
    start = _encode(symbols, freq, _starts(freq), room)
    return room[start:].tobytes()


def decode(data: np.ndarray, freq: np.ndarray, out: np.ndarray) -> bool:
    """Fills `out`, uint8 and flat; freq: int32 [256], at least 0. False if `data` is not what `encode`
    makes of that many symbols, no more and no less, or the sum of `freq` is not TOTAL; `out` then holds anything."""
    if data.size < _STATE_BYTES:
        return False
    symbol_at = np.repeat(np.arange(256, dtype=np.uint8), freq)
    if symbol_at.size != TOTAL:
        return False
    return bool(_decode(data, freq, _starts(freq), symbol_at, out))


def _starts(freq: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(freq)[:-1])).astype(np.int32)


def _encode_symbols(symbols: Any, freq: Any, starts: Any, room: Any) -> Any:
    state, at = np.uint32(_LOW), room.size
    for i in range(symbols.size - 1, -1, -1):
        f = np.uint32(freq[symbols[i]])
        limit = np.uint32((_LOW >> PROB_BITS) << 8) * f
        while state >= limit:
            at -= 1
            room[at] = state & np.uint32(0xFF)
            state >>= np.uint32(8)
        state = ((state // f) << np.uint32(PROB_BITS)) + state % f + np.uint32(starts[symbols[i]])
    for _ in range(_STATE_BYTES):
        at -= 1
        room[at] = state & np.uint32(0xFF)
        state >>= np.uint32(8)
    return at


def _decode_symbols(data: Any, freq: Any, starts: Any, symbol_at: Any, out: Any) -> Any:
    state, at = np.uint32(0), 0
    for _ in range(_STATE_BYTES):
        state = (state << np.uint32(8)) | np.uint32(data[at])
        at += 1
    for i in range(out.size):
        slot = state & np.uint32(TOTAL - 1)
        symbol = symbol_at[slot]
        out[i] = symbol
        state = np.uint32(freq[symbol]) * (state >> np.uint32(PROB_BITS)) + slot - np.uint32(starts[symbol])
        while state < np.uint32(_LOW):
            if at >= data.size:
                return False
            state = (state << np.uint32(8)) | np.uint32(data[at])
            at += 1
    return at == data.size and state == np.uint32(_LOW)


_njit: Any = numba.njit(nogil=True, cache=True)
_encode: Any = _njit(_encode_symbols)
_decode: Any = _njit(_decode_symbols)
