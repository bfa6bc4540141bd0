"""Workers are lost after the first token: others go on, and the client gets what it would have got without the loss."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.generation import PathPolicy
from shared.protocol.messages import Reserve
from shared.runtime.errors import DeadlineExceeded, NoWorker, PeerLost
from shared.state.pages import PageAllocator
from tests.sim.asking import now, until
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.processes import Worker
from tests.sim.test_flows import oracle
from tests.sim.virtual_time import run_virtual

PROMPT = prompt_of(21)
GREEDY: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
SAMPLED: dict[str, Any] = GREEDY | {
    "temperature": 0.9,
    "seed": 5,
    "top_p": 0.9,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.3,
    "min_tokens": 3,
    "logprobs": 2,
}


def serving(cluster: Cluster) -> Worker:
    """The D that has the request."""
    return next(worker for worker in cluster.decodes if worker.alive and len(worker.desk))


def at_tokens(count: int, act: Callable[[], object]) -> Callable[[Answer], None]:
    """Acts once, when the client has so many tokens of its first choice."""
    done: list[object] = []

    def on_batch(answer: Answer) -> None:
        if len(answer.tokens[0]) >= count and not done:
            done.append(act())

    return on_batch


def orders_at(cluster: Cluster) -> list[Reserve]:
    return [ticket.order for worker in cluster.decodes for ticket in worker.desk.tickets]


@pytest.mark.parametrize("path", ["remote", "local"])
@pytest.mark.parametrize("after", [1, 2, 6, 11])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SAMPLED | {"n": 3}], ids=["greedy", "sampled", "three"])
def test_decode_dies_and_the_stream_goes_on(sampling: dict[str, Any], after: int, path: PathPolicy) -> None:
    async def scenario() -> None:
        async with Cluster(prefills=2, decodes=2) as cluster:
            lose = at_tokens(after, lambda: serving(cluster).kill_now())
            answer = await cluster.ask(PROMPT, path=path, strict=True, on_batch=lose, **sampling)
            assert (answer.error, answer.path) == (None, path)
            assert answer.tokens == await oracle(PROMPT, **sampling)
            assert set(answer.finishes) == {"length"}
            (recovery,) = answer.timings["recovery"]
            assert (recovery["cause"], recovery["path"]) == ("peer_lost", path)
            assert 0 < recovery["detected_s"] < recovery["resumed_s"] < answer.timings["total_s"]
            assert (answer.timings["recoveries"], answer.timings["attempts"]) == (1, 2)
            counters = cluster.gateway.counters
            names = ("recoveries", "recoveries_peer_lost", "recoveries_resumed", "recoveries_given_up")
            assert [counters[name] for name in names] == [1, 1, 1, 0]
            await cluster.settle()

    run_virtual(scenario())


def test_the_other_worker_is_told_what_the_client_has_and_which_choices_are_over() -> None:
    async def scenario() -> None:
        sampling = SAMPLED | {"n": 3}
        whole = await oracle(PROMPT, **sampling)
        orders: list[Reserve] = []
        async with Cluster(decodes=2) as cluster:

            def on_batch(answer: Answer) -> None:
                if len(answer.tokens[0]) >= 8 and not orders:
                    orders.append(orders_at(cluster)[0])
                    serving(cluster).kill_now()
                elif len(orders) == 1:
                    orders.append(orders_at(cluster)[0])

            answer = await cluster.ask(PROMPT, path="local", stop_after={1: 4}, on_batch=on_batch, **sampling)
            assert answer.error is None
            assert (answer.tokens[0], answer.tokens[2]) == (whole[0], whole[2])
            assert answer.tokens[1] == whole[1][:4]
            first, second = orders
            assert (first.history, first.finished) == ((), ())
            assert (second.prompt, second.sampling) == (first.prompt, first.sampling), "the seed is the same"
            assert [len(tokens) for tokens in second.history][1] == 4
            assert [tokens == tuple(w[: len(tokens)]) for tokens, w in zip(second.history, whole, strict=True)] == [
                True
            ] * 3
            assert second.finished == (1,)
            assert second.waited_s > first.waited_s
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("phase", ["reserved", "started", "streaming"])
def test_a_second_failure_in_a_recovery_is_another_recovery(phase: str) -> None:
    async def scenario() -> None:
        async with Cluster(decodes=3, step_s=0.05) as cluster:

            async def lose_the_next() -> None:
                living = [worker for worker in cluster.decodes if worker.alive]
                await until(lambda: any(w.desk.tickets.states() == {phase: 1} for w in living), 5.0)
                serving(cluster).kill_now()

            async with asyncio.TaskGroup() as losses:

                def lose() -> None:
                    serving(cluster).kill_now()
                    if phase != "streaming":
                        losses.create_task(lose_the_next())

                lose_again = at_tokens(8, lambda: phase == "streaming" and serving(cluster).kill_now())
                lose_first = at_tokens(5, lose)
                answer = await cluster.ask(PROMPT, on_batch=lambda a: (lose_first(a), lose_again(a))[0], **GREEDY)
            assert answer.error is None
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            first, second = answer.timings["recovery"]
            assert (first["resumed_s"] is None) == (phase != "streaming")
            assert second["resumed_s"] is not None
            await cluster.settle()

    run_virtual(scenario())


def test_failures_in_a_row_without_a_token_between_them_end_it_with_their_cause() -> None:
    async def scenario() -> None:
        async with Cluster(prefills=0, decodes=2) as cluster:

            def lose() -> None:
                for worker in cluster.decodes:
                    worker.engine.start_local = fail_at_once(worker)  # type: ignore[method-assign]
                    for ticket in worker.desk.tickets:
                        ticket.end("engine_error", "out of memory", by="decode")

            def fail_at_once(worker: Worker) -> Callable[..., None]:
                def start_local(*_: object) -> None:
                    for ticket in worker.desk.tickets:
                        ticket.end("engine_error", "out of memory", by="decode")

                return start_local

            answer = await cluster.ask(PROMPT, on_batch=at_tokens(5, lose), **GREEDY)
            assert answer.error is not None
            assert (answer.error.code, answer.finishes) == ("engine_error", [None])
            assert answer.tokens[0] == (await oracle(PROMPT, **GREEDY))[0][: len(answer.tokens[0])]
            assert (answer.timings["attempts"], answer.timings["recoveries"]) == (3, 2)
            assert cluster.gateway.counters["recoveries_given_up"] == 1
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_may_be_taken_up_so_many_times(most: int) -> None:
    """With a token after each loss it is never a failure in a row."""

    async def scenario() -> None:
        async with Cluster(prefills=0, decodes=2) as cluster:
            cluster.gateway.flow.settings = GatewayFlowSettings(max_recoveries=most)

            def lose_each_time(answer: Answer) -> None:
                for worker in cluster.decodes:
                    for ticket in worker.desk.tickets:
                        ticket.end("engine_error", "out of memory", by="decode")

            answer = await cluster.ask(PROMPT, on_batch=lose_each_time, **GREEDY)
            assert answer.error is not None
            assert (answer.error.code, answer.timings["recoveries"]) == ("engine_error", most)
            assert len(answer.tokens[0]) >= most + 1
            assert answer.tokens[0] == (await oracle(PROMPT, **GREEDY))[0][: len(answer.tokens[0])]
            await cluster.settle()

    run_virtual(scenario())


def test_the_only_decode_worker_is_waited_for() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:

            async def restart() -> None:
                (worker,) = cluster.decodes
                await asyncio.sleep(5.0)
                await cluster.restart(worker)

            async with asyncio.TaskGroup() as restarting:

                def lose() -> None:
                    serving(cluster).kill_now()
                    restarting.create_task(restart())

                answer = await cluster.ask(PROMPT, on_batch=at_tokens(5, lose), **GREEDY)
            assert answer.error is None
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            assert 5.0 < answer.timings["largest_gap_s"] < 6.5
            assert answer.timings["queue_s"] < 1.0, "that of the beginning"
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(("role", "recoveries"), [("decode", 2), ("prefill", 1)])
def test_nobody_is_left_to_take_it_up(role: str, recoveries: int) -> None:
    """It waits as long as others wait for room, and is told then; a strict request takes no detour meanwhile."""

    async def scenario() -> None:
        async with Cluster(decodes=2) as cluster:

            def lose() -> None:
                serving(cluster).kill_now()
                for worker in cluster.decodes if role == "decode" else cluster.prefills:
                    worker.kill_now()

            lost = at_tokens(5, lose)
            answer = await cluster.ask(PROMPT, path="remote", strict=True, timeout_s=300.0, on_batch=lost, **GREEDY)
            assert isinstance(answer.error, NoWorker)
            assert 30 < answer.timings["total_s"] < 32
            assert answer.timings["recoveries"] == recoveries, "of D it is asked for that the other one is dead, too"
            assert cluster.gateway.counters["recoveries_given_up"] == 1
            await cluster.settle()

    run_virtual(scenario())


def test_without_a_prefill_worker_an_answer_that_takes_any_path_goes_on_at_once() -> None:
    async def scenario() -> None:
        async with Cluster(decodes=2) as cluster:

            def lose() -> None:
                serving(cluster).kill_now()
                cluster.prefills[0].kill_now()

            answer = await cluster.ask(PROMPT, on_batch=at_tokens(5, lose), **GREEDY)
            assert (answer.error, answer.path) == (None, "local")
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            assert answer.timings["recovery"][-1]["path"] == "local"
            await cluster.settle()

    run_virtual(scenario())


def test_it_waits_for_room_and_before_everybody_else() -> None:
    async def scenario() -> None:
        fills: dict[str, Any] = {"path": "local", "max_tokens": 100, "ignore_eos": True}
        async with Cluster(prefills=0, decodes=2, max_running=1) as cluster:
            loop = asyncio.get_running_loop()
            others: list[asyncio.Task[Answer]] = []

            def lose() -> None:
                victim = next(w for w in cluster.decodes if any(t.order.prompt == PROMPT for t in w.desk.tickets))
                victim.kill_now()
                others.extend(loop.create_task(cluster.ask(prompt_of(9, seed=s), priority=-1)) for s in range(3))

            busy = loop.create_task(cluster.ask(prompt_of(20, seed=9), **fills))
            await until(lambda: any(len(worker.desk) for worker in cluster.decodes), 5.0)
            answer = await cluster.ask(PROMPT, on_batch=at_tokens(6, lose), **GREEDY)
            assert busy.done()
            assert not any(task.done() for task in others), "of a better priority, but nobody has anything of theirs"
            assert answer.error is None
            assert answer.tokens == await oracle(PROMPT, **GREEDY)
            assert [(await task).error for task in (busy, *others)] == [None] * 4
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("while_it", ["waits for a worker", "is asked about", "computes"])
def test_a_client_that_leaves_in_the_middle_of_a_recovery_frees_everything(while_it: str) -> None:
    async def scenario() -> None:
        decodes = 1 if while_it == "waits for a worker" else 2
        async with Cluster(decodes=decodes, step_s=0.05) as cluster:
            lose = at_tokens(5, lambda: serving(cluster).kill_now())
            asking = asyncio.get_running_loop().create_task(cluster.ask(PROMPT, on_batch=lose, **GREEDY))
            await until(lambda: cluster.gateway.counters["recoveries"] == 1, 5.0)
            if while_it == "computes":
                await until(lambda: any(w.alive and len(w.desk) for w in cluster.decodes), 5.0)
            else:
                await until(lambda: cluster.gateway.rooms.num_waiting == (decodes == 1), 5.0)
            asking.cancel()
            await asyncio.wait({asking})
            await cluster.settle(1.0)
            assert cluster.gateway.rooms.num_waiting == 0

    run_virtual(scenario())


def test_the_deadline_ends_a_recovery_too() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            began = now()
            lose = at_tokens(5, lambda: serving(cluster).kill_now())
            answer = await cluster.ask(PROMPT, timeout_s=3.0, on_batch=lose, **GREEDY)
            assert isinstance(answer.error, DeadlineExceeded)
            assert now() - began == pytest.approx(3.0, abs=0.05)
            assert cluster.gateway.counters["recoveries_given_up"] == 1
            await cluster.settle()

    run_virtual(scenario())


def test_who_has_all_its_tokens_needs_nobody_any_more() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            lose = at_tokens(14, lambda: [worker.kill_now() for worker in cluster.workers])
            answer = await cluster.ask(PROMPT, on_batch=lose, **GREEDY)
            assert answer.error is None
            assert answer.finishes == ["length"]
            assert answer.timings["recoveries"] == 0

    run_virtual(scenario())


def test_what_no_worker_can_hold_is_not_the_clients_mistake() -> None:
    """Its answer fits D, and the only other worker is too small to take it up."""

    async def scenario() -> None:
        async with Cluster(prefills=0, decodes=2) as cluster:

            def lose() -> None:
                victim = serving(cluster)
                (other,) = [worker for worker in cluster.decodes if worker is not victim]
                other.engine._capacity.pages = PageAllocator(3)
                victim.kill_now()

            answer = await cluster.ask(PROMPT, on_batch=at_tokens(5, lose), **GREEDY)
            assert isinstance(answer.error, PeerLost)

    run_virtual(scenario())
