"""Randomness without a state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A number is a pure function of (seed, choice, position), so a request that moves to another worker goes on with the same
draws, and no row of a batch takes numbers from another.
"""

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """counter [n, 4] and key [n, 2], 32-bit words in uint64 -> [n, 4] random 32-bit words in uint64."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _32) ^ c1 ^ k0, second & _LOW, (first >> _32) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seed: np.ndarray, choice: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per row, with 53 random bits. All three arrays are [n] of non-negative integers; the key is
    the 64-bit seed, the counter (position low, position high, choice, 0)."""
    seeds, choices, positions = (np.asarray(x, dtype=np.uint64) for x in (seed, choice, position))
    zeros = np.zeros_like(positions)
    counter = np.stack((positions & _LOW, positions >> _32, choices, zeros), axis=1)
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _32), axis=1))
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high.astype(np.float64) * 67108864.0 + low.astype(np.float64)) / 9007199254740992.0
