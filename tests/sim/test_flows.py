"""A request's way through a simulated cluster: what the client sees, and that nothing is left behind."""

import asyncio
from typing import Any

import pytest

from shared.protocol.messages import FinishReason
from shared.runtime.errors import DeadlineExceeded, InvalidRequest, NoWorker
from shared.transfer.classes import Standing, TrafficClass
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.virtual_time import run_virtual


async def oracle(prompt: tuple[int, ...], **sampling: object) -> list[list[int]]:
    """The same request computed by one worker alone."""
    return (await oracles([prompt], **sampling))[0]


async def oracles(prompts: list[tuple[int, ...]], **sampling: object) -> list[list[list[int]]]:
    """Each request computed by one worker alone."""
    async with Cluster(prefills=0, num_pages=1024, max_running=64) as alone:
        answers = await asyncio.gather(*(alone.ask(prompt, path="local", **sampling) for prompt in prompts))
    assert {(a.error, a.path) for a in answers} == {(None, "local")}
    return [a.tokens for a in answers]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("n", [1, 3])
def test_remote_equals_local_and_everything_comes_free(length: int, n: int) -> None:
    async def scenario() -> None:
        prompt = prompt_of(length, seed=length)
        sampling = {"n": n, "temperature": 0.9, "seed": 7, "max_tokens": 12, "ignore_eos": True}
        async with Cluster() as cluster:
            answer = await cluster.ask(prompt, **sampling)
            assert answer.error is None
            assert answer.path == "remote"
            assert answer.finishes == [FinishReason.LENGTH] * n
            assert answer.tokens == await oracle(prompt, **sampling)
            await cluster.settle()
            prefill, decode = cluster.prefills[0], cluster.decodes[0]
            assert decode.engine.stats.prompt_tokens_computed == 0
            assert prefill.engine.stats.tokens_generated == n
            assert prefill.engine.stats.prompt_tokens_computed == length
            assert sum(answer.timings["bytes"].values()) > 0

    run_virtual(scenario())


def test_the_last_chunk_of_a_hand_off_is_sent_as_such_with_the_priority_of_its_request() -> None:
    async def scenario() -> None:
        async with Cluster(prefill_chunk=8) as cluster:
            link, sent = cluster.prefills[0].link, []
            send = link.send

            async def watched(
                key: Any, secret: bytes, peer: Any, pieces: Any, wire_format: str, standing: Standing
            ) -> None:
                sent.append(standing)
                await send(key, secret, peer, pieces, wire_format, standing)

            link.send = watched  # type: ignore[method-assign]
            answer = await cluster.ask(prompt_of(20), max_tokens=2, ignore_eos=True, priority=-7)
            assert answer.error is None
            assert [one.traffic for one in sent] == [TrafficClass.HANDOFF, TrafficClass.HANDOFF, TrafficClass.LAST]
            assert {one.priority for one in sent} == {-7}
            await cluster.settle()

    run_virtual(scenario())


def test_without_a_prefill_worker_strict_is_refused_and_auto_says_local() -> None:
    async def scenario() -> None:
        async with Cluster(prefills=0) as cluster:
            strict = await cluster.ask(prompt_of(5), strict=True)
            assert isinstance(strict.error, NoWorker)
            assert strict.error.http_status == 503
            auto = await cluster.ask(prompt_of(5))
            assert (auto.error, auto.path) == (None, "local")
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("how", ["max_tokens", "stop_token", "text_side"])
def test_a_request_that_its_first_token_ends_moves_no_bytes(how: str) -> None:
    async def scenario() -> None:
        prompt = prompt_of(6)
        (first, *_), *_ = await oracle(prompt)
        async with Cluster() as cluster:
            if how == "max_tokens":
                answer = await cluster.ask(prompt, max_tokens=1)
            elif how == "stop_token":
                answer = await cluster.ask(prompt, stop_token_ids=(first,))
            else:
                answer = await cluster.ask(prompt, stop_after={0: 1})
            assert answer.error is None
            assert answer.tokens == [[first]]
            expected = {"max_tokens": FinishReason.LENGTH, "stop_token": FinishReason.STOP, "text_side": None}
            assert answer.finishes == [expected[how]]
            await cluster.settle()
            decode = cluster.decodes[0]
            assert decode.engine.stats.tokens_generated <= (0 if how != "text_side" else 2)
            if how != "text_side":
                assert decode.link.counters.get("transfers", 0) == 0
                assert sum(answer.timings["bytes"].values()) == 0

    run_virtual(scenario())


def test_a_stopped_choice_ends_alone() -> None:
    async def scenario() -> None:
        prompt = prompt_of(9)
        sampling = {"n": 3, "temperature": 0.8, "seed": 3, "max_tokens": 10, "ignore_eos": True}
        whole = await oracle(prompt, **sampling)
        async with Cluster() as cluster:
            answer = await cluster.ask(prompt, stop_after={1: 4}, **sampling)
            assert answer.error is None
            assert answer.tokens[0] == whole[0]
            assert answer.tokens[1] == whole[1][: len(answer.tokens[1])]
            assert 4 <= len(answer.tokens[1]) <= 6
            assert answer.tokens[2] == whole[2]
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_a_client_that_leaves_frees_everything(batches: int) -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            await cluster.ask(prompt_of(20), max_tokens=30, ignore_eos=True, leave_after=batches)
            await cluster.settle(1.0)

    run_virtual(scenario())


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08])
def test_a_client_that_leaves_before_its_first_token_frees_everything(delay_s: float) -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt_of(30), max_tokens=30, ignore_eos=True))
            await asyncio.sleep(delay_s)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await cluster.settle(1.0)

    run_virtual(scenario())


def test_more_requests_than_fit_are_served_one_after_the_other() -> None:
    async def scenario() -> None:
        prompts = [prompt_of(10 + i, seed=i) for i in range(24)]
        expected = await oracles(prompts, max_tokens=10, ignore_eos=True)
        async with Cluster(prefills=2, decodes=2, num_pages=16, max_running=4) as cluster:
            asked = [cluster.ask(p, max_tokens=10, ignore_eos=True) for p in prompts]
            answers = await asyncio.gather(*asked)
            assert [a.error for a in answers] == [None] * 24
            assert [a.tokens for a in answers] == expected
            assert {a.path for a in answers} == {"remote"}
            await cluster.settle()

    run_virtual(scenario())


def test_a_prompt_that_can_never_fit_is_the_clients_mistake() -> None:
    async def scenario() -> None:
        async with Cluster(num_pages=4) as cluster:
            answer = await cluster.ask(prompt_of(100))
            assert isinstance(answer.error, InvalidRequest)
            await cluster.settle()

    run_virtual(scenario())


def test_the_deadline_ends_a_request_and_frees_everything() -> None:
    async def scenario() -> None:
        async with Cluster(num_pages=256) as cluster:
            answer = await cluster.ask(prompt_of(10), max_tokens=500, ignore_eos=True, timeout_s=0.5)
            assert isinstance(answer.error, DeadlineExceeded)
            assert len(answer.tokens[0]) > 5
            await cluster.settle(1.0)

    run_virtual(scenario())


def test_a_prompt_may_take_longer_than_its_workers_had_to_say_yes() -> None:
    """What the gateway grants a worker for its answer is no deadline of the request."""

    async def scenario() -> None:
        async with Cluster(step_s=1.0) as cluster:
            answer = await cluster.ask(prompt_of(96))  # twelve steps of a second
            assert (answer.error, answer.path) == (None, "remote")
            await cluster.settle()

    run_virtual(scenario())
