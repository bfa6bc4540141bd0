"""A request that was cut off goes on on another D: what P and D do for a ticket that has a history, and what they tell.

The workers are the simulation's: real desks, flows, machines, engines and doors, on the in-memory bus and the fake
link. Their gateway is written here, so that it can say what it likes and sees all that is said.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from shared.bus.ask import ask
from shared.bus.listen import listen
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Fail,
    FinishReason,
    Prefill,
    Replay,
    ReplayReply,
    ReplayStatus,
    Reserve,
    RollCall,
    RollCallReply,
    SamplingSpec,
    TicketTimings,
    TokenEntry,
    Tokens,
    Verdict,
    WireModel,
)
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.processes import Process, Worker
from tests.sim.virtual_time import run_virtual
from tests.support_engine import undivided
from tests.support_resume import Cut, Seen

PENALTIES = SamplingSpec(
    seed=3, temperature=0.9, max_tokens=20, frequency_penalty=0.8, repetition_penalty=1.2, logprobs=2, ignore_eos=True
)
WITHIN_S = 20.0


@dataclass
class Heard:
    """What came about one room, in order."""

    entries: list[tuple[str, TokenEntry]] = field(default_factory=list)
    fails: list[Fail] = field(default_factory=list)
    timings: list[TicketTimings] = field(default_factory=list)

    @property
    def ended(self) -> set[int]:
        """Choices whose last token was heard."""
        return {entry.choice for _, entry in self.entries if entry.finish is not None}

    def given(self, sender: str, choices: int) -> list[list[Seen]]:
        """What `sender` has said of each choice; each index once and in order, and nothing behind the end."""
        given: list[list[Seen]] = [[] for _ in range(choices)]
        for entry in (entry for who, entry in self.entries if who == sender):
            assert not entry.logprobs or len(entry.logprobs) == len(entry.tokens)
            for k, token in enumerate(entry.tokens):
                mine, index = given[entry.choice], entry.index + k
                logprob = entry.logprobs[k] if entry.logprobs else None
                finish = entry.finish if k == len(entry.tokens) - 1 else None
                assert not mine or (mine[-1][0] == index - 1 and mine[-1][3] is None)
                mine.append((index, token, logprob, finish))
        return given


class Scribe(Process):
    """Stands in for a gateway: asks what it is told to ask, and writes down what it hears."""

    async def start(self) -> None:
        self.heard: dict[int, Heard] = {}
        self.numbers = count(1)
        for verb, kind, handle in (
            (subjects.TOKENS, Tokens, self._on_tokens),
            (subjects.FAIL, Fail, self._on_fail),
            (subjects.ROLL_CALL, RollCall, self._on_roll_call),
        ):
            await listen(self.bus, "gateway", self.peer, verb, kind, handle, self.counters)  # type: ignore[arg-type]

    async def _on_tokens(self, message: Tokens) -> Verdict:
        for entry in message.entries:
            self.heard[entry.room].entries.append((message.sender, entry))
        for room, timings in message.timings:
            self.heard[room].timings.append(timings)
        return Verdict(ok=True)

    async def _on_fail(self, notice: Fail) -> Verdict:
        self.heard[notice.room].fails.append(notice)
        return Verdict(ok=True)

    async def _on_roll_call(self, question: RollCall) -> RollCallReply:
        return RollCallReply(gone=tuple(room for room in question.rooms if room not in self.heard))

    async def say(self, worker: Worker, verb: str, message: WireModel) -> Verdict:
        where = subjects.subject(worker.role, worker.peer, verb)
        return await ask(self.bus, self.clock, where, message, Verdict, deadline=self.clock.now() + 5.0)

    async def replay(self, worker: Worker, room: int, *wanted: tuple[int, int]) -> ReplayReply:
        where = subjects.subject(worker.role, worker.peer, subjects.REPLAY)
        question = Replay(room=room, generation=1, wanted=wanted)
        return await ask(self.bus, self.clock, where, question, ReplayReply, deadline=self.clock.now() + 5.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.002)


@dataclass
class Stage:
    """Two D and a P, and their gateway."""

    cluster: Cluster
    scribe: Scribe

    @property
    def p(self) -> Worker:
        return self.cluster.prefills[0]

    def orders(
        self, d: Worker, cut: Cut, *, local: bool = False, computed: tuple[int, ...] | None = None, **more: Any
    ) -> tuple[Reserve, Prefill]:
        """computed: what P is told to compute, where that is to be something else than what belongs there."""
        past, room = cut.past, next(self.scribe.numbers)
        self.scribe.heard[room] = Heard()
        shared: dict[str, Any] = {"room": room, "generation": 1, "request_id": "req", "gateway": self.scribe.peer}
        shared |= {"identity": d.engine.identity, "sampling": cut.sampling, "remaining_s": 60.0}
        prefill = None if local else self.p.peer
        history: dict[str, Any] = {"history": past.outputs, "finished": past.finished} | more
        reserve = Reserve(prompt=cut.prompt, prefill=prefill, **shared, **history)
        prompt = computed or past.trunk(cut.prompt)
        return reserve, Prefill(prompt=prompt, decode=d.peer, resumed=any(cut.at), **shared)

    async def begin(self, d: Worker, cut: Cut, **more: Any) -> int:
        """The ticket's room; both workers have said yes."""
        reserve, prefill = self.orders(d, cut, **more)
        assert await self.scribe.say(d, subjects.RESERVE, reserve) == Verdict(ok=True)
        if reserve.prefill is not None:
            assert await self.scribe.say(self.p, subjects.PREFILL, prefill) == Verdict(ok=True)
        return reserve.room

    async def go_on(self, d: Worker, cut: Cut, **more: Any) -> Heard:
        """To the end, with nothing held by anybody after it."""
        room = await self.begin(d, cut, **more)
        heard, live = self.scribe.heard[room], cut.sampling.n - len(more.get("finished", cut.finished))
        await self.scribe.until(lambda: len(heard.ended) == live)
        await self.cluster.settle()
        assert heard.fails == []
        return heard

    async def cut(self, prompt: tuple[int, ...], sampling: SamplingSpec, *at: int, stopped: Iterable[int] = ()) -> Cut:
        """A request that ran undisturbed on the first D and will have been cut off there."""
        new = Cut(prompt, sampling, ((),) * sampling.n, (0,) * sampling.n)
        d = self.cluster.decodes[0]
        heard = await self.go_on(d, new, local=True, history=(), finished=())
        whole = heard.given(d.peer, sampling.n)
        assert [[token for _, token, *_ in seen] for seen in whole] == undivided(prompt, sampling)
        return Cut(prompt, sampling, tuple(map(tuple, whole)), at, frozenset(stopped))


def on_stage(scenario: Callable[[Stage], Coroutine[Any, Any, None]], **sizes: Any) -> None:
    async def run() -> None:
        async with Cluster(gateways=0, decodes=2, **sizes) as cluster:
            scribe = Scribe(cluster, "gateway", "scribe")
            await scribe.boot()
            try:
                await scenario(Stage(cluster, scribe))
            finally:
                await scribe.kill()
        assert cluster.task_failures == []

    run_virtual(run())


@pytest.mark.parametrize("overlap", ["chunks", "layers"])
@pytest.mark.parametrize("at", [1, 2, 6, 13, 19])
def test_one_choice_goes_on_from_the_state_of_all_but_its_last_token(at: int, overlap: str) -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, at)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut)
        assert heard.given(d.peer, 1) == cut.rest
        assert heard.given(stage.p.peer, 1) == [[]], "the client has had these"
        assert d.engine.stats.prompt_tokens_computed == 0
        assert stage.p.engine.stats.prompt_tokens_computed == 9 + at - 1
        [timings] = heard.timings
        assert timings.prefill_s > 0
        assert all(num_bytes for _, num_bytes in timings.bytes)

    on_stage(scenario, overlap=overlap)


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
def test_each_choice_goes_on_where_it_was(local: bool) -> None:
    """One after nine tokens, one that has none yet, one that its last token has ended, one that the client ended."""

    async def scenario(stage: Stage) -> None:
        sampling = PENALTIES.model_copy(update={"n": 4})
        cut = await stage.cut(prompt_of(13), sampling, 9, 0, 20, 4, stopped=[3])
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut, local=local)
        assert heard.given(d.peer, 4) == cut.rest
        assert [len(rest) for rest in cut.rest] == [11, 20, 0, 0]
        assert heard.given(stage.p.peer, 4) == [[]] * 4
        assert len(heard.timings) == 1

    on_stage(scenario)


@pytest.mark.parametrize("at", [1, 7])
def test_without_p_d_computes_what_was_given_out_as_well(at: int) -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, at)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut, local=True)
        assert heard.given(d.peer, 1) == cut.rest
        assert d.engine.stats.prompt_tokens_computed == 9 + at - 1
        [timings] = heard.timings
        assert timings.prefill_s > 0

    on_stage(scenario)


def test_ps_own_token_ends_nothing() -> None:
    """P draws without the penalties for what was given out. That its token would stop the text is nobody's concern."""

    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, 0)
        tokens = [token for _, token, *_ in cut.whole[0]]
        one = PENALTIES.model_copy(update={"max_tokens": 1})
        for at in range(2, 20):
            cut = replace(cut, at=(at,))
            [[drawn]] = undivided(cut.past.trunk(cut.prompt), one)
            if drawn not in tokens:
                break
        assert drawn not in tokens
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, replace(cut, sampling=PENALTIES.model_copy(update={"stop_token_ids": (drawn,)})))
        assert heard.given(d.peer, 1) == cut.rest
        assert all(num_bytes for _, num_bytes in heard.timings[0].bytes)

    on_stage(scenario)


def test_where_only_first_tokens_are_missing_ps_are_taken() -> None:
    """They end the request: D passes them on and lets everybody go."""

    async def scenario(stage: Stage) -> None:
        sampling = SamplingSpec(seed=4, n=3, max_tokens=1, logprobs=1)
        cut = await stage.cut(prompt_of(9), sampling, 1, 0, 0)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut)
        assert heard.given(d.peer, 3) == cut.rest
        assert {rest[0][3] for rest in cut.rest if rest} == {FinishReason.LENGTH}
        assert heard.given(stage.p.peer, 3) == [[]] * 3
        assert d.engine.stats.tokens_generated == 0

    on_stage(scenario)


def test_a_replay_begins_where_the_ticket_does() -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), 7, 20)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut)
        await stage.scribe.until(lambda: len(stage.scribe.heard[room].given(d.peer, 2)[0]) >= 4)

        async def ask_for(*wanted: tuple[int, int]) -> tuple[ReplayStatus, list[list[Seen]]]:
            reply = await stage.scribe.replay(d, room, *wanted)
            heard = Heard([(d.peer, entry) for entry in reply.entries])
            assert [(entry.choice, entry.index) for entry in reply.entries] == [
                (c, max(k, cut.at[c])) for c, k in wanted
            ]
            return reply.status, heard.given(d.peer, 2)

        status, (some, over) = await ask_for((0, 9), (1, 20))
        assert status is ReplayStatus.LIVE
        assert over == []
        assert some == cut.rest[0][2 : 2 + len(some)]
        assert 2 <= len(some) < len(cut.rest[0])
        assert (await ask_for((0, 0)))[1][0][:3] == cut.rest[0][:3], "what D never had is not made up"
        await stage.scribe.until(lambda: len(d.desk) == 0)
        status, (rest, over) = await ask_for((0, 7), (1, 20))
        assert (status, rest, over) == (ReplayStatus.ENDED, cut.rest[0], [])
        assert (await ask_for((0, 20)))[1][0] == []
        await stage.cluster.settle()

    on_stage(scenario)


def test_a_choice_that_the_client_ends_now_ends_alone() -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), 3, 6)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut)
        ends = Cancel(room=room, generation=1, reason="stop", choice=1)
        await stage.scribe.until(lambda: len(stage.scribe.heard[room].given(d.peer, 2)[1]) >= 2)
        assert await stage.scribe.say(d, subjects.CANCEL, ends) == Verdict(ok=True)
        await stage.scribe.until(lambda: stage.scribe.heard[room].ended == {0})
        first, second = stage.scribe.heard[room].given(d.peer, 2)
        assert first == cut.rest[0]
        assert second == cut.rest[1][: len(second)]
        assert len(second) < len(cut.rest[1])
        await stage.cluster.settle()

    on_stage(scenario)


@pytest.mark.parametrize(
    ("history", "finished", "message"),
    [
        ([(1, 2)], [], "2 choices, and 1 of them"),
        ([(1, 2)] * 100, [], "2 choices, and 100 of them"),
        ([], [1], "choice 1 is finished, and 0"),
        ([(1,), (2,)], [7], "choice 7 is finished"),
        ([(1,), (2,)], [1, 0, 1], "nothing is left"),
        ([(1,), (-5,)], [], "token ids"),
        ([(1,), (1 << 30,)], [1], "token ids"),
        ([(1,), (2,) * 21], [], "21 tokens already"),
        ([(1,), (2,) * 20], [], "finished by the tokens"),
    ],
)
def test_what_cannot_be_is_refused_and_holds_nothing(
    history: list[tuple[int, ...]], finished: list[int], message: str
) -> None:
    async def scenario(stage: Stage) -> None:
        d = stage.cluster.decodes[1]
        new = Cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), ((), ()), (0, 0))
        reserve, _ = stage.orders(d, new, history=history, finished=finished)
        verdict = await stage.scribe.say(d, subjects.RESERVE, reserve)
        assert (verdict.ok, verdict.code) == (False, "invalid_request")
        assert message in verdict.message
        await stage.cluster.settle()

    on_stage(scenario)


def test_state_of_another_length_is_not_taken_over() -> None:
    """P was told the prompt alone, and D waits for what was given out as well."""

    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, 6)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut, computed=cut.prompt)
        heard = stage.scribe.heard[room]
        await stage.scribe.until(lambda: bool(heard.fails))
        assert (heard.fails[0].code, heard.fails[0].message) == (
            "protocol_error",
            "the record speaks of 9 tokens, and 14 are handed over",
        )
        assert heard.given(d.peer, 1) == [[]]
        await stage.cluster.settle()

    on_stage(scenario)
