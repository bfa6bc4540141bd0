"""A worker whose leg keeps failing is left alone, tried again with one request, and taken back when it works: nothing
marks a peer as failed for ever."""

import asyncio
from typing import Any

import pytest

from shared.bus.memory import Envelope
from shared.protocol.messages import Verdict
from shared.runtime.errors import EngineError, InvalidRequest, PeerLost
from shared.transfer.link import OwnSidecarLost
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.processes import Worker
from tests.sim.virtual_time import run_virtual

SAMPLING: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


def break_door(worker: Worker) -> list[int]:
    """Its sidecar refuses everything until something is put into the list; the second list counts the tries."""
    open_, tries = worker.link.open, [0]

    async def refuse(*args: Any) -> None:
        if tries[0] >= 0:
            tries[0] += 1
            raise PeerLost("the worker's own sidecar is down")
        await open_(*args)

    worker.link.open = refuse  # type: ignore[method-assign]
    return tries


def health(cluster: Cluster) -> dict[tuple[str, str], str]:
    now = asyncio.get_running_loop().time()
    return {key: str(value) for key, value in cluster.gateway.rooms.breakers.report(now).items()}


def test_a_broken_decode_worker_is_left_alone_and_taken_back() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), Cluster(decodes=2, num_pages=256) as cluster:
            broken, good = cluster.decodes
            tries = break_door(broken)
            # One that works is busier, so that the broken one would always be chosen.
            load = [cluster.ask(prompt_of(60), max_tokens=180, ignore_eos=True, path="local") for _ in range(2)]
            broken.desk.draining = True
            busy = [asyncio.get_running_loop().create_task(work) for work in load]
            while good.desk.tickets.states() != {"started": 2}:
                await asyncio.sleep(0.01)
            broken.desk.draining = False
            await asyncio.sleep(0.6)
            attempts = []
            for number in range(12):
                answer = await cluster.ask(prompt_of(9, seed=number), **SAMPLING)
                assert answer.error is None
                attempts.append(answer.timings["attempts"])
            assert attempts[:3] == [2, 2, 2], "each of the first finds out by itself"
            assert set(attempts[3:]) <= {1, 2}
            assert tries[0] <= 3 + 2, "afterwards only probes go there"
            assert health(cluster) == {(broken.peer, "decode"): "open"}
            tries[0] = -1
            await asyncio.sleep(5.0)
            assert health(cluster) == {(broken.peer, "decode"): "half_open"}
            granted = broken.counters["tickets_granted"]
            for number in range(4):
                assert (await cluster.ask(prompt_of(9, seed=number), **SAMPLING)).timings["attempts"] == 1
            assert broken.counters["tickets_granted"] >= granted + 1
            assert health(cluster) == {}
            assert [(await task).error for task in busy] == [None, None]
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("end", ["decode", "prefill"])
def test_sidecars_that_cannot_reach_each_other_cost_no_request(end: str) -> None:
    """Both ends are blamed, as nobody can tell which is cut off; the healthy one is cleared by its other requests."""

    async def scenario() -> None:
        async with asyncio.timeout(120), Cluster(prefills=2, decodes=2, num_pages=256) as cluster:
            bad = (cluster.decodes if end == "decode" else cluster.prefills)[0]
            whole = bad.link.send
            if end == "decode":
                cluster.network.links.pop(bad.link._boot_id)
            else:

                async def unreachable(*_: Any) -> None:
                    raise PeerLost("no sidecar answers")

                bad.link.send = unreachable  # type: ignore[method-assign]
            for number in range(12):
                answer = await cluster.ask(prompt_of(9, seed=number), **SAMPLING)
                assert answer.error is None, number
            assert health(cluster).get((bad.peer, end)) in ("open", "half_open")
            cluster.network.links[bad.link._boot_id] = bad.link
            bad.link.send = whole  # type: ignore[method-assign]
            await cluster.settle()

    run_virtual(scenario())


def test_a_worker_whose_own_sidecar_is_gone_is_blamed_alone() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), Cluster(prefills=2, decodes=2) as cluster:
            bad = cluster.prefills[0]

            async def gone(*_: Any) -> None:
                raise OwnSidecarLost("the worker's own sidecar is gone")

            bad.link.send = gone  # type: ignore[method-assign]
            for number in range(6):
                assert (await cluster.ask(prompt_of(9, seed=number), **SAMPLING)).error is None
            assert set(cluster.gateway.rooms.breakers._breakers) == {(bad.peer, "prefill")}
            await cluster.settle()

    run_virtual(scenario())


def test_a_broken_prefill_worker_is_left_alone() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), Cluster(prefills=2) as cluster:
            broken = cluster.prefills[0]

            def refuse(*_: Any, **__: Any) -> None:
                raise EngineError("out of order")

            broken.engine.reserve = refuse  # type: ignore[method-assign]
            answers = []
            for number in range(8):
                answers.append(await cluster.ask(prompt_of(9, seed=number), **SAMPLING))
                await asyncio.sleep(0.6)  # until it has reported again, its no is remembered anyway
            assert [a.error for a in answers] == [None] * 8
            assert [a.timings["attempts"] for a in answers[:3]] == [2, 2, 2]
            assert sum(a.timings["attempts"] for a in answers[3:]) <= 5 + 2, "but for probes"
            assert list(health(cluster)) == [(broken.peer, "prefill")]
            await cluster.settle()

    run_virtual(scenario())


def test_prefill_is_taken_back_by_requests_that_need_no_decode_worker() -> None:
    """With one token there is no hand-over; D is not proven by it."""

    async def scenario() -> None:
        async with asyncio.timeout(60), Cluster() as cluster:
            now = asyncio.get_running_loop().time()
            for leg in cluster.prefills[0].peer, cluster.decodes[0].peer:
                for _ in range(3):
                    role = leg.split("-")[0]
                    cluster.gateway.rooms.breakers.failed((leg, role), now, began_at=now)
            cluster.hub.policy = lambda e: () if "tokens" in e.subject and e.sender == "decode-0" else (0.0,)
            assert (await cluster.ask(prompt_of(9), max_tokens=1)).error is None
            assert list(health(cluster)) == [(cluster.decodes[0].peer, "decode")]
            await cluster.settle()

    run_virtual(scenario())


def test_the_only_worker_is_used_whatever_happened_to_it() -> None:
    """Refusing everybody would help nobody: it is asked, and the first success closes its breaker."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            tries = break_door(cluster.decodes[0])
            for _ in range(4):
                assert isinstance((await cluster.ask(prompt_of(9), **SAMPLING)).error, PeerLost)
            assert health(cluster) == {(cluster.decodes[0].peer, "decode"): "open"}
            tries[0] = -1
            assert (await cluster.ask(prompt_of(9), **SAMPLING)).error is None
            assert health(cluster) == {}
            await cluster.settle()

    run_virtual(scenario())


def test_a_leg_is_judged_alone() -> None:
    """Its transfers fail; prompts that D computes itself still go there, and P is not to blame."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            break_door(cluster.decodes[0])
            for _ in range(2):
                await cluster.ask(prompt_of(9), **SAMPLING)
            assert list(health(cluster)) == [(cluster.decodes[0].peer, "decode")]
            local = await cluster.ask(prompt_of(9), path="local", **SAMPLING)
            assert (local.error, local.timings["attempts"]) == (None, 1)
            await cluster.settle()

    run_virtual(scenario())


def test_a_restart_starts_with_a_closed_breaker() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            break_door(cluster.decodes[0])
            for _ in range(4):
                await cluster.ask(prompt_of(9), **SAMPLING)
            assert health(cluster) != {}
            old = cluster.decodes[0].peer
            await cluster.restart(cluster.decodes[0])
            async with asyncio.timeout(5):
                while not any(w.peer != old for w in cluster.gateway.registry.ready("decode")):
                    await asyncio.sleep(0.01)
            assert health(cluster) == {}
            assert len(cluster.gateway.rooms.breakers) == 0
            assert (await cluster.ask(prompt_of(9), **SAMPLING)).error is None
            await cluster.settle()

    run_virtual(scenario())


def test_who_only_passes_on_why_a_ticket_has_ended_is_not_to_blame() -> None:
    """D's notice reaches P before the prompt does, and its notice to the gateway is lost: P's no is all there is."""

    async def scenario() -> None:
        num_lost = 0

        def policy(envelope: Envelope) -> tuple[float, ...]:
            nonlocal num_lost
            if envelope.kind == "request" and ".gateway." in envelope.subject and envelope.subject.endswith(".fail"):
                num_lost += 1
                return () if num_lost == 1 else (0.0,)
            return (0.2,) if envelope.kind == "request" and envelope.subject.endswith(".prefill") else (0.0,)

        async with Cluster(policy=policy) as cluster:
            break_door(cluster.decodes[0])
            assert isinstance((await cluster.ask(prompt_of(9), **SAMPLING)).error, PeerLost)
            assert num_lost > 1
            assert len(cluster.gateway.rooms.breakers) == 1
            cluster.gateway.rooms.breakers.forget(cluster.decodes[0].peer)
            assert len(cluster.gateway.rooms.breakers) == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["mistake", "cancel", "refusal", "deadline"])
def test_what_is_not_the_workers_fault_never_counts(what: str) -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            for number in range(8):
                if what == "mistake":
                    answer = await cluster.ask(prompt_of(2000), **SAMPLING)
                    assert isinstance(answer.error, InvalidRequest)
                elif what == "cancel":
                    await cluster.ask(prompt_of(30), max_tokens=50, ignore_eos=True, leave_after=1 + number % 3)
                elif what == "refusal":
                    cluster.decodes[0].desk.draining = True
                    answer = await cluster.ask(prompt_of(9), timeout_s=2.0, **SAMPLING)
                    assert answer.error is not None
                else:
                    answer = await cluster.ask(prompt_of(30), max_tokens=190, ignore_eos=True, timeout_s=0.5)
                    assert answer.error is not None
            assert len(cluster.gateway.rooms.breakers) == 0
            await cluster.settle()

    run_virtual(scenario())


def test_a_refusal_with_an_error_of_its_own_counts_against_who_said_it() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            prefill = cluster.prefills[0]
            prefill.desk.admit = lambda *_, **__: Verdict(ok=False, code="engine_error", message="broken")  # type: ignore[method-assign]
            assert isinstance((await cluster.ask(prompt_of(9), **SAMPLING)).error, EngineError)
            assert list(health(cluster)) == [(prefill.peer, "prefill")]
            await cluster.settle()

    run_virtual(scenario())


def test_an_outage_of_the_bus_is_no_workers_fault() -> None:
    """Nobody can answer meanwhile; and afterwards all of them are used as before."""

    async def scenario() -> None:
        async with Cluster(prefills=2, decodes=2) as cluster:
            loop = asyncio.get_running_loop()
            for process in cluster.processes:
                process.bus.cut()
            tasks = [loop.create_task(cluster.ask(prompt_of(9, seed=k), timeout_s=120.0, **SAMPLING)) for k in range(8)]
            await asyncio.sleep(30.0)
            for process in cluster.processes:
                process.bus.mend()
            assert [(await task).error for task in tasks] == [None] * 8
            assert (len(cluster.gateway.rooms.breakers), cluster.gateway.rooms.breakers.num_opened) == (0, 0)
            await cluster.settle()

    run_virtual(scenario())


def test_a_clients_mistake_is_no_reason_to_ask_the_worker_no_more() -> None:
    """A worker that says no for want of room is not asked again before its next report; here that would be wrong."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(1.0)
            took_s = []
            for length in (9, 2000, 9):
                begun_at = loop.time()
                await cluster.ask(prompt_of(length), **SAMPLING)
                took_s.append(loop.time() - begun_at)
                await asyncio.sleep(1.2 if length == 9 else 0.0)
            assert took_s[2] == pytest.approx(took_s[0], abs=0.001)
            await cluster.settle()

    run_virtual(scenario())
