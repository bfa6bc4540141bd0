"""The sampler against hand-computed numbers, against a direct float64 rendering, and by its statistics."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.philox import philox4x32, uniform
from shared.engine.sampler import SampleRow, bad_rows, sample
from shared.engine.sampler import _choose as choose
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import EngineError

EOS = 1


def spec(**fields: object) -> SamplingSpec:
    return SamplingSpec.model_validate(fields)


def row(
    sampling: SamplingSpec, position: int = 0, choice: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> SampleRow:
    return SampleRow(sampling, choice, position, prompt, output, frozenset({EOS}))


def token(logits: Sequence[float], sampling: SamplingSpec, **fields: object) -> int:
    return sample(torch.tensor([logits]), [row(sampling, **fields)])[0].token  # type: ignore[arg-type]


def drawn(logits: Sequence[float], sampling: SamplingSpec, count: int = 400, **fields: object) -> set[int]:
    """Every token that comes up at `count` positions."""
    rows = [row(sampling, position=p, **fields) for p in range(count)]  # type: ignore[arg-type]
    return {s.token for s in sample(torch.tensor([list(logits)] * count), rows)}


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def words(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.uint64)


# Philox


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


# Greedy


def test_greedy_takes_the_highest_and_the_lower_id_of_equals() -> None:
    greedy = spec(temperature=0)
    assert token([0.0, 3.0, 1.0, 3.0], greedy) == 1
    assert token([0.0, 3.0, 1.0, 3.0], spec(temperature=1e-9)) == 1
    assert token([0.0, 3.0, 1.0, 3.0], spec(temperature=0, logprobs=0)) == 1
    assert token([0.0, 3.0, 1.0, 3.0], spec(top_k=1)) == 1


def test_no_rows() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_logits_are_left_alone() -> None:
    logits = torch.randn(3, 9)
    before = logits.clone()
    changed = spec(logit_bias=((2, 5.0),), min_tokens=4, repetition_penalty=2.0, presence_penalty=1.0)
    sample(logits, [row(changed, prompt=[1], output=[2])] * 3)
    assert torch.equal(logits, before)


# Penalties, bias, min_tokens: greedy over numbers worked out by hand


def test_frequency_penalty_counts_output_only() -> None:
    once = spec(temperature=0, frequency_penalty=0.5)
    # token 0: 2.0 - 2 * 0.5 = 1.0 < 1.2; the prompt's uses do not count.
    assert token([2.0, 0.0, 1.2], once, output=[0, 0]) == 2
    assert token([2.0, 0.0, 1.2], once, output=[0]) == 0
    assert token([2.0, 0.0, 1.2], once, prompt=[0, 0, 0]) == 0


def test_presence_penalty_counts_once() -> None:
    presence = spec(temperature=0, presence_penalty=0.5)
    assert token([2.0, 0.0, 1.4], presence, output=[0, 0, 0]) == 0  # 1.5
    assert token([2.0, 0.0, 1.6], presence, output=[0]) == 2
    assert token([2.0, 0.0, 1.6], presence, prompt=[0]) == 0


def test_frequency_and_presence_add_up() -> None:
    both = spec(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    # 2.0 - 0.5 - 2 * 0.25 = 1.0
    assert token([2.0, 0.0, 1.05], both, output=[0, 0]) == 2
    assert token([2.0, 0.0, 0.95], both, output=[0, 0]) == 0


def test_repetition_penalty_divides_above_zero_and_multiplies_below() -> None:
    penalty = spec(temperature=0, repetition_penalty=2.0)
    assert token([2.0, 0.0, 1.1], penalty, prompt=[0]) == 2  # 2 / 2 = 1
    assert token([2.0, 0.0, 0.9], penalty, output=[0, 0]) == 0  # applied once
    assert token([-1.0, -3.0, -1.9], penalty, output=[0]) == 2  # -1 * 2 = -2
    assert token([-1.0, -3.0, -2.1], penalty, output=[0]) == 0


def test_bias_comes_before_the_repetition_penalty() -> None:
    # (1 + 3) / 2 = 2 < 2.5; the other order would give 1 / 2 + 3 = 3.5.
    assert token([1.0, 0.0, 2.5], spec(temperature=0, repetition_penalty=2.0, logit_bias=((0, 3.0),)), prompt=[0]) == 2


def test_repetition_comes_before_frequency() -> None:
    # 4 / 2 - 1 = 1 < 1.2; the other order would give (4 - 1) / 2 = 1.5.
    both = spec(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    assert token([4.0, 0.0, 1.2], both, output=[0]) == 2


def test_logit_bias_adds_and_ignores_ids_that_are_no_tokens() -> None:
    assert token([0.0, 0.0, 0.0], spec(temperature=0, logit_bias=((2, 0.5), (99, 100.0), (-1, 100.0)))) == 2


def test_min_tokens_forbids_eos_and_stop_tokens_until_reached() -> None:
    held = spec(temperature=0, min_tokens=2, stop_token_ids=(2, 500))
    logits = [0.0, 5.0, 4.0, 1.0]
    assert token(logits, held) == 3
    assert token(logits, held, output=[0]) == 3
    assert token(logits, held, output=[0, 0]) == EOS
    assert drawn(logits, spec(min_tokens=2, stop_token_ids=(2,), temperature=5.0)) == {0, 3}


def test_no_allowed_token_is_an_error() -> None:
    with pytest.raises(EngineError, match="row 0"):
        token([0.0, 1.0], spec(min_tokens=1, stop_token_ids=(0,)))


# Truncation


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


# A direct rendering of the contract


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


# Independence and determinism


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


# Log probabilities


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    logits = logs(0.1, 0.4, 0.3, 0.2)
    changed = spec(temperature=0, logprobs=3, logit_bias=((0, 100.0),))
    sampled = sample(torch.tensor([logits]), [row(changed)])[0]
    assert sampled.token == 0
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [t for t, _ in sampled.logprob.top] == [1, 2, 3]
    assert [p for _, p in sampled.logprob.top] == pytest.approx(logs(0.4, 0.3, 0.2), abs=1e-6)


def test_logprobs_zero_gives_the_chosen_alone_and_equals_rank_by_id() -> None:
    none = sample(torch.tensor([[1.0, 1.0]]), [row(spec(temperature=0))])[0]
    assert none.logprob is None
    alone = sample(torch.tensor([[1.0, 1.0]]), [row(spec(temperature=0, logprobs=0))])[0]
    assert alone.logprob is not None
    assert alone.logprob.top == ()
    assert alone.logprob.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    equal = sample(torch.tensor([[0.0, 2.0, 2.0, 2.0]]), [row(spec(temperature=0, logprobs=2))])[0]
    assert equal.logprob is not None
    assert [t for t, _ in equal.logprob.top] == [1, 2]


def test_more_logprobs_than_tokens() -> None:
    sampled = sample(torch.tensor([[0.0, 1.0]]), [row(spec(temperature=0, logprobs=20))])[0]
    assert sampled.logprob is not None
    assert [t for t, _ in sampled.logprob.top] == [1, 0]


# Broken logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_named(value: float, temperature: float) -> None:
    logits = torch.zeros(4, 30)
    logits[2, 17] = value
    assert bad_rows(logits) == [2]
    with pytest.raises(EngineError, match="row 2"):
        sample(logits, [row(spec(temperature=temperature))] * 4)


def test_finite_rows_are_not_bad() -> None:
    assert bad_rows(torch.full((3, 1000), 3e38)) == []
