"""Blocks that were cut, spoiled or forged: found by a typed error, and never a byte outside the rows is written."""

import struct

import numpy as np
import pytest
import xxhash
import zstandard

from shared.runtime.errors import Corrupt, TransferError
from shared.transfer.formats.block import HEADER_BYTES, Damaged
from shared.transfer.formats.catalog import LOSSINESS, format_named
from tests.unit.transfer.formats_rows import kv, like_a_model

COMPONENT = kv("float32")
ROWS = like_a_model(COMPONENT, units=2, rows=5)
_DIGEST_AT = HEADER_BYTES - 8
_LENGTH_AT = _DIGEST_AT - 8
NAMES = pytest.mark.parametrize("name", [*LOSSINESS])


def block(name: str) -> bytes:
    return format_named(name).encode(ROWS, COMPONENT)


def decode(name: str, data: bytes) -> np.ndarray:
    """Into rows between others that must not change, whatever comes of it."""
    layers, units, segments, rows, width = ROWS.shape
    pool = np.full((layers, units + 2, segments, rows + 2, width), 7, dtype=ROWS.dtype)
    view = pool[:, 1:-1, :, 1:-1]
    try:
        format_named(name).decode(data, COMPONENT, view)
    finally:
        found = view.copy()
        view[...] = 7
        assert (pool == 7).all()
    return found


def forged(data: bytes, payload: bytes | None = None) -> bytes:
    """What somebody sends who knows how blocks are sealed."""
    payload = data[HEADER_BYTES:] if payload is None else payload
    head = data[:_LENGTH_AT] + struct.pack("<Q", len(payload))
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload


@NAMES
def test_a_forged_block_that_changes_nothing_is_the_block(name: str) -> None:
    """Else the tests below would test the seal only."""
    assert forged(block(name)) == block(name)
    decode(name, forged(block(name)))


@NAMES
def test_a_block_that_is_cut_or_too_long_is_damaged(name: str) -> None:
    data = block(name)
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) // 2, len(data) - 1):
        with pytest.raises(Damaged):
            decode(name, data[:length])
    with pytest.raises(Damaged):
        decode(name, data + b"\0")


@NAMES
def test_a_payload_that_is_cut_or_too_long_is_damaged_even_if_sealed(name: str) -> None:
    data = block(name)
    payload = data[HEADER_BYTES:]
    for length in (0, 1, len(payload) // 3, len(payload) - 1):
        with pytest.raises(Damaged):
            decode(name, forged(data, payload[:length]))
    with pytest.raises(Damaged):
        decode(name, forged(data, payload + b"\0"))


@NAMES
def test_every_flipped_bit_is_found(name: str) -> None:
    data = block(name)
    random = np.random.default_rng(3)
    for at in (*range(HEADER_BYTES), *random.integers(HEADER_BYTES, len(data), size=100)):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << int(random.integers(0, 8))
        with pytest.raises(Damaged):
            decode(name, bytes(spoiled))


@NAMES
def test_a_spoiled_payload_that_is_sealed_gives_an_error_or_rows_and_nothing_else(name: str) -> None:
    data = block(name)
    random = np.random.default_rng(4)
    for turn in range(200):
        payload = bytearray(data[HEADER_BYTES:])
        spread = 40 if turn % 2 else len(payload)  # half of the times among the lengths and tables at its start
        for at in random.integers(0, spread, size=int(random.integers(1, 6))):
            payload[at] = int(random.integers(0, 256))
        try:
            decode(name, forged(data, bytes(payload)))
        except Damaged:
            continue


@NAMES
def test_noise_in_place_of_a_payload_is_found_or_stays_inside(name: str) -> None:
    data = block(name)
    random = np.random.default_rng(5)
    for _ in range(200):
        try:
            decode(name, forged(data, random.bytes(int(random.integers(0, 400)))))
        except Damaged:
            continue
        raise AssertionError("noise of the wrong length was taken for rows")


@NAMES
def test_a_block_of_other_rows_or_another_format_is_damaged(name: str) -> None:
    chosen = format_named(name)
    for other in (like_a_model(COMPONENT, units=2, rows=6), like_a_model(COMPONENT, units=3, rows=5), ROWS[:3]):
        with pytest.raises(Damaged, match="were to come"):
            decode(name, chosen.encode(other, COMPONENT))
    for other_name in LOSSINESS:
        if other_name != name:
            with pytest.raises(Damaged, match="was agreed"):
                decode(name, block(other_name))


def test_a_plane_that_claims_to_be_vast_allocates_nothing() -> None:
    """A kilobyte that unpacks to 32 MiB, with and without saying so, and a frame that claims a petabyte."""
    vast = bytes(32 << 20)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(vast)
    liar = struct.pack("<IBQ", zstandard.MAGIC_NUMBER, 0xE0, 1 << 50) + b"\x01\0\0"
    for plane in (zstandard.ZstdCompressor().compress(vast), silent, liar):
        payload = struct.pack("<BQ", 1, len(plane)) + plane
        with pytest.raises(Damaged, match="plane"):
            decode("lossless", forged(block("lossless"), payload))


def test_a_plane_packed_in_an_unknown_way_is_damaged() -> None:
    payload = bytearray(block("lossless")[HEADER_BYTES:])
    payload[0] = 2
    with pytest.raises(Damaged, match="unknown way 2"):
        decode("lossless", forged(block("lossless"), bytes(payload)))


def test_thirds_that_are_not_the_layers_are_damaged() -> None:
    payload = bytearray(block("delta")[HEADER_BYTES:])
    struct.pack_into("<3H", payload, 2, 2, 2, 1)
    with pytest.raises(Damaged, match="thirds"):
        decode("delta", forged(block("delta"), bytes(payload)))


def test_tables_that_end_before_they_begin_are_damaged() -> None:
    payload = bytearray(block("delta")[HEADER_BYTES:])
    payload[8:10] = (200, 100)
    with pytest.raises(Damaged, match="before it begins"):
        decode("delta", forged(block("delta"), bytes(payload)))


def test_streams_that_end_in_another_state_are_damaged() -> None:
    payload = bytearray(block("delta")[HEADER_BYTES:])
    layers, _, segments, _, width = ROWS.shape
    payload[-(4 + 2 * width) * layers * segments - 1] ^= 1  # before the scales of one group, and the steps
    with pytest.raises(Damaged, match="stream"):
        decode("delta", forged(block("delta"), bytes(payload)))


@NAMES
def test_a_sealed_block_that_lies_about_its_length_is_damaged(name: str) -> None:
    data = block(name)
    head, payload = data[:_LENGTH_AT] + struct.pack("<Q", len(data)), data[HEADER_BYTES:]
    with pytest.raises(Damaged, match="came as"):
        decode(name, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload)


def test_damage_is_what_a_spoiled_transfer_is() -> None:
    assert issubclass(Damaged, Corrupt)
    assert issubclass(Damaged, TransferError)
    assert Damaged.code == "corrupt_state"
