"""Streams leave a worker that is told to end; and what the stores were thought to have, and have not, costs an attempt
and no more."""

import asyncio

import pytest

from tests.sim.asking import until
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.test_flows import oracle
from tests.sim.test_recovery import GREEDY, PROMPT, SAMPLED, at_tokens, serving
from tests.sim.virtual_time import run_virtual


@pytest.mark.parametrize("num_streams", [1, 6])
def test_all_streams_of_a_worker_that_is_to_end_go_on_elsewhere(num_streams: int) -> None:
    async def scenario() -> None:
        async with Cluster(prefills=1, decodes=2, num_pages=256, step_s=0.05) as cluster:
            prompts = [prompt_of(9 + k, k) for k in range(num_streams)]
            answers: list[Answer] = []

            async def ask(prompt: tuple[int, ...]) -> None:
                answers.append(await cluster.ask(prompt, **SAMPLED))

            async with asyncio.TaskGroup() as asking:
                for prompt in prompts:
                    asking.create_task(ask(prompt))
                busy = lambda: next((w for w in cluster.decodes if w.desk.tickets.states().get("started")), None)  # noqa: E731
                await until(lambda: busy() is not None, 10.0)
                leaving = busy()
                assert leaving is not None
                leaving.drain()
            moved = [loss for answer in answers for loss in answer.timings["recovery"]]
            assert {loss["cause"] for loss in moved} == {"draining"}
            assert [answer.error for answer in answers] == [None] * num_streams
            wholes = [await oracle(prompt, **SAMPLED) for prompt in prompts]
            assert sorted(answer.tokens for answer in answers) == sorted(wholes)
            assert cluster.gateway.counters["recoveries_given_up"] == 0
            await cluster.settle()
            assert leaving.is_empty

    run_virtual(scenario())


def test_where_there_is_no_other_worker_a_stream_stays_to_its_end() -> None:
    async def scenario() -> None:
        async with Cluster(decodes=1) as cluster:
            answer = await cluster.ask(PROMPT, on_batch=at_tokens(3, lambda: serving(cluster).drain()), **GREEDY)
            assert (answer.error, answer.timings["recoveries"]) == (None, 0)
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            await cluster.settle()

    run_virtual(scenario())


def test_what_the_stores_have_not_is_computed_by_a_prefill_worker() -> None:
    """The gateway was told that they have it all; the other decode worker has no store at all."""

    async def scenario() -> None:
        async with Cluster(decodes=2) as cluster:

            def lose() -> None:
                (box,) = cluster.gateway.inbox._boxes.values()
                box.stored = len(PROMPT)
                cluster.gateway.flow.rates.load_fixed_s = 0.0
                serving(cluster).kill_now()

            answer = await cluster.ask(PROMPT, on_batch=at_tokens(3, lose), **GREEDY)
            assert answer.error is None
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            (loss,) = answer.timings["recovery"]
            assert (loss["cause"], loss["path"]) == ("peer_lost", "remote")
            assert answer.timings["attempts"] == 3
            assert not cluster.gateway.rooms.breakers.report(cluster.gateway.clock.now())
            await cluster.settle()

    run_virtual(scenario())


def test_where_no_prefill_worker_is_left_that_the_client_insists_on_a_stream_stays() -> None:
    async def scenario() -> None:
        async with Cluster(prefills=1, decodes=2) as cluster:

            def drain() -> None:
                cluster.prefills[0].kill_now()
                cluster.gateway.registry.drop(cluster.prefills[0].peer)
                serving(cluster).drain()

            drained = at_tokens(3, drain)
            answer = await cluster.ask(PROMPT, path="remote", strict=True, on_batch=drained, **GREEDY)
            assert (answer.error, answer.timings["recoveries"]) == (None, 0)
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            await cluster.settle()

    run_virtual(scenario())
