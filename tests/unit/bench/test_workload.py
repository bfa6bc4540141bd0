"""Prompts, lengths and times follow from the seed alone."""

import math
from itertools import islice

import pytest

from services.bench.errors import BenchError
from services.bench.plan.arrivals import Gamma
from services.bench.plan.prompts import WORDS, Measure, PromptWriter
from services.bench.plan.workload import Lengths, PlannedRequest, SyntheticWorkload
from tests.support_text import text_model


def workload(seed: int = 0, **more: object) -> SyntheticWorkload:
    lengths = {"prompt_tokens": Lengths(8, 64), "max_tokens": Lengths(4, 4)}
    return SyntheticWorkload(PromptWriter(seed, Measure()), seed=seed, **(lengths | more))  # type: ignore[arg-type]


def plan(seed: int = 0, **more: object) -> list[PlannedRequest]:
    return list(workload(seed, **more))


def test_lengths() -> None:
    assert Lengths.parse("128", "--max-tokens") == Lengths(128, 128)
    assert Lengths.parse(" 64 - 512", "--max-tokens") == Lengths(64, 512)


@pytest.mark.parametrize("text", ["", "0", "x", "5-2", "-3", "1-", "1.5", "0-4", "99999999"])
def test_wrong_lengths_say_what_to_write(text: str) -> None:
    with pytest.raises(BenchError, match=r"^--max-tokens .*: write a number of tokens such as 128"):
        Lengths.parse(text, "--max-tokens")


def test_the_same_seed_gives_the_same_load() -> None:
    assert plan(3, arrivals=Gamma(5.0), num_requests=20) == plan(3, arrivals=Gamma(5.0), num_requests=20)
    assert plan(3, arrivals=Gamma(5.0), num_requests=20) != plan(4, arrivals=Gamma(5.0), num_requests=20)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    assert plan(num_requests=30)[:10] == plan(num_requests=10)


def test_a_closed_load_has_no_times() -> None:
    found = plan(num_requests=5)
    assert [request.number for request in found] == [0, 1, 2, 3, 4]
    assert {request.at_s for request in found} == {None}


def test_a_closed_load_by_duration_never_ends_by_itself() -> None:
    assert len(list(islice(workload(duration_s=1.0), 1000))) == 1000


def test_arrivals_are_a_poisson_process() -> None:
    times = [request.at_s or 0.0 for request in plan(arrivals=Gamma(10.0), num_requests=4000)]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation == pytest.approx(0.1, rel=0.1)


def test_an_open_load_ends_with_its_duration() -> None:
    times = [request.at_s or 0.0 for request in plan(arrivals=Gamma(10.0), duration_s=50.0)]
    assert times == sorted(times)
    assert times[-1] <= 50.0
    assert len(times) == pytest.approx(500, rel=0.2)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 250


def test_no_two_prompts_begin_alike() -> None:
    writer = PromptWriter(seed=7, measure=Measure())
    prompts = [writer.write(number, 16).split() for number in range(1000)]
    assert len({prompt[0] for prompt in prompts[: len(WORDS)]}) == len(WORDS)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)


def test_a_shared_prefix_is_shared_and_no_more() -> None:
    writer = PromptWriter(seed=7, measure=Measure(), shared_prefix=5)
    one, other = (writer.write(number, 16).split() for number in (0, 1))
    assert (len(one), one[:5]) == (16, other[:5])
    assert one[5] != other[5]
    assert writer.write(0, 3).split() == one[:3]


@pytest.mark.parametrize("tokens", [1, 2, 64, 512])
def test_a_word_is_about_a_token(tokens: int) -> None:
    prompt = PromptWriter(seed=0, measure=Measure()).write(5, tokens)
    assert len(text_model().encode(prompt, add_special=True)) == pytest.approx(tokens, rel=0.02, abs=1)


def test_the_measure_takes_off_what_the_server_adds() -> None:
    assert Measure(base=10.0, slope=2.0).words_for(50) == 20
    assert Measure(base=10.0, slope=2.0).words_for(5) == 1
