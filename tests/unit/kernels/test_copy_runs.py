"""Units copied and digested by compiled code, beside plain numpy and xxhash."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kernels.cpu.copy_runs import can_digest, copy_and_digest_units, copy_units, digest_units
from kernels.cpu.stripes import ALIGN
from kernels.cpu.units import Units

SIZES = (1, 3, 31, 64, 100, 240, 241, 255, 256, 1000, 1023, 1024, 1025, 2048, 3111, 4096, 24_576)


def some_units(
    rng: np.random.Generator, count: int, unit_bytes: int, num_layers: int, spare: int, *, repeat: bool = False
) -> Units:
    """Random bytes all over a pool of `count` + `spare` units; a few neighbours among them. Half of the pools lie as
    real ones do, the others begin anywhere."""
    num_units, grain = count + spare, int(rng.choice([1, ALIGN]))
    offset, layer_gap = (int(rng.integers(0, 70)) // grain * grain for _ in range(2))
    layer_bytes = num_units * unit_bytes + layer_gap
    raw = rng.integers(0, 256, ALIGN + offset + num_layers * layer_bytes, dtype=np.uint8)
    data = raw[-raw.__array_interface__["data"][0] % ALIGN :]
    units = rng.integers(0, num_units, count) if repeat else rng.permutation(num_units)[:count]
    half = count // 2
    if half > 1 and spare >= half:
        units[:half] = np.arange(half) + spare  # neighbours
        units[half:] = [unit for unit in rng.permutation(num_units) if not spare <= unit < spare + half][: count - half]
    return Units(data, units, unit_bytes, offset, layer_bytes, num_layers)


def copy_of(where: Units) -> Units:
    """The same elsewhere, at as round an address."""
    raw = np.zeros(ALIGN + len(where.data), np.uint8)
    data = raw[-raw.__array_interface__["data"][0] % ALIGN :][: len(where.data)]
    data[:] = where.data
    return replace(where, data=data)


def at(where: Units, layer: int, k: int) -> slice:
    begin = where.offset + layer * where.layer_bytes + int(where.units[k]) * where.unit_bytes
    return slice(begin, begin + where.unit_bytes)


def wanted(target: Units, source: Units, numbers: range) -> np.ndarray:
    """What the target's pool holds after these units were copied."""
    data = target.data.copy()
    for number in numbers:
        layer, k = divmod(number, len(source.units))
        data[at(target, layer, k)] = source.data[at(source, layer, k)]
    return data


def xxhashes(source: Units) -> np.ndarray:
    digests = b"".join(
        xxhash.xxh3_128_digest(source.data[at(source, layer, k)].tobytes())
        for layer in range(source.num_layers)
        for k in range(len(source.units))
    )
    return np.frombuffer(digests, dtype=np.uint8).reshape(source.total, 16)


@pytest.mark.parametrize("seed", range(60))
def test_units_land_where_they_should_and_nothing_else_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, count, num_layers = int(rng.choice(SIZES)), int(rng.integers(1, 20)), int(rng.integers(1, 4))
    source = some_units(rng, count, size, num_layers, int(rng.integers(0, 20)), repeat=bool(seed % 2))
    target = some_units(rng, count, size, num_layers, int(rng.integers(0, 20)))
    expected, before = wanted(target, source, range(source.total)), source.data.copy()
    copied = copy_of(target)
    assert copy_units(copied, source) == source.total
    assert (copied.data == expected).all()
    assert (source.data == before).all()
    if can_digest(size):
        digests, still = (np.zeros((source.total, 16), np.uint8) for _ in range(2))
        assert copy_and_digest_units(target, source, digests) == source.total
        assert (target.data == expected).all()
        assert (digests == xxhashes(source)).all()
        assert digest_units(source, still) == source.total
        assert (still == digests).all()


@pytest.mark.parametrize("size", [512, 5000])
@pytest.mark.parametrize("limit", [1, 512, 1024, 7777, 20_000])
def test_a_burst_ends_at_its_limit_and_the_next_goes_on_there(size: int, limit: int) -> None:
    rng = np.random.default_rng(limit)
    source, target = (some_units(rng, 12, size, 3, 12) for _ in range(2))
    digests, expected = np.zeros((36, 16), np.uint8), xxhashes(source)
    per_call = -(-limit // size)
    for first in range(0, 36, per_call):
        last = min(first + per_call, 36)
        want = wanted(target, source, range(first, last))
        copied = copy_of(target)
        assert copy_units(copied, source, first, limit) == last
        assert (copied.data == want).all()
        assert copy_and_digest_units(target, source, digests, first, limit) == last
        assert (target.data == want).all()
        assert (digests[:last] == expected[:last]).all()
        assert not digests[last:].any()
        assert digest_units(source, np.zeros_like(digests), first, limit) == last
    assert copy_units(target, source, 36) == 36


def test_gathered_into_one_buffer_and_scattered_again() -> None:
    rng = np.random.default_rng(3)
    source = some_units(rng, 9, 1536, 4, 9)
    buffer = Units.contiguous(np.zeros(9 * 1536 * 4, np.uint8), 9, 1536, 4)
    copy_units(buffer, source)
    rows = [source.data[at(source, layer, k)] for layer in range(4) for k in range(9)]
    assert (buffer.data == np.concatenate(rows)).all()
    target = some_units(rng, 9, 1536, 4, 20)
    expected = wanted(target, source, range(source.total))
    copy_units(target, buffer)
    assert (target.data == expected).all()


def test_a_source_may_be_read_only_and_there_may_be_nothing_to_do() -> None:
    data, none = np.arange(256, dtype=np.uint8), np.zeros(0, np.int64)
    data.flags.writeable = False
    units = np.frombuffer(np.array([1], np.int64).tobytes(), np.int64)
    target = Units(np.zeros(256, np.uint8), np.array([0]), 128)
    assert copy_units(target, Units(data, units, 128)) == 1
    assert (target.data[:128] == data[128:]).all()
    assert copy_units(Units(np.zeros(9, np.uint8), none, 4), Units(data, none, 4)) == 0


def test_what_would_write_or_read_elsewhere_is_refused() -> None:
    pool, other, one = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8), np.array([1])
    good = Units(other, one, 1024)
    for overlap in (pool, pool[1024:], pool[:2048]):
        with pytest.raises(ValueError, match="overlap"):
            copy_units(Units(pool, one, 1024), Units(overlap, np.array([0]), 1024))
    for unit in (-1, 4, 1 << 62):
        with pytest.raises(ValueError, match="outside"):
            Units(pool, np.array([1, unit]), 1024)
    with pytest.raises(ValueError, match="outside"):
        Units(pool, one, 1024, layer_bytes=1024, num_layers=4)
    with pytest.raises(ValueError, match="differently"):
        copy_units(Units(pool, one, 512), good)
    with pytest.raises(ValueError, match="differently"):
        copy_units(Units(pool, np.array([1, 2]), 1024), good)
    with pytest.raises(ValueError, match="numbered"):
        copy_units(Units(pool, one, 1024), good, first=-1)
    sealed = pool.copy()
    sealed.flags.writeable = False
    with pytest.raises(ValueError, match="written"):
        copy_units(Units(sealed, one, 1024), good)
    with pytest.raises(ValueError, match="flat"):
        Units(np.zeros((2, 8), np.uint8), one, 4)
    with pytest.raises(ValueError, match="in a row"):
        Units(pool, np.arange(8)[::2], 4)
    with pytest.raises(ValueError, match="short"):
        digest_units(Units(pool, one, 240), np.zeros((1, 16), np.uint8))
    with pytest.raises(ValueError, match="one digest"):
        digest_units(good, np.zeros((2, 16), np.uint8))


def test_other_threads_run_meanwhile() -> None:
    """One unit many times over: long, and small."""
    units = np.zeros(60_000, np.int64)
    source, target = (Units(np.zeros(65_536, np.uint8), units, 65_536) for _ in range(2))
    worker = threading.Thread(target=copy_units, args=(target, source))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5
