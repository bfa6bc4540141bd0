"""The header before a block's bytes: it comes back as it was, and nothing else passes for one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.store.driver import BlockRecord
from shared.store.record import HEADER_BYTES, MAX_TEXT_BYTES, Malformed, pack_header, parse_header

RECORD = BlockRecord(bytes(range(16)), 123_456, bytes(range(16, 32)), "space", "ten", 64, True, 1.5)
COUNTS = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    BlockRecord,
    st.binary(min_size=16, max_size=16),
    COUNTS,
    st.binary(min_size=16, max_size=16),
    st.text(max_size=50),
    st.text(max_size=50),
    COUNTS,
    st.booleans(),
    st.floats(allow_nan=False),
)


@given(RECORDS)
def test_what_was_packed_is_parsed(record: BlockRecord) -> None:
    header = pack_header(record)
    assert len(header) == HEADER_BYTES
    assert parse_header(header) == record


def test_the_format_is_the_one_that_is_described() -> None:
    """So that files of yesterday are read tomorrow."""
    head = bytes.fromhex("4241544f4e424c4b 0100 0100 0500 0300 40e2010000000000 4000000000000000 000000000000f83f")
    header = pack_header(RECORD)
    assert header[:80] == head + bytes(range(32)) + b"spaceten"
    assert header[80:4088] == bytes(4008)
    assert header[4088:].hex() == "fa2445b0ca43e9fc"


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_changed_bit_and_it_is_none(bit: int) -> None:
    header = bytearray(pack_header(RECORD))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Malformed):
        parse_header(header)


@given(st.integers(0, HEADER_BYTES - 1), st.binary(max_size=HEADER_BYTES))
def test_neither_is_a_part_of_one_nor_anything_else(length: int, other: bytes) -> None:
    header = pack_header(RECORD)
    for data in (header[:length], header[:length] + bytes(HEADER_BYTES - length), header + b"\0", other):
        if data != header:
            with pytest.raises(Malformed):
                parse_header(data)


def test_texts_as_long_as_a_header_has_room() -> None:
    longest = replace(RECORD, namespace="é" * 1000, tenant="t" * (MAX_TEXT_BYTES - 2000))
    assert parse_header(pack_header(longest)) == longest


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "t" * (MAX_TEXT_BYTES - 4)},
        {"key": bytes(15)},
        {"digest": bytes(17)},
        {"num_bytes": -1},
        {"tokens": -1},
        {"tenant": "\ud800"},
    ],
)
def test_a_record_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of several kinds
        pack_header(replace(RECORD, **wrong))  # type: ignore[arg-type]
