"""The entropy coder: what comes out is what went in, at what entropy costs, and bad input is found."""

import numpy as np
import pytest

from kernels.wire import rans


def streams() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    narrow = np.rint(random.normal(128, 3, size=20_000))
    return [
        np.zeros(0, dtype=np.uint8),
        np.full(3, 200, dtype=np.uint8),
        np.arange(256, dtype=np.uint8),
        random.integers(0, 256, size=5_000, dtype=np.uint8),
        narrow.astype(np.uint8),
        np.concatenate((np.zeros(50_000, dtype=np.uint8), np.arange(256, dtype=np.uint8))),
    ]


def decoded(data: bytes, freq: np.ndarray, length: int) -> tuple[bool, np.ndarray]:
    out = np.full(length + 8, 77, dtype=np.uint8)
    good = rans.decode(np.frombuffer(data, dtype=np.uint8), freq, out[:length])
    assert (out[length:] == 77).all()
    return good, out[:length]


@pytest.mark.parametrize("symbols", streams())
def test_what_comes_out_is_what_went_in(symbols: np.ndarray) -> None:
    freq = rans.frequencies(symbols)
    assert freq.sum() == rans.TOTAL
    assert (freq[np.unique(symbols)] >= 1).all()
    good, out = decoded(rans.encode(symbols, freq), freq, symbols.size)
    assert good
    assert (out == symbols).all()


def test_a_symbol_costs_its_entropy() -> None:
    symbols = streams()[4]
    share = np.bincount(symbols) / symbols.size
    share = share[share > 0]
    bits = -(share * np.log2(share)).sum() * symbols.size
    assert 8 * len(rans.encode(symbols, rans.frequencies(symbols))) < 1.005 * bits + 64


def test_a_stream_that_is_cut_or_too_long_is_found() -> None:
    symbols = streams()[4]
    freq = rans.frequencies(symbols)
    data = rans.encode(symbols, freq)
    for cut in (0, 3, 4, len(data) // 2, len(data) - 1):
        assert not decoded(data[:cut], freq, symbols.size)[0]
    assert not decoded(data + b"\0", freq, symbols.size)[0]
    assert not decoded(data, freq, symbols.size - 1)[0]
    assert not decoded(data, freq, symbols.size + 1)[0]


def test_frequencies_that_are_no_distribution_are_refused() -> None:
    symbols = streams()[1]
    data = rans.encode(symbols, rans.frequencies(symbols))
    assert not decoded(data, np.zeros(256, dtype=np.int32), symbols.size)[0]
    assert not decoded(data, np.full(256, rans.TOTAL, dtype=np.int32), symbols.size)[0]


def test_a_symbol_without_a_frequency_is_refused() -> None:
    with pytest.raises(ValueError, match="no frequency"):
        rans.encode(streams()[2], rans.frequencies(streams()[1]))


def test_any_bytes_at_all_stay_inside() -> None:
    random = np.random.default_rng(6)
    for _ in range(300):
        freq = rans.frequencies(random.integers(0, 256, size=int(random.integers(1, 40)), dtype=np.uint8))
        decoded(random.bytes(int(random.integers(0, 60))), freq, int(random.integers(0, 200)))
