"""A failed leg ends the other one and reaches the client within 200 ms of virtual time, in every direction, and it is
the first cause that arrives."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from shared.bus.memory import Envelope
from shared.protocol import subjects
from shared.protocol.messages import Commit, CommitStatus, Fail, Tokens, Verdict
from shared.runtime.errors import Corrupt, EngineError, PeerLost
from shared.transfer.fake import Mishap
from tests.sim.asking import SOON_S, STEP_S, asked, in_state, intercept, only_once, until, verb_of
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.virtual_time import run_virtual


@pytest.mark.parametrize("phase", ["waiting", "computing", "committing"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_prefill_fails_and_decode_and_client_know_at_once(phase: str, how: str) -> None:
    def policy(envelope: Envelope) -> Iterable[float]:
        held = {"waiting": subjects.DESTINATION, "committing": subjects.COMMIT}
        return () if envelope.kind == "request" and verb_of(envelope) == held.get(phase) else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy, step_s=STEP_S) as cluster:
            only_once(cluster)
            prefill, decode = cluster.prefills[0], cluster.decodes[0]
            asking = asked(cluster)
            await until(in_state(prefill, phase), 5.0)
            if how == "dies":
                prefill.kill_now()
            else:
                for ticket in prefill.desk.tickets:
                    ticket.end("engine_error", "out of memory", by="prefill")
            took = await until(lambda: decode.is_empty, SOON_S)
            await until(asking.done, SOON_S - took)
            error = (await asking).error
            if how == "dies":
                assert isinstance(error, PeerLost)
            elif phase == "committing":  # all was sent: whether it goes on is for D to say, and D was told by P
                assert isinstance(error, EngineError)
            else:
                assert isinstance(error, EngineError)
                assert "out of memory" in error.message
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("phase", ["reserved", "filling", "started"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_decode_fails_and_prefill_and_client_know_at_once(phase: str, how: str) -> None:
    async def scenario() -> None:
        async with Cluster(step_s=STEP_S) as cluster:
            only_once(cluster)
            prefill, decode = cluster.prefills[0], cluster.decodes[0]
            asking = asked(cluster)
            await until(in_state(decode, phase), 5.0)
            if how == "dies":
                decode.kill_now()
            else:
                for ticket in decode.desk.tickets:
                    ticket.end("engine_error", "out of memory", by="decode")
            await until(lambda: prefill.is_empty and asking.done(), SOON_S)
            assert isinstance((await asking).error, PeerLost if how == "dies" else EngineError)
            await cluster.settle()

    run_virtual(scenario())


def test_prefill_dies_between_token_0_and_the_commit() -> None:
    """The client has a token already; what comes next must not wait for a heartbeat to be missed."""

    def policy(envelope: Envelope) -> Iterable[float]:
        return () if verb_of(envelope) == subjects.COMMIT else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy) as cluster:
            only_once(cluster)
            prefill = cluster.prefills[0]
            asking = asked(cluster, prompt_of(13))
            await until(in_state(prefill, "committing"), 5.0)
            prefill.kill_now()
            await until(asking.done, SOON_S)
            answer = await asking
            assert isinstance(answer.error, PeerLost)
            assert "prefill" in answer.error.message
            await cluster.settle(SOON_S)

    run_virtual(scenario())


def test_once_decode_has_taken_over_prefill_may_die() -> None:
    async def scenario() -> None:
        async with Cluster(step_s=0.02) as cluster:
            asking = asked(cluster, prompt_of(13))
            await until(in_state(cluster.decodes[0], "started"), 5.0)
            await asyncio.sleep(0.1)
            cluster.prefills[0].kill_now()
            answer = await asking
            assert (answer.error, len(answer.tokens[0])) == (None, 200)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_leg_says_no_while_the_other_takes_its_time(role: str) -> None:
    """C38: nobody waits for the slow leg, and what it is asked for too late never begins."""
    slow = subjects.RESERVE if role == "prefill" else subjects.PREFILL

    def policy(envelope: Envelope) -> Iterable[float]:
        return (3.0,) if verb_of(envelope) == slow and envelope.kind == "request" else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy) as cluster:
            only_once(cluster)
            refuser = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
            other = (cluster.decodes if role == "prefill" else cluster.prefills)[0]
            refuser.desk.admit = lambda *_, **__: Verdict(ok=False, code="engine_error", message="broken")  # type: ignore[method-assign]
            asking = asked(cluster)
            await until(asking.done, SOON_S)
            error = (await asking).error
            assert isinstance(error, EngineError)
            assert refuser.peer in error.message
            await asyncio.sleep(5.0)
            assert other.is_empty
            assert other.counters["tickets_granted"] == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_one_leg_gave_up_before_the_other_heard_of_it_never_begins(role: str) -> None:
    """The gateway's own words to the slow leg come late, and its cancel never."""
    order = subjects.RESERVE if role == "decode" else subjects.PREFILL

    def policy(envelope: Envelope) -> Iterable[float]:
        if verb_of(envelope) in (subjects.CANCEL, subjects.ROLL_CALL):
            return ()
        return (3.0,) if verb_of(envelope) == order and envelope.kind == "request" else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy) as cluster:
            only_once(cluster)
            slow = (cluster.decodes if role == "decode" else cluster.prefills)[0]
            other = (cluster.prefills if role == "decode" else cluster.decodes)[0]
            asking = asked(cluster)
            await until(lambda: len(other.desk) == 1, 1.0)
            for ticket in other.desk.tickets:
                ticket.end("engine_error", "out of memory", by=other.role)
            await until(asking.done, SOON_S)
            assert isinstance((await asking).error, EngineError)
            await asyncio.sleep(5.0)
            assert slow.counters["tickets_granted"] == 0
            await cluster.settle()

    run_virtual(scenario())


def test_decode_refuses_what_prefill_has_finished() -> None:
    """C6: P's pages are free a round trip after D's no."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            only_once(cluster)
            prefill = cluster.prefills[0]
            cluster.network.policy = lambda key, pieces: Mishap(corrupt=True)
            asking = asked(cluster, prompt_of(13))
            await until(lambda: not prefill.is_empty, 1.0)
            await until(asking.done, 1.0)
            await until(lambda: prefill.is_empty, 0.01)
            assert isinstance((await asking).error, Corrupt)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("order", ["fail first", "commit first"])
def test_an_end_is_never_overwritten(order: str) -> None:
    """C28: an error and then an ok for one ticket, and the other way round."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            only_once(cluster)
            worker = cluster.decodes[0]
            held: list[Commit] = []
            on_commit = worker.desk.on_commit  # type: ignore[union-attr]

            async def hold(record: Commit) -> Any:
                held.append(record)
                return await on_commit(record) if order == "commit first" else await asyncio.sleep(60)

            cluster.hub.policy = lambda e: () if verb_of(e) == subjects.COMMIT and e.kind == "reply" else (0.0,)
            intercept(cluster, subjects.COMMIT, Commit, hold)
            asking = asked(cluster, prompt_of(13), max_tokens=40)
            await until(lambda: bool(held), 5.0)
            record = held[0]
            fail = Fail(
                room=record.room,
                generation=record.generation,
                sender="p",
                code="engine_error",
                message="",
                by="prefill",
            )
            await worker.desk.on_fail(fail)
            reply = await on_commit(record)
            answer = await asking
            if order == "fail first":
                assert reply.status in (CommitStatus.FAILED, CommitStatus.DEAD)
                assert isinstance(answer.error, EngineError)
                assert worker.engine.stats.tokens_generated == 0
            else:
                assert reply.status is CommitStatus.COMMITTED
                assert (answer.error, len(answer.tokens[0])) == (None, 40)
            await cluster.settle(65.0)

    run_virtual(scenario())


def test_the_first_cause_reaches_the_client_though_every_notice_of_it_is_lost() -> None:
    """C39: D keeps why it ended, and says so when it is asked for tokens."""

    def policy(envelope: Envelope) -> Iterable[float]:
        return () if verb_of(envelope) == subjects.FAIL else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy) as cluster:
            only_once(cluster)
            decode = cluster.decodes[0]
            asking = asked(cluster, prompt_of(13))
            await until(in_state(decode, "started"), 5.0)
            await asyncio.sleep(0.3)
            for ticket in decode.desk.tickets:
                ticket.end("engine_error", "out of memory", by="decode")
            answer = await asking
            assert isinstance(answer.error, EngineError)
            assert "out of memory" in answer.error.message
            assert 10 < len(answer.tokens[0]) < 200
            assert answer.finishes == [None]
            await cluster.settle()

    run_virtual(scenario())


def test_token_0_and_the_failure_arrive_together() -> None:
    """The client gets every token once: that one, and the others from the second attempt."""

    async def scenario() -> None:
        async with Cluster(prefills=2, decodes=2) as cluster:
            deliver = cluster.gateway.inbox.on_tokens
            once: list[int] = []

            async def with_failure(message: Tokens) -> Verdict:
                answer = await deliver(message)
                for entry in message.entries:
                    if not once:
                        once.append(entry.room)
                        fail = Fail(
                            room=entry.room, generation=1, sender="d", code="peer_lost", message="", by="decode"
                        )
                        await cluster.gateway.inbox.on_fail(fail)
                return answer

            intercept(cluster, subjects.TOKENS, Tokens, with_failure)
            answer = await cluster.ask(prompt_of(13), max_tokens=20, ignore_eos=True)
            assert (answer.error, len(answer.tokens[0])) == (None, 20)
            assert answer.timings["attempts"] == 2
            await cluster.settle()

    run_virtual(scenario())


def test_who_reports_a_failure_is_not_who_is_blamed() -> None:
    """P fails, and only D's word of it reaches the gateway."""

    def policy(envelope: Envelope) -> Iterable[float]:
        is_own = verb_of(envelope) == subjects.FAIL and envelope.sender.startswith("prefill")
        return () if is_own and envelope.receiver == "gateway-0" else (0.0,)

    async def scenario() -> None:
        async with Cluster(policy=policy, step_s=STEP_S) as cluster:
            only_once(cluster)
            prefill = cluster.prefills[0]
            asking = asked(cluster)
            await until(in_state(prefill, "computing"), 5.0)
            for ticket in prefill.desk.tickets:
                ticket.end("engine_error", "out of memory", by="prefill")
            assert isinstance((await asking).error, EngineError)
            assert list(cluster.gateway.rooms.breakers._breakers) == [(prefill.peer, "prefill")]
            await cluster.settle()

    run_virtual(scenario())
