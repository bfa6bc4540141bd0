"""What `auto` takes."""

import math

import pytest

from shared.transfer.formats.choice import Option, break_even_bytes_per_s, choose

MIB = 1 << 20
RAW = Option("raw", 100 * MIB)
LOSSLESS = Option("lossless", 84 * MIB, encode_s=0.3, decode_s=0.2)
FP16 = Option("fp16", 50 * MIB, encode_s=0.2, decode_s=0.1)
INT8 = Option("int8", 27 * MIB, encode_s=0.2, decode_s=0.1)
FP8 = Option("fp8", 27 * MIB, encode_s=0.2, decode_s=0.1)
DELTA = Option("delta", 11 * MIB, encode_s=2.0, decode_s=0.4)
ALL = (DELTA, FP8, INT8, FP16, LOSSLESS, RAW)


@pytest.mark.parametrize(
    ("mib_per_s", "prefill_s", "expected"),
    [
        (8000, 1.0, "raw"),  # one host: coding would only cost
        (150, 1.0, "lossless"),  # both end within the prefill, this one sooner
        (84, 1.0, "lossless"),  # just hidden
        (60, 1.0, "fp16"),  # what is exact would be waited for
        (60, 2.0, "lossless"),  # a longer prefill hides it again
        (40, 1.0, "int8"),
        (25, 0.0, "int8"),  # nothing to hide behind; delta would be coded longer than int8 travels
        (1, 10.0, "delta"),
        (0, 10.0, "lossless"),  # a dead link makes nothing better
    ],
)
def test_smaller_only_where_the_transfer_is_waited_for(mib_per_s: float, prefill_s: float, expected: str) -> None:
    assert choose(ALL, mib_per_s * MIB, prefill_s) == expected


def test_a_loss_that_buys_almost_nothing_is_not_taken() -> None:
    barely = Option("fp16", 95 * MIB)
    assert choose((RAW, barely), 10 * MIB, 0.0) == "raw"
    assert choose((RAW, Option("fp16", 89 * MIB)), 10 * MIB, 0.0) == "fp16"


def test_of_equal_formats_the_less_lossy_is_taken() -> None:
    assert choose((FP8, INT8), MIB, 0.0) == "int8"


def test_only_what_is_offered_is_taken() -> None:
    assert choose((DELTA,), 8000 * MIB, 100.0) == "delta"


def test_break_even() -> None:
    assert break_even_bytes_per_s(LOSSLESS, RAW.wire_bytes) == pytest.approx(100 * MIB / 0.3)
    assert break_even_bytes_per_s(RAW, RAW.wire_bytes) == 0
    assert break_even_bytes_per_s(Option("fp16", MIB), 2 * MIB) == math.inf
    rate = break_even_bytes_per_s(DELTA, RAW.wire_bytes)
    assert DELTA.transfer_s(0.9 * rate) < RAW.transfer_s(0.9 * rate)
    assert DELTA.transfer_s(1.1 * rate) > RAW.transfer_s(1.1 * rate)
