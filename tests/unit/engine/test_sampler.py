"""What a request asks of the sampler, each against numbers worked out by hand: greedy choice, penalties, bias, log
probabilities, and what is no number."""

import math

import pytest
import torch

from shared.engine.sampler import sample
from shared.runtime.errors import EngineError
from tests.support_sampler import EOS, drawn, logs, row, spec, token


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_named(value: float, temperature: float) -> None:
    logits = torch.zeros(4, 30)
    logits[2, 17] = value
    with pytest.raises(EngineError, match="row 2"):
        sample(logits, [row(spec(temperature=temperature))] * 4)


def test_the_largest_numbers_are_not_broken() -> None:
    assert [s.token for s in sample(torch.full((3, 1000), 3e38), [row(spec(temperature=0))] * 3)] == [0, 0, 0]
