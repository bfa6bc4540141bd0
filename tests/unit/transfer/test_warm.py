"""Which pages of a pool are there before a byte was written."""

import os
import time

import numpy as np
import pytest

from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.pool import Pool, create_pool
from shared.transfer.warm import Warmer

PAGE = 4096
LAYOUT = PoolLayout(
    (
        StateComponent("kv", IndexKind.PAGE, 2, (), (PAGE,), "uint8", (0, 1, 2)),
        StateComponent("slot", IndexKind.REQUEST, 1, (), (3 * PAGE,), "uint8", (0,)),
    ),
    num_pages=100,
    num_slots=4,
)


def test_the_pages_of_these_units_are_there_and_no_others() -> None:
    fd = create_pool(LAYOUT)
    pool = Pool.map(fd, LAYOUT, writable=True)
    warmer = Warmer(pool)
    warmer.soon(((7, 3, 8, 99), (2,)))
    warmer.soon(((7, 3), ()))
    expected, deadline = (4 * 2 * 3 + 3) * PAGE, time.monotonic() + 60
    while os.fstat(fd).st_blocks * 512 < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    warmer.close()
    assert os.fstat(fd).st_blocks * 512 == expected
    for unit in (7, 3, 8, 99):
        for layer in range(3):
            where = LAYOUT.offset_of(0) + layer * 100 * 2 * PAGE + unit * 2 * PAGE
            assert os.lseek(fd, where, os.SEEK_DATA) == where
    assert not np.frombuffer(pool.bytes, dtype=np.uint8).any()
    os.close(fd)


def test_what_was_touched_once_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, calls = create_pool(LAYOUT), []
    warmer = Warmer(Pool.map(fd, LAYOUT, writable=True))
    monkeypatch.setattr(warmer, "_populate", lambda _pages, at, num_bytes: calls.append((at, num_bytes)))
    warmer.soon(((7, 3), ()))
    warmer.soon(((3, 4, 7), ()))
    warmer._thread.submit(lambda: None).result(60)
    assert sorted(calls) == sorted(
        (layer * 200 * PAGE + unit * 2 * PAGE, 2 * PAGE) for layer in range(3) for unit in (3, 4, 7)
    )
    warmer.close()
    os.close(fd)


def test_where_pages_cannot_be_touched_nothing_happens() -> None:
    plain = Pool(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    warmer = Warmer(plain)
    warmer.soon(((1, 2), (0,)))
    warmer.close()
    fd = create_pool(LAYOUT)
    readable = Pool.map(fd, LAYOUT, writable=False)
    warmer = Warmer(readable)
    warmer.soon(((1, 2), (0,)))
    warmer.close()
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)
