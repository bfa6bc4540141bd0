"""Every wire format: what comes out, how far it may be from what went in, and where it is written."""

import struct

import numpy as np
import pytest

from shared.state.components import StateComponent
from shared.transfer.formats.block import HEADER_BYTES
from shared.transfer.formats.catalog import LOSSINESS, available, format_for, format_named, lossiest, serves
from tests.unit.transfer.formats_rows import FLOATS, RING, SLOTS, any_bits, kv, like_a_model, scattered

LOSSY = [name for name, place in LOSSINESS.items() if place]


def travelled(name: str, values: np.ndarray, component: StateComponent, first_layer: int = 0) -> np.ndarray:
    chosen = format_named(name)
    out = np.full_like(values, 1)
    chosen.decode(chosen.encode(values, component, first_layer=first_layer), component, out)
    return out


def bits(values: np.ndarray) -> bytes:
    return values.tobytes()


@pytest.mark.parametrize("name", ["raw", "lossless"])
@pytest.mark.parametrize("component", [kv("float32"), kv("float16"), kv("uint8"), SLOTS, RING], ids=lambda c: c.dtype)
def test_exact_formats_keep_every_bit(name: str, component: StateComponent) -> None:
    rows = component.unit_tokens
    for values in (any_bits(component, 3, rows), like_a_model(component, 3, rows), any_bits(component, 1, 1)):
        assert bits(travelled(name, values, component)) == bits(values)
    large = like_a_model(component, 90, rows)  # planes long enough to be sampled
    assert bits(travelled(name, large, component)) == bits(large)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lossless_is_smaller_on_rows_like_a_models(dtype: str) -> None:
    values = like_a_model(kv(dtype), 90)
    assert len(format_named("lossless").encode(values, kv(dtype))) < 0.93 * values.nbytes


@pytest.mark.parametrize("name", [*LOSSINESS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_may_lie_scattered_and_nothing_else_is_touched(name: str, dtype: str) -> None:
    component = kv(dtype)
    chosen = format_for(name, component)
    values = like_a_model(component, rows=5)
    data = chosen.encode(scattered(values), component)
    assert data == chosen.encode(values, component)
    plain = np.empty_like(values)
    chosen.decode(data, component, plain)
    view = scattered(np.zeros_like(values))
    pool = view.base
    assert pool is not None
    pool[...] = 7
    chosen.decode(memoryview(bytearray(data)), component, view)
    assert bits(view) == bits(plain)
    view[...] = 7
    assert (pool == 7).all()


def test_fp16_rounds_to_the_nearest_half_float() -> None:
    component = kv("float32")
    values = like_a_model(component)
    values[0, 0, 0, 0, :6] = [1e6, -1e6, np.inf, -np.inf, np.nan, 1e-9]
    out = travelled("fp16", values, component)
    assert (np.abs(out[1:] - values[1:]) <= np.abs(values[1:]) * 2.0**-11 + 2.0**-25).all()
    assert out[0, 0, 0, 0, :4].tolist() == [65504, -65504, np.inf, -np.inf]
    assert np.isnan(out[0, 0, 0, 0, 4])
    assert abs(out[0, 0, 0, 0, 5] - 1e-9) <= 2.0**-25


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_loses_at_most_half_a_step_of_its_row(dtype: str) -> None:
    values = like_a_model(kv(dtype))
    out = travelled("int8", values, kv(dtype)).astype(np.float32)
    exact = values.astype(np.float32)
    step = np.abs(exact).max(axis=-1, keepdims=True) / 127
    own_rounding = np.abs(exact) * (2.0**-11 if dtype == "float16" else 2.0**-22)
    assert (np.abs(out - exact) <= 0.5001 * step + own_rounding).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_loses_at_most_a_sixteenth_of_each_number(dtype: str) -> None:
    values = like_a_model(kv(dtype))
    out = travelled("fp8", values, kv(dtype)).astype(np.float32)
    exact = values.astype(np.float32)
    least = np.abs(exact).max(axis=-1, keepdims=True) / 448 * 2.0**-10
    own_rounding = np.abs(exact) * 2.0**-11 + 2.0**-24 if dtype == "float16" else 0
    assert (np.abs(out - exact) <= np.abs(exact) * (1.0001 / 16) + 1.0001 * least + own_rounding).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("drifting", [False, True])
def test_delta_loses_at_most_half_a_step_of_its_channel(dtype: str, drifting: bool) -> None:
    """Where numbers drift, anchors are the better references; else the mean is."""
    component = kv(dtype)
    values = like_a_model(component, units=8)
    if drifting:
        tokens = np.arange(8 * component.unit_tokens).reshape(1, 8, 1, component.unit_tokens, 1)
        values = (values * 0.05 + tokens).astype(dtype)
    (group,) = struct.unpack_from("<H", format_named("delta").encode(values, component), HEADER_BYTES)
    assert group == (16 if drifting else 0)
    out = travelled("delta", values, component).astype(np.float32)
    exact = values.astype(np.float32)
    spread = exact.std(axis=(1, 3), keepdims=True)
    third = np.repeat([0.25, 0.375, 0.5], 2)[:, None, None, None, None]
    own_rounding = np.abs(exact) * 2.0**-11 if dtype == "float16" else np.abs(exact) * 2.0**-20
    error = np.abs(out - exact)
    assert (error <= 1.02 * third * spread + own_rounding).all()
    assert error[4:].mean() > error[:2].mean() or drifting
    if drifting:
        assert error.max() < 0.51 * 0.5 * 1.2533 * np.arange(component.unit_tokens).mean() * 1.05


def test_delta_reaches_what_is_far_from_all_others() -> None:
    component = kv("float32")
    values = like_a_model(component, units=16) * np.float32(0.001)
    heights = np.random.default_rng(7).uniform(50, 100, size=(6, 4, 32)).astype(np.float32)
    values[:, 0, :, 0] += heights
    error = np.abs(travelled("delta", values, component) - values)
    assert (error <= 0.51 * 1.01 * np.abs(heights)[:, None, :, None] / 127).all()


def test_delta_hides_no_bad_number_among_good_anchors() -> None:
    component = kv("float32")
    tokens = np.arange(8 * component.unit_tokens, dtype=np.float32).reshape(1, 8, 1, component.unit_tokens, 1)
    values = like_a_model(component, units=8) * np.float32(0.05) + tokens
    values[2, 1, 3, 4, 5] = np.inf
    assert np.isnan(travelled("delta", values, component)[2, :, 3, :, 5]).all()


def test_delta_takes_coarser_steps_in_later_layers_wherever_the_block_begins() -> None:
    component = kv("float32")
    values = np.repeat(like_a_model(component, units=8)[:1], 2, axis=0)
    sizes = [len(format_named("delta").encode(values, component, first_layer=first)) for first in (0, 2, 4)]
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(ValueError, match="layers from 5"):
        format_named("delta").encode(values, component, first_layer=5)


def test_sizes_are_what_the_formats_promise() -> None:
    component = kv("float32")
    values = like_a_model(component, units=32)
    size = {name: 8 * len(format_named(name).encode(values, component)) / values.size for name in LOSSINESS}
    assert size["raw"] > 32 > size["lossless"] > 16
    assert 16 < size["fp16"] < 16.1
    assert 9 < size["int8"] < 9.1  # 8 bits and a scale for 32 numbers
    assert size["fp8"] == size["int8"]
    assert size["delta"] < 4.5


@pytest.mark.parametrize("name", ["int8", "fp8", "delta"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_never_becomes_one(name: str, bad: float) -> None:
    component = kv("float32")
    values = like_a_model(component)
    values[2, 1, 3, 4, 5] = bad
    out = travelled(name, values, component)
    assert np.isnan(out[2, 1, 3, 4, 5])
    assert np.isfinite(out[[0, 1, 3, 4, 5]]).all()


@pytest.mark.parametrize("name", ["int8", "fp8", "delta"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_and_the_smallest_numbers_stay_small(name: str, dtype: str) -> None:
    component = kv(dtype)
    values = np.zeros_like(like_a_model(component))
    assert (travelled(name, values, component) == 0).all()
    values[:] = np.finfo(dtype).smallest_subnormal
    assert (np.abs(travelled(name, values, component)) <= 2 * values).all()


@pytest.mark.parametrize("name", [*LOSSINESS])
def test_the_largest_numbers_stay_finite(name: str) -> None:
    for dtype, large in (("float32", 1e17 if name == "delta" else 1e38), ("float16", 65504)):
        values = np.full_like(like_a_model(kv(dtype)), large)
        chosen, out = format_for(name, kv(dtype)), np.empty_like(values)
        chosen.decode(chosen.encode(values, kv(dtype)), kv(dtype), out)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("component", [kv("uint8"), SLOTS, RING], ids=lambda c: f"{c.name}-{c.dtype}")
def test_state_that_no_lossy_format_takes_travels_whole(name: str, component: StateComponent) -> None:
    assert not format_named(name).takes(component)
    assert format_for(name, component).name == "lossless"
    with pytest.raises(ValueError, match="does not travel"):
        format_named(name).encode(any_bits(component, 1, 1), component)


def test_half_floats_are_not_sent_as_half_floats_but_lossless() -> None:
    assert format_for("fp16", kv("float32")).name == "fp16"
    assert format_for("fp16", kv("float16")).name == "lossless"


@pytest.mark.parametrize("name", [*LOSSINESS])
def test_rows_of_another_component_are_refused(name: str) -> None:
    component, chosen = kv("float32"), format_named(name)
    good = like_a_model(component)
    for bad in (good[0], good[..., :-1], good.astype(np.float64), good[:0], np.repeat(good, 2, axis=3)):
        with pytest.raises(ValueError, match="kv"):
            chosen.encode(bad, component)
        with pytest.raises(ValueError, match="kv"):
            chosen.decode(chosen.encode(good, component), component, bad.copy())


def test_keys_remember_the_lossiest_format() -> None:
    assert available() == tuple(LOSSINESS)
    assert lossiest([]) == lossiest(["lossless"]) == lossiest(["raw", "lossless"]) == "raw"
    assert lossiest(["fp8", "lossless", "int8"]) == "fp8"
    assert serves("raw", "lossless")
    assert serves("lossless", "raw")
    assert serves("int8", "fp8")
    for name in LOSSY:
        assert not serves(name, "raw")
        assert not serves(name, "lossless")


def test_errors_grow_in_the_order_of_lossiness() -> None:
    component = kv("float32")
    values = like_a_model(component, units=16)
    errors = [float(np.square(travelled(name, values, component) - values).mean()) for name in LOSSINESS]
    assert errors[0] == errors[1] == 0
    assert errors == sorted(errors)
    assert errors[2] > 0


def test_fp8_codes_are_those_of_the_kernels() -> None:
    import torch

    from kernels.reference import decode_fp8, encode_fp8

    component = kv("float32")
    values = like_a_model(component, units=8)
    values[0] = any_bits(component, units=8)[0]
    values[0][~(np.abs(values[0]) < 1e30)] = 0
    expected = decode_fp8(encode_fp8(torch.from_numpy(values))).numpy()
    assert np.array_equal(travelled("fp8", values, component), expected)
