"""Truncation and draws: by hand, against a direct float64 rendering, by their statistics, and row by row."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.philox import uniform
from shared.engine.sampler import _choose as choose
from shared.engine.sampler import sample
from shared.protocol.messages import SamplingSpec
from tests.support_sampler import drawn, logs, row, spec


def test_top_k() -> None:
    logits = logs(0.1, 0.2, 0.3, 0.4)
    assert drawn(logits, spec(top_k=2)) == {2, 3}
    assert drawn(logits, spec(top_k=4)) == drawn(logits, spec(top_k=99)) == {0, 1, 2, 3}
    assert drawn([1.0, 1.0, 0.0, 1.0], spec(top_k=2)) == {0, 1}


def test_top_p_keeps_the_fewest_that_hold_p() -> None:
    logits = logs(0.1, 0.2, 0.3, 0.4)
    assert drawn(logits, spec(top_p=0.35)) == {3}
    assert drawn(logits, spec(top_p=0.45)) == {2, 3}
    assert drawn(logits, spec(top_p=0.75)) == {1, 2, 3}
    assert drawn(logits, spec(top_p=0.95)) == {0, 1, 2, 3}


def test_tiny_top_p_keeps_one() -> None:
    assert drawn([1.0, 1.0, 1.0], spec(top_p=1e-12)) == {0}
    assert drawn([0.0, 1.0, 1.0], spec(top_p=1e-12)) == {1}


def test_top_p_is_over_what_top_k_left() -> None:
    # After top-k 2 the shares are 3/7 and 4/7; 0.5 < 4/7 keeps one, though 0.4 of all tokens would not.
    assert drawn(logs(0.1, 0.2, 0.3, 0.4), spec(top_k=2, top_p=0.5)) == {3}


def test_min_p_is_relative_to_the_best() -> None:
    logits = logs(0.05, 0.15, 0.3, 0.5)
    assert drawn(logits, spec(min_p=0.5)) == {2, 3}
    assert drawn(logits, spec(min_p=1.0)) == {3}
    assert drawn(logits, spec(min_p=0.2)) == {1, 2, 3}
    assert drawn([2.0, 2.0, 0.0], spec(min_p=1.0)) == {0, 1}


def test_temperature_comes_before_the_truncation() -> None:
    # At temperature 2 the shares 0.9 and 0.1 become 0.75 and 0.25.
    assert drawn(logs(0.9, 0.1), spec(top_p=0.8)) == {0}
    assert drawn(logs(0.9, 0.1), spec(top_p=0.8, temperature=2.0)) == {0, 1}


def direct(logits: np.ndarray, sampling: SamplingSpec, draw: float) -> int:
    scaled = logits.astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.lexsort((np.arange(len(logits)), -logits))
    if sampling.top_k:
        order = order[: sampling.top_k]
    share = probabilities[order] / probabilities[order].sum()
    held_before = np.cumsum(share) - share
    order = order[held_before < sampling.top_p]
    order = order[probabilities[order] >= sampling.min_p * probabilities[order].max()]
    kept = np.sort(order)
    cumulative = np.cumsum(probabilities[kept])
    return int(kept[min(np.searchsorted(cumulative, draw * cumulative[-1], side="right"), len(kept) - 1)])


@given(
    vocab=st.sampled_from([2, 17, 700, 9000]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 2**64 - 1),
)
def test_equals_the_direct_rendering(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((8, vocab)) * spread).astype(np.float32)
    sampling = spec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    positions = np.arange(8)
    sampled = sample(torch.from_numpy(logits), [row(sampling, position=int(p), choice=1) for p in positions])
    draws = uniform(np.full(8, seed, np.uint64), np.ones(8, np.int64), positions)
    expected = [direct(logits[i], sampling, float(draws[i])) for i in range(8)]
    # float32 weights against float64 ones: a draw within 1e-6 of a border may fall on the other side.
    assert sum(a.token != b for a, b in zip(sampled, expected, strict=True)) <= (1 if vocab == 9000 else 0)


def test_the_cdf_of_a_large_vocabulary_does_not_drift() -> None:
    logits = (np.random.default_rng(1).standard_normal(1_000_000) * 0.1).astype(np.float32)
    draws = uniform(np.full(4, 1, np.uint64), np.zeros(4, np.int64), np.arange(4))
    sampled = sample(torch.from_numpy(logits).expand(4, -1), [row(spec(seed=1), position=p) for p in range(4)])
    cumulative = np.cumsum(np.exp(logits.astype(np.float64)))
    expected = np.searchsorted(cumulative, draws * cumulative[-1], side="right")
    assert max(abs(s.token - e) for s, e in zip(sampled, expected.tolist(), strict=True)) <= 1


def test_frequencies_follow_the_softmax() -> None:
    probabilities = np.array([0.02, 0.08, 0.2, 0.3, 0.4])
    n = 20_000
    rows = [row(spec(seed=5), position=p) for p in range(n)]
    sampled = sample(torch.tensor(logs(*probabilities)).expand(n, 5), rows)
    counts = np.bincount([s.token for s in sampled], minlength=5)
    assert ((counts - n * probabilities) ** 2 / (n * probabilities)).sum() < 18.5  # chi-squared, p = 0.001


def test_a_row_does_not_depend_on_the_batch() -> None:
    kinds = [
        spec(temperature=0),
        spec(seed=1),
        spec(seed=2, top_p=0.9),
        spec(seed=3, top_k=20, min_p=0.1),
        spec(seed=4, repetition_penalty=1.3, temperature=0.7),
        spec(temperature=0, logprobs=3),
    ]
    logits = torch.randn(len(kinds), 3000, generator=torch.Generator().manual_seed(0)) * 2
    rows = [row(kind, position=10 + i, prompt=[1, 2, 3], output=[4, 4]) for i, kind in enumerate(kinds)]
    together = sample(logits, rows)
    order = [4, 2, 0, 5, 1, 3]
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))] == together


def test_choices_and_positions_draw_apart() -> None:
    flat = torch.zeros(64, 1000)
    seeded = spec(seed=9)
    by_choice = {s.token for s in sample(flat, [row(seeded, choice=c) for c in range(64)])}
    by_position = {s.token for s in sample(flat, [row(seeded, position=p) for p in range(64)])}
    assert len(by_choice) > 50
    assert len(by_position) > 50


@given(
    vocab=st.sampled_from([2, 300, 9000]),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
    logprobs=st.sampled_from([None, 0, 2]),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_pass_over_all_rows_gives_what_each_row_alone_would(
    vocab: int, temperature: float, logprobs: int | None, seed: int
) -> None:
    """Rows that take the compiled pass, between rows that cannot, against the numpy way of the latter."""
    plain, mixed = spec(seed=seed, temperature=temperature, logprobs=logprobs), spec(seed=seed, temperature=temperature)
    others = [
        mixed.model_copy(update={"top_k": 2, "top_p": 0.8}),
        mixed.model_copy(update={"logit_bias": ((0, 1.5),), "min_tokens": 1, "min_p": 0.1}),
        mixed.model_copy(update={"repetition_penalty": 1.2, "presence_penalty": 0.5}),
    ]
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((8, vocab)) * 3).astype(np.float32)
    rows = [row(kind, position=i, prompt=[0, 1], output=[1]) for i, kind in enumerate([plain, *others, plain, plain])]
    draws = uniform(np.full(6, seed, np.uint64), np.zeros(6, np.int64), np.arange(6))
    sampled = sample(torch.from_numpy(logits[:6]), rows)
    assert [s.token for s in sampled] == [choose(logits[i], rows[i], float(draws[i])) for i in range(6)]
    assert [s.logprob is None for s in sampled] == [r.sampling.logprobs is None for r in rows]
