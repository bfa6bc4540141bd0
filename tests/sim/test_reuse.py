"""Later requests of a simulated cluster find the state of earlier ones, and what was thought to be there and is not
costs an attempt and no more."""

from typing import Any

import pytest

from shared.runtime.errors import TransferRefused
from shared.transfer.mishap import Mishap
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.virtual_time import run_virtual

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 12, "ignore_eos": True}
PROMPT = prompt_of(30)


async def alone(prompt: tuple[int, ...], **sampling: Any) -> list[list[int]]:
    async with Cluster(prefills=0, num_pages=256, reuse=True) as cluster:
        answer = await cluster.ask(prompt, path="local", **sampling)
    assert answer.timings["cached_tokens"] == 0
    return answer.tokens


def told(answer: Answer) -> tuple[str, int, int]:
    """The path, positions that nobody computed, and those that nobody sent."""
    assert answer.error is None
    return answer.path, answer.timings["cached_tokens"], answer.timings["held_tokens"]


@pytest.mark.parametrize("n", [1, 3])
def test_the_same_prompt_again_is_finished_by_the_decode_worker_alone(n: int) -> None:
    async def scenario() -> None:
        async with Cluster(reuse=True) as cluster:
            first = await cluster.ask(PROMPT, n=n, **SAMPLED)
            assert told(first) == ("remote", 0, 0)
            again = await cluster.ask(PROMPT, n=n, **SAMPLED)
            assert told(again) == ("local", 24, 24)
            assert again.timings["bytes"] == {}
            strict = await cluster.ask(PROMPT, n=n, path="remote", strict=True, **SAMPLED)
            assert told(strict) == ("remote", 24, 24)
            assert first.tokens == again.tokens == strict.tokens == await alone(PROMPT, n=n, **SAMPLED)
            assert cluster.prefills[0].engine.stats.prompt_tokens_computed == 30 + 6
            assert cluster.decodes[0].engine.stats.prompt_tokens_computed == 6
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("prefill_page_tokens", [2, 4, 8])
def test_a_second_turn_moves_what_is_new(prefill_page_tokens: int) -> None:
    """D has 41 positions of it, 40 in whole blocks; P the first 24."""

    async def scenario() -> None:
        async with Cluster(reuse=True, prefill_page_tokens=prefill_page_tokens) as cluster:
            first = await cluster.ask(PROMPT, **SAMPLED)
            turn = (*PROMPT, *first.tokens[0], *prompt_of(20, seed=1))
            second = await cluster.ask(turn, **SAMPLED)
            assert told(second) == ("remote", 24, 40)
            each = first.timings["bytes"]["history"] // len(PROMPT)
            assert second.timings["bytes"] == {"history": (len(turn) - 40) * each}
            assert second.tokens == await alone(turn, **SAMPLED)
            await cluster.settle()

    run_virtual(scenario())


def test_a_decode_worker_that_has_less_costs_an_attempt_and_is_not_thought_of_again() -> None:
    async def scenario() -> None:
        async with Cluster(reuse=True, num_pages=24) as cluster:
            first = await cluster.ask(PROMPT, **SAMPLED)
            other = prompt_of(70, seed=2)
            await cluster.ask(other, path="local", max_tokens=4)  # takes pages that lay idle
            again = await cluster.ask(PROMPT, **SAMPLED)
            assert told(again) == ("remote", 24, 16)  # one block of three is gone
            assert (again.timings["attempts"], again.timings["recoveries"]) == (2, 0)
            assert again.tokens == first.tokens
            assert cluster.gateway.counters["attempts_retried"] == 1
            assert not cluster.gateway.rooms.breakers.report(0.0)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("mishap", [Mishap(error=TransferRefused("no")), Mishap(corrupt=True)])
def test_what_was_half_sent_is_found_by_nobody(mishap: Mishap) -> None:
    """The transfer breaks off in the middle; the next request for it gets all of it anew."""

    async def scenario() -> None:
        async with Cluster(reuse=True, decodes=1) as cluster:
            left = [Mishap(), mishap]
            cluster.network.policy = lambda key, pieces: left.pop(0) if left else Mishap()
            first = await cluster.ask(PROMPT, path="remote", strict=True, **SAMPLED)
            assert first.error is None
            assert first.timings["attempts"] == 2
            assert first.timings["held_tokens"] == 0
            assert first.tokens == await alone(PROMPT, **SAMPLED)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("n", [1, 2])
def test_answers_of_one_token_leave_their_prompt_with_prefill_alone(n: int) -> None:
    """Nothing is sent to D, so nothing is thought to be there; usage says what P had all the same."""

    async def scenario() -> None:
        async with Cluster(reuse=True) as cluster:
            one = SAMPLED | {"max_tokens": 1, "n": n}
            answers = [await cluster.ask(PROMPT, **one) for _ in range(4)]
            assert [told(answer) for answer in answers] == [("remote", 0, 0), *[("remote", 24, 0)] * 3]
            assert {answer.timings["attempts"] for answer in answers} == {1}
            assert len({str(answer.tokens) for answer in answers}) == 1
            await cluster.settle()

    run_virtual(scenario())


def test_a_prompt_of_whole_blocks_is_found_but_for_the_last() -> None:
    async def scenario() -> None:
        async with Cluster(reuse=True) as cluster:
            prompt = prompt_of(32)
            answers = [await cluster.ask(prompt, **SAMPLED) for _ in range(3)]
            assert [told(answer) for answer in answers] == [("remote", 0, 0), *[("local", 24, 24)] * 2]
            assert {answer.timings["attempts"] for answer in answers} == {1}
            await cluster.settle()

    run_virtual(scenario())


def test_a_restarted_worker_is_another_one_that_has_nothing() -> None:
    async def scenario() -> None:
        async with Cluster(reuse=True, decodes=1) as cluster:
            first = await cluster.ask(PROMPT, **SAMPLED)
            await cluster.restart(cluster.decodes[0])
            again = await cluster.ask(PROMPT, **SAMPLED)
            assert told(again) == ("remote", 24, 0)
            assert again.tokens == first.tokens
            await cluster.settle()

    run_virtual(scenario())
