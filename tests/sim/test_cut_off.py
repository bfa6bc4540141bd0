"""What a cut network keeps from a worker it learns as soon as it can; and a long silence that is no failure ends
nothing."""

import asyncio
from collections.abc import Iterable

import pytest

from shared.bus.memory import Envelope
from shared.protocol import subjects
from tests.sim.asking import STEP_S, asked, in_state, now, until, verb_of
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.virtual_time import run_virtual


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_cancel_that_is_never_heard_is_found_out_by_the_roll_call(role: str) -> None:
    def policy(envelope: Envelope) -> Iterable[float]:
        lost = (subjects.CANCEL, subjects.FAIL)
        return () if verb_of(envelope) in lost else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy, step_s=STEP_S, num_pages=400) as cluster:
            worker = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
            asking = asked(cluster, prompt_of(1000) if role == "prefill" else prompt_of(13))
            await until(in_state(worker, "computing" if role == "prefill" else "started"), 5.0)
            asking.cancel()
            await asyncio.wait({asking})
            await until(lambda: all(w.is_empty for w in cluster.workers), 3.0)
            assert worker.counters["cancels_missed"] == 1
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("lost", [subjects.CANCEL, subjects.ROLL_CALL])
def test_a_worker_that_is_cut_off_for_a_minute_learns_of_the_end_when_it_is_back(lost: str) -> None:
    """Longer than any notice is repeated eagerly. Its heartbeats arrive, and so do the gateway's: nobody seems gone.
    The cancel, which is repeated, and the roll call each do alone."""
    cut = False

    async def scenario() -> None:
        nonlocal cut

        async with Cluster(step_s=0.2, num_pages=400) as cluster:
            worker = cluster.decodes[0]

            def policy(envelope: Envelope) -> Iterable[float]:
                is_cut = cut and worker.name in (envelope.sender, envelope.receiver)
                is_lost = is_cut and verb_of(envelope) != subjects.HEARTBEAT
                return () if is_lost or verb_of(envelope) == lost else (0.0,)

            cluster.hub.policy = lambda envelope: tuple(policy(envelope))
            asking = asked(cluster, prompt_of(13), max_tokens=400, timeout_s=600.0)
            await until(in_state(worker, "started"), 5.0)
            cut = True
            asking.cancel()
            await asyncio.wait({asking})
            await asyncio.sleep(60.0)
            assert not worker.is_empty
            cut = False
            await until(lambda: all(w.is_empty for w in cluster.workers), 2.5)
            await cluster.settle()

    run_virtual(scenario())


def test_farewells_are_bounded_in_number_and_end_with_the_request() -> None:
    async def scenario() -> None:
        async with Cluster(num_pages=2048, max_running=64) as cluster:
            farewells = cluster.gateway.flow.farewells
            cluster.hub.policy = lambda e: () if verb_of(e) == subjects.CANCEL else (0.0,)
            for _ in range(20):
                asking = asked(cluster, prompt_of(13), timeout_s=30.0)
                await asyncio.sleep(0.1)
                asking.cancel()
                await asyncio.wait({asking})
            assert 20 <= len(farewells) <= 40
            await asyncio.sleep(35.0)
            assert len(farewells) == 0
            assert cluster.gateway.counters["cancels_unheard"] >= 20
            await cluster.settle()

    run_virtual(scenario())


def test_a_prompt_that_waits_long_behind_others_at_prefill_is_no_failure() -> None:
    """C40: no clock of one phase runs in another. P is busy for longer than any limit but the request's own, and
    the last prompt is the longest, so that none of the others waits for it."""

    async def scenario() -> None:
        async with Cluster(num_pages=1024, max_running=64, step_s=0.5) as cluster:
            ahead = [asked(cluster, prompt_of(240, seed=i), max_tokens=1, timeout_s=300.0) for i in range(12)]
            await asyncio.sleep(0.1)
            last = asked(cluster, prompt_of(248), max_tokens=3, timeout_s=300.0)
            began = now()
            answer = await last
            assert answer.error is None
            assert answer.timings["attempts"] == 1
            assert now() - began > 35.0, "commit_s and grant_s together"
            assert [(await task).error for task in ahead] == [None] * 12
            await cluster.settle()

    run_virtual(scenario())


def test_a_worker_that_loses_its_bus_for_a_moment_is_not_taken_for_dead() -> None:
    async def scenario() -> None:
        async with Cluster(step_s=0.02) as cluster:
            decode = cluster.decodes[0]
            asking = asked(cluster, prompt_of(13), max_tokens=60)
            await until(in_state(decode, "started"), 5.0)
            decode.bus.cut()
            await asyncio.sleep(0.06)
            decode.bus.mend()
            answer = await asking
            assert (answer.error, len(answer.tokens[0])) == (None, 60)
            await cluster.settle()

    run_virtual(scenario())
