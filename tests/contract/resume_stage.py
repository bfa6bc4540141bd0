"""A P and two D on a stage, and a gateway that says what it is told to say and writes down what it hears.

The workers are the simulation's: real desks, flows, machines, engines and doors, on the in-memory bus and the fake
link.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from shared.bus.ask import ask
from shared.bus.listen import listen
from shared.protocol import subjects
from shared.protocol.messages import (
    Fail,
    Prefill,
    Replay,
    ReplayReply,
    Reserve,
    RollCall,
    RollCallReply,
    SamplingSpec,
    TicketTimings,
    TokenEntry,
    Tokens,
    Verdict,
)
from shared.protocol.wire import WireModel
from tests.sim.cluster import Cluster
from tests.sim.processes import Process, Worker
from tests.sim.virtual_time import run_virtual
from tests.support_engine import undivided
from tests.support_resume import Cut, Seen

WITHIN_S = 60.0


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
        self,
        d: Worker,
        cut: Cut,
        *,
        local: bool = False,
        computed: tuple[int, ...] | None = None,
        resumed: bool = True,
        **more: Any,
    ) -> tuple[Reserve, Prefill]:
        """computed, resumed: what P is told, where that is to be something else than what belongs there."""
        past, room = cut.past, next(self.scribe.numbers)
        self.scribe.heard[room] = Heard()
        shared: dict[str, Any] = {"room": room, "generation": 1, "request_id": "req", "gateway": self.scribe.peer}
        shared |= {"identity": d.engine.identity, "sampling": cut.sampling, "remaining_s": 60.0}
        prefill = None if local else self.p.peer
        history: dict[str, Any] = {"history": past.outputs, "finished": past.finished} | more
        reserve = Reserve(prompt=cut.prompt, prefill=prefill, **shared, **history)
        prompt = computed or past.trunk(cut.prompt)
        return reserve, Prefill(prompt=prompt, decode=d.peer, resumed=resumed and any(cut.at), **shared)

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
