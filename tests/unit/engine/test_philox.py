"""The counter-based generator behind every draw."""

import numpy as np
import pytest

from shared.engine.philox import philox4x32, uniform


def words(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(words(*counter), words(*key))[0].tolist() == list(expected)


def test_uniform_is_uniform_and_each_argument_counts() -> None:
    n = 20_000
    draws = uniform(np.full(n, 2**64 - 1, np.uint64), np.zeros(n, np.int64), np.arange(n))
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001
    base = (7, 3, 11)
    others = [(8, 3, 11), (7, 4, 11), (7, 3, 12), (7 + 2**32, 3, 11), (7, 3, 11 + 2**32), (3, 7, 11)]
    seeds, choices, positions = zip(base, *others, strict=True)
    values = uniform(np.array(seeds, np.uint64), np.array(choices), np.array(positions))
    assert len(set(values.tolist())) == len(others) + 1
