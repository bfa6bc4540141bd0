"""Units copied between two pools of bytes in one call: neighbours joined, past the cache, digests for nothing.

A job is all layers of some units, numbered layer after layer. A call does a part of it and says where to go on, so
that whoever moves bytes for several can let a more urgent one go first. Runs on the calling thread without the GIL;
several may at once. Everything is compiled when this is imported (once, then read from disk), so no transfer waits.
"""

from typing import Any

import numpy as np
from numba import types

from kernels.cpu.compiling import compiled_for_one_thread, inlined
from kernels.cpu.stripes import (
    ALIGN,
    BLOCK,
    STRIPE,
    hash_block,
    hash_end,
    hash_last,
    hash_stripe,
    move_and_hash_block,
    move_and_hash_end,
    move_block,
    move_bytes,
    settle,
    touch,
)
from kernels.cpu.units import Place, Units
from kernels.cpu.xxh3 import DIGEST_BYTES, LEAST, finish, start

_WHOLE_JOB = 1 << 62
ABREAST = 4
"""Units that are read at the same time: memory serves several places faster than one after the other."""
_PAGE = 4096

_types: Any = types
_int: Any = types.int64
_place: Any = _types.Tuple((_int, _types.Array(_int, 1, "C", readonly=True), _int))
_digests: Any = _types.Array(types.uint8, 2, "C")
_job = (_int, _int, _int, _int)


def copy_units(target: Units, source: Units, first: int = 0, limit_bytes: int = _WHOLE_JOB) -> int:
    """Copies from the unit numbered `first` on, in order, until at least one is done and `limit_bytes` are reached.
    Returns the number of the first unit that is not done, `source.total` at the end. ValueError unless both are cut
    alike and share no memory. Where two go to the same unit, the later one stays."""
    _check(target, source, first)
    return int(_copy(target.place, source.place, source.unit_bytes, source.total, first, limit_bytes))


def copy_and_digest_units(
    target: Units, source: Units, digests: np.ndarray, first: int = 0, limit_bytes: int = _WHOLE_JOB
) -> int:
    """As `copy_units`, and enters the xxh3-128 of each unit as it was written: `digests` is [total, 16] bytes.
    ValueError too for units that are too short, see `can_digest`."""
    _check(target, source, first)
    _check_digests(source, digests)
    job = source.unit_bytes, source.total, first, limit_bytes
    return int(_copy_and_digest(digests, target.place, source.place, *job))


def digest_units(source: Units, digests: np.ndarray, first: int = 0, limit_bytes: int = _WHOLE_JOB) -> int:
    """The same digests of units that stay where they are."""
    _check_first(first)
    _check_digests(source, digests)
    return int(_digest(digests, source.place, source.unit_bytes, source.total, first, limit_bytes))


def can_digest(unit_bytes: int) -> bool:
    """xxh3 treats short inputs otherwise."""
    return unit_bytes >= LEAST


def _check(target: Units, source: Units, first: int) -> None:
    _check_first(first)
    cut = (source.unit_bytes, source.num_layers, len(source.units))
    if cut != (target.unit_bytes, target.num_layers, len(target.units)):
        raise ValueError("source and target are cut differently")
    if not target.data.flags.writeable:
        raise ValueError("the target cannot be written")
    if np.may_share_memory(target.data, source.data):
        raise ValueError("source and target overlap")


def _check_first(first: int) -> None:
    if first < 0:
        raise ValueError("units are numbered from 0")


def _check_digests(source: Units, digests: np.ndarray) -> None:
    if not can_digest(source.unit_bytes):
        raise ValueError(f"a unit of {source.unit_bytes} bytes is too short")
    if digests.dtype != np.uint8 or digests.shape != (source.total, DIGEST_BYTES) or not digests.flags.c_contiguous:
        raise ValueError("one digest a unit and layer")


@inlined
def _move(target: int, source: int, size: int, after: int) -> None:
    """after: what is read after this."""
    done = min(-target % ALIGN, size)
    if done:
        move_bytes(target, source, done)
    while done + 2 * BLOCK <= size:
        move_block(target + done, source + done, 0, source + done + BLOCK)
        done += BLOCK
    if done + BLOCK <= size:
        move_block(target + done, source + done, 0, after)
        done += BLOCK
    if done < size:
        move_bytes(target + done, source + done, size - done)


@inlined
def _hash(target: int, source: int, size: int, sums: np.ndarray, digest: np.ndarray, after: int) -> None:
    """source: what is moved to the target first, 0 for nothing. after: what is read after this."""
    start(sums)
    at = sums.ctypes.data
    passing = source != 0 and target % ALIGN == 0
    done = 0
    while done + BLOCK < size:  # the last block, even a whole one, is not scrambled
        if passing:
            move_and_hash_block(target + done, source + done, at, source + done + BLOCK)
        else:
            if source != 0:
                move_bytes(target + done, source + done, BLOCK)
            hash_block(0, target + done, at, target + done + BLOCK)
        done += BLOCK
    if done + BLOCK == size and passing:
        move_and_hash_end(target + done, source + done, at, after)
    else:
        if source != 0:
            move_bytes(target + done, source + done, size - done)
        if done + BLOCK == size:
            hash_end(0, target + done, at, after)
        else:
            for number in range((size - 1 - done) // STRIPE):
                hash_stripe(target + done + number * STRIPE, at, number)
            hash_last(target + size - STRIPE, at)
    finish(sums, size, digest)


@inlined
def _where(place: Place, size: int, number: int) -> int:
    """Address of a unit by its number in the job."""
    begin, units, layer_bytes = place
    layer, k = divmod(number, len(units))
    address: int = begin + layer * layer_bytes + units[k] * size
    return address


@inlined
def _hash_abreast(
    target: Place, source: Place, size: int, first: int, total: int, sums: np.ndarray, digests: np.ndarray, move: bool
) -> None:
    """`_hash` of ABREAST units of whole blocks, a block of each in turn."""
    here, there = np.empty(ABREAST, np.int64), np.empty(ABREAST, np.int64)
    for k in range(ABREAST):
        here[k] = _where(source, size, first + k)
        there[k] = _where(target, size, first + k) if move else 0
        start(sums[k])
    at = sums.ctypes.data
    done = 0
    while done + BLOCK < size:
        for k in range(ABREAST):
            ahead = here[k] + done + BLOCK
            if move:
                if (there[k] + done + BLOCK) % _PAGE == 0:
                    touch(there[k] + done + BLOCK)
                move_and_hash_block(there[k] + done, here[k] + done, at + k * STRIPE, ahead)
            else:
                hash_block(0, here[k] + done, at + k * STRIPE, ahead)
        done += BLOCK
    for k in range(ABREAST):
        after = _where(source, size, min(first + ABREAST + k, total - 1))
        if move:
            touch(_where(target, size, min(first + ABREAST + k, total - 1)))
            move_and_hash_end(there[k] + done, here[k] + done, at + k * STRIPE, after)
        else:
            hash_end(0, here[k] + done, at + k * STRIPE, after)
        finish(sums[k], size, digests[first + k])


@compiled_for_one_thread(_int(_place, _place, *_job))
def _copy(target: Place, source: Place, size: int, total: int, first: int, limit: int) -> int:
    into, units = target[1], source[1]
    at, left = first, limit
    while at < total:
        k = at % len(units)
        run = 1
        while k + run < len(units) and run * size < left:
            if units[k + run] != units[k] + run or into[k + run] != into[k] + run:
                break
            run += 1
        after = _where(source, size, min(at + run, total - 1))
        _move(_where(target, size, at), _where(source, size, at), run * size, after)
        at += run
        left -= run * size
        if left <= 0:
            break
    settle()
    return at


@compiled_for_one_thread(_int(_digests, _place, _place, *_job))
def _copy_and_digest(
    digests: np.ndarray, target: Place, source: Place, size: int, total: int, first: int, limit: int
) -> int:
    sums = np.empty((ABREAST, 8), np.uint64)
    abreast = size % BLOCK == 0 and target[0] % ALIGN == 0 and target[2] % ALIGN == 0
    at, left = first, limit
    while at < total:
        if abreast and at + ABREAST <= total and left > (ABREAST - 1) * size:
            _hash_abreast(target, source, size, at, total, sums, digests, True)
            done = ABREAST
        else:
            after = _where(source, size, min(at + 1, total - 1))
            _hash(_where(target, size, at), _where(source, size, at), size, sums[0], digests[at], after)
            done = 1
        at += done
        left -= done * size
        if left <= 0:
            break
    settle()
    return at


@compiled_for_one_thread(_int(_digests, _place, *_job))
def _digest(digests: np.ndarray, source: Place, size: int, total: int, first: int, limit: int) -> int:
    sums = np.empty((ABREAST, 8), np.uint64)
    at, left = first, limit
    while at < total:
        if size % BLOCK == 0 and at + ABREAST <= total and left > (ABREAST - 1) * size:
            _hash_abreast(source, source, size, at, total, sums, digests, False)
            done = ABREAST
        else:
            after = _where(source, size, min(at + 1, total - 1))
            _hash(_where(source, size, at), 0, size, sums[0], digests[at], after)
            done = 1
        at += done
        left -= done * size
        if left <= 0:
            break
    return at
