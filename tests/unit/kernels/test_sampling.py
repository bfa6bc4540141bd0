"""The compiled sampling pass against numpy, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.sampling import pick, uniform
from shared.engine import philox


def plain(values: np.ndarray, temperature: float, draw: float) -> int:
    """One row, as the contract says it, in numpy's own float32 exp and float64 running sum."""
    if not np.isfinite(values).all():
        return -1
    best = int(values.argmax())
    if temperature == 0:
        return best
    cumulative = np.cumsum(np.exp((values - values[best]) / np.float32(temperature)), dtype=np.float64)
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(np.diff(cumulative, prepend=0.0))[-1]))


@given(
    vocab=st.sampled_from([1, 2, 255, 256, 257, 5000, 40_000]),
    num_rows=st.sampled_from([1, 2, 7]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e30]),
    rounded=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_equals_numpy_bit_for_bit(
    vocab: int, num_rows: int, spread: float, rounded: bool, threads: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((num_rows, vocab)) * spread).astype(np.float32)
    if rounded:
        logits = np.round(logits)  # many equals, zeros of both signs among them
    if seed % 3 == 0:
        logits[seed % num_rows, seed % vocab] = (np.nan, -np.nan, np.inf, -np.inf)[seed % 4]
    temperatures = generator.choice([0.0, 0.1, 1.0, 1.7], num_rows)
    draws = generator.choice([0.0, generator.random(), 1 - 2**-53], num_rows)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens = pick(torch.from_numpy(logits), temperatures, draws)
    finally:
        torch.set_num_threads(before)
    assert tokens.tolist() == [plain(logits[r], temperatures[r], draws[r]) for r in range(num_rows)]


def test_a_row_does_not_see_its_neighbours_nor_the_step_before() -> None:
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.standard_normal((40, 3000)).astype(np.float32))
    temperatures, draws = generator.choice([0.0, 0.5, 1.0], 40), generator.random(40)
    together = pick(logits, temperatures, draws).tolist()
    order = generator.permutation(40)[:11]
    assert pick(logits[order], temperatures[order], draws[order]).tolist() == [together[i] for i in order]
    assert [pick(logits[i : i + 1], temperatures[i : i + 1], draws[i : i + 1])[0] for i in range(40)] == together
    broken = logits.clone()
    broken[5, 7] = float("nan")
    assert pick(broken, temperatures, draws).tolist() == [-1 if i == 5 else t for i, t in enumerate(together)]


@pytest.mark.parametrize("view", ["transposed", "strided"])
def test_logits_may_lie_anyhow(view: str) -> None:
    wide = torch.randn(6, 90, generator=torch.Generator().manual_seed(1))
    logits = wide.T[:6] if view == "transposed" else wide[:, ::2]
    tokens = pick(logits, np.zeros(6), np.zeros(6))
    assert tokens.tolist() == logits.argmax(dim=1).tolist()


def test_uniform_is_philox() -> None:
    generator = np.random.default_rng(5)
    seeds = generator.integers(0, 2**64, 200, dtype=np.uint64)
    choices = generator.integers(0, 128, 200, dtype=np.uint64)
    positions = generator.integers(0, 2**40, 200, dtype=np.uint64)
    assert uniform(seeds, choices, positions).tolist() == philox.uniform(seeds, choices, positions).tolist()
