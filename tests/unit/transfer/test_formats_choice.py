"""What `auto` takes."""

import math

import pytest

from shared.state.components import IndexKind, StateComponent
from shared.transfer.formats.catalog import LOSSINESS, format_named
from shared.transfer.formats.choice import Option, break_even_bytes_per_s, choose, options
from tests.unit.transfer.formats_rows import kv, like_a_model

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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_options_are_near_what_formats_do(dtype: str) -> None:
    """Of rows like a model's, each in a block as long as a chunk."""
    component = kv(dtype)
    values = like_a_model(component, units=16)
    offers = {one.name: one for one in options(LOSSINESS, (component,), 16 * component.unit_tokens)}
    assert offers["raw"] == Option("raw", values.nbytes)
    for name in LOSSINESS:
        if name == "fp16" and dtype == "float16":
            assert offers[name].wire_bytes == offers["lossless"].wire_bytes
            continue
        taken = len(format_named(name).encode(values, component))
        assert taken == pytest.approx(offers[name].wire_bytes, rel=0.25), name
        assert offers[name].encode_s >= offers["raw"].encode_s == 0.0


def test_other_state_is_reckoned_as_what_it_travels_as() -> None:
    ring = StateComponent("ring", IndexKind.RING, 8, (2,), (4,), "float32", (0, 1))
    slots = StateComponent("slots", IndexKind.REQUEST, 1, (), (10,), "uint8", (0,))
    offers = {one.name: one.wire_bytes for one in options(("raw", "int8"), (ring, slots), 500)}
    assert offers["raw"] == 8 * ring.row_bytes * 2 + 10
    assert offers["int8"] == pytest.approx(8 * ring.row_bytes * 2 * 27.1 / 32 + 10)
