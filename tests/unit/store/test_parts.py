"""Pieces and files: whatever the system moves at a time, all of it arrives."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.store import parts
from shared.store.parts import digest_of, read_all, write_all

DATA = np.random.default_rng(1).bytes(5000)


def pieces_of(data: bytes | bytearray, cuts: list[int]) -> list[memoryview]:
    ends = [*sorted(cuts), len(data)]
    return [memoryview(data)[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def moving_at_most(call: Callable[..., int], most: int) -> Callable[..., int]:
    """A system that moves fewer bytes than it was asked to, as it may."""

    def move(fd: int, buffers: list[memoryview], offset: int) -> int:
        left, some = most, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= some[-1].nbytes
        return call(fd, some, offset)

    return move


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 5000), max_size=30),
    st.lists(st.integers(0, 5000), max_size=30),
    st.integers(1, 700),
    st.integers(1, 5),
    st.integers(1, 3000),
)
def test_what_is_written_in_pieces_is_read_in_others(
    tmp_path: Path, ours: list[int], theirs: list[int], most: int, most_pieces: int, batch_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "file").open("w+b") as file:
        patch.setattr(os, "pwritev", moving_at_most(os.pwritev, most))
        patch.setattr(os, "preadv", moving_at_most(os.preadv, most))
        patch.setattr(parts, "_MOST_PIECES", most_pieces)
        patch.setattr(parts, "_BATCH_BYTES", batch_bytes)
        write_all(file.fileno(), [b"head", *pieces_of(DATA, ours)])
        assert (tmp_path / "file").read_bytes() == b"head" + DATA
        room = bytearray(len(DATA))
        assert read_all(file.fileno(), pieces_of(room, theirs), 4) == xxhash.xxh3_128_digest(DATA)
        assert room == DATA
        assert digest_of(pieces_of(DATA, ours)) == xxhash.xxh3_128_digest(DATA)


@pytest.mark.parametrize("missing", [1, 4999, 5000])
def test_a_file_that_ends_too_early_has_no_digest(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA[missing:])
    with path.open("rb") as file:
        assert read_all(file.fileno(), pieces_of(bytearray(len(DATA)), [100]), 0) is None
