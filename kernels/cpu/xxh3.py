"""xxh3-128 of more than 240 bytes, inside compiled kernels: how the sums begin, and what becomes of them.

The same bytes as `xxhash.xxh3_128_digest`. What lies between is `kernels.cpu.stripes`.
"""

import struct

import numpy as np

from kernels.cpu.compiling import inlined
from kernels.cpu.stripes import SECRET

LEAST = 241
DIGEST_BYTES = 16

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = np.uint64(0x165667B19E3779F9)
_PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_FIRST = np.array(
    [_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1], dtype=np.uint64
)
_LOW_SECRET = np.array(struct.unpack_from("<8Q", SECRET, 11), dtype=np.uint64)
_HIGH_SECRET = np.array(struct.unpack_from("<8Q", SECRET, len(SECRET) - 64 - 11), dtype=np.uint64)
_HALF, _MASK = np.uint64(32), np.uint64(0xFFFFFFFF)


@inlined
def start(sums: np.ndarray) -> None:
    for lane in range(8):
        sums[lane] = _FIRST[lane]


@inlined
def finish(sums: np.ndarray, size: int, digest: np.ndarray) -> None:
    """Writes the digest, the most significant byte first, once the sums hold all of the input."""
    length = np.uint64(size)
    low = _merged(sums, _LOW_SECRET, length * _PRIME64_1)
    high = _merged(sums, _HIGH_SECRET, ~(length * _PRIME64_2))
    for byte in range(8):
        shift = np.uint64(56 - 8 * byte)
        digest[byte] = np.uint8((high >> shift) & np.uint64(0xFF))
        digest[8 + byte] = np.uint8((low >> shift) & np.uint64(0xFF))


@inlined
def _merged(sums: np.ndarray, secret: np.ndarray, begin: np.uint64) -> np.uint64:
    result = begin
    for pair in range(4):
        result += _folded(sums[2 * pair] ^ secret[2 * pair], sums[2 * pair + 1] ^ secret[2 * pair + 1])
    result ^= result >> np.uint64(37)
    result *= _AVALANCHE
    return result ^ (result >> _HALF)


@inlined
def _folded(x: np.uint64, y: np.uint64) -> np.uint64:
    """The two halves of the 128 bits of x * y, xor-ed."""
    x0, x1, y0, y1 = x & _MASK, x >> _HALF, y & _MASK, y >> _HALF
    low, cross, other, high = x0 * y0, x1 * y0, x0 * y1, x1 * y1
    middle = (low >> _HALF) + (cross & _MASK) + other
    return ((middle << _HALF) | (low & _MASK)) ^ (high + (cross >> _HALF) + (middle >> _HALF))
