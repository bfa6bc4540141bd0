"""The resumable streams of this gateway, and how one comes from another gateway or goes there.

A stream has one owner: the gateway whose name is in its state. Who is asked for a stream that another one owns asks
that one to let go, and then writes its own name; where the owner does not answer, the write alone decides, because it
fails for one of two who write.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.api.plan import Plan
from services.gateway.streams.journal import TOUCHES, Journal, Page
from services.gateway.streams.ledger import Ledger
from services.gateway.streams.live import LiveStream, ResumableGenerator
from services.gateway.streams.reader import Reader
from services.gateway.streams.records import plan_of, request_of, tape_of
from services.gateway.streams.tape import Tape
from shared.bus.ask import ask
from shared.bus.listen import listen
from shared.protocol import subjects
from shared.protocol.messages import Verdict
from shared.protocol.stream_messages import HandOver, StreamRequest
from shared.runtime.deps import Deps
from shared.runtime.errors import (
    DeadlineExceeded,
    JournalUnavailable,
    PeerLost,
    ProtocolError,
    QueueFull,
    ShuttingDown,
    StreamMoved,
    StreamNotFound,
)
from shared.runtime.ids import new_stream_id
from shared.text.tokenizer import TextModel

_LET_GO_S = 2.0
"""An owner that does not answer within this is not waited for."""
_CLAIMS = 5
_SWEEPS = 8
"""In a grace period."""
_LONGEST_SWEEP_S = 0.5
_DETACHED_SHARE = 16
"""So many of the streams that may be in hand go on unread; of more, those that were left first end."""
_LEAST_DETACHED = 16

Check = Callable[[Sequence[int]], None]
"""Raises where a client cannot have got what it says it has, given how many tokens of each choice there are."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stream that was asked for. attach: a connection reads it from there on."""

    id: str
    request: StreamRequest
    plan: Plan
    tape: Tape
    attach: Callable[[Sequence[int]], Reader]


class Streams:
    """grace_s: how long a stream goes on, or can still be read, when nobody reads it. capacity: streams at a time."""

    def __init__(
        self,
        deps: Deps,
        journal: Journal,
        generator: ResumableGenerator,
        text: TextModel,
        grace_s: float,
        capacity: int,
    ) -> None:
        self._deps = deps
        self._journal = journal
        self._generator = generator
        self._text = text
        self._grace_s = grace_s
        self._capacity = capacity
        self._most_detached = max(_LEAST_DETACHED, capacity // _DETACHED_SHARE)
        self._live: dict[str, LiveStream] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._removals: list[tuple[float, str, tuple[str, ...]]] = []
        self._stopped = False

    async def start(self) -> None:
        deps = self._deps
        await listen(deps.bus, "gateway", deps.peer, subjects.HAND_OVER, HandOver, self._on_hand_over, deps.counters)
        deps.spawn_vital(self._sweep(), "stream-sweep")

    def count_resumed(self) -> None:
        self._deps.counters.add("streams_resumed")

    async def stop(self) -> None:
        """Ends those that are still served here; another gateway may take them up."""
        self._stopped = True
        live, self._live = list(self._live.values()), {}
        await asyncio.gather(*(stream.let_go(StreamMoved("this gateway is shutting down")) for stream in live))

    @property
    def num_detached(self) -> int:
        """Those that are computed and nobody reads."""
        return sum(stream.detached_at is not None and not stream.tape.ended for stream in self._live.values())

    async def open(self, plan: Plan, key: str, created: int) -> Found:
        """A new stream. NotResumable where there is no journal."""
        if len(self._live) >= self._capacity:
            raise QueueFull(f"{len(self._live)} resumable streams are in hand", retry_after_s=1.0)
        request, tape = request_of(plan, key, created), Tape.empty(len(plan.requests), plan.n)
        ledger = self._ledger(new_stream_id(), tape, plan)
        await ledger.begin(request)
        self._deps.counters.add("streams_opened")
        return self._serve(ledger, request, plan)

    async def find(self, stream: str, key: str, check: Check) -> Found:
        """A stream that a client asks for again. StreamNotFound where there is none that this key may read."""
        lock = self._asking.setdefault(stream, asyncio.Lock())
        try:
            async with lock:  # one question to the journal is enough for many who ask
                return await self._look_up(stream, key, check)
        finally:
            if not lock.locked():
                self._asking.pop(stream, None)

    async def _look_up(self, stream: str, key: str, check: Check) -> Found:
        """Here, or in the journal: it is over, or another gateway has it, or had it and is gone."""
        for _ in range(_CLAIMS):
            live = self._live.get(stream)
            if live is not None and not live.lost:
                _check_key(live.request, key)
                check(live.tape.said())
                return _as_found(live)
            request, page, tape = await self._read(stream, key)
            check(tape.said())
            if page.state.owner != self._deps.peer and not page.state.ended:
                await self._ask_to_let_go(stream, page.state.owner)
                request, page, tape = await self._read(stream, key)
            plan = plan_of(request, page.state.remaining_s, self._grace_s)
            if page.state.ended:
                return _finished(stream, request, plan, tape)
            try:
                return await self._take_up(stream, request, plan, tape, page)
            except StreamMoved:
                continue  # somebody else was sooner, or the owner has written once more
        raise JournalUnavailable("several gateways are asked for this stream at the same time")

    async def _read(self, stream: str, key: str) -> tuple[StreamRequest, Page, Tape]:
        page = await self._journal.read(stream)
        if page is None:
            raise StreamNotFound
        request = await self._journal.request(stream)
        _check_key(request, key)
        parts = await self._journal.parts(stream, page.state.parts)
        try:
            return request, page, tape_of(page.state, parts, request.n)
        except ValueError as error:
            raise JournalUnavailable(f"the stream's state cannot be read: {error}") from error

    async def _ask_to_let_go(self, stream: str, owner: str) -> None:
        """An owner that does not answer is as good as gone: if it is not, it loses the stream at its next write."""
        deps, order = self._deps, HandOver(stream=stream, gateway=self._deps.peer)
        where = subjects.subject("gateway", owner, subjects.HAND_OVER)
        with contextlib.suppress(PeerLost, DeadlineExceeded, ProtocolError):
            await ask(deps.bus, deps.clock, where, order, Verdict, deadline=deps.clock.now() + _LET_GO_S)

    async def _take_up(self, stream: str, request: StreamRequest, plan: Plan, tape: Tape, page: Page) -> Found:
        ledger = self._ledger(stream, tape, plan)
        await ledger.claim(page)
        self._deps.counters.add("streams_taken_up")
        return self._serve(ledger, request, plan)

    def _ledger(self, stream: str, tape: Tape, plan: Plan) -> Ledger:
        deadline = self._deps.clock.now() + plan.requests[0].timeout_s
        return Ledger(stream, self._journal, tape, plan.n, self._deps.peer, self._deps.clock, deadline)

    def _serve(self, ledger: Ledger, request: StreamRequest, plan: Plan) -> Found:
        if self._stopped:
            raise ShuttingDown("this gateway is shutting down")
        touch_s = self._grace_s / TOUCHES
        live = LiveStream(self._deps, ledger, request, plan, self._generator, self._text, touch_s)
        self._live[live.id] = live
        live.start()
        return _as_found(live)

    async def _on_hand_over(self, order: HandOver) -> Verdict:
        live = self._live.pop(order.stream, None)
        if live is not None:
            self._deps.counters.add("streams_handed_over")
            await live.let_go(StreamMoved())
        return Verdict(ok=True)

    async def _sweep(self) -> None:
        """By time and not by traffic."""
        while True:
            await self._deps.clock.sleep(min(_LONGEST_SWEEP_S, self._grace_s / _SWEEPS))
            now = self._deps.clock.now()
            unread = sorted((at, live.id) for live in self._live.values() if (at := live.detached_at) is not None)
            ended = [id for _, id in unread if self._live[id].tape.ended]
            going = [(at, id) for at, id in unread if not self._live[id].tape.ended]
            surplus = len(going) - self._most_detached
            expired = [id for number, (at, id) in enumerate(going) if number < surplus or now - at >= self._grace_s]
            for id in ended:
                self._forget(self._live[id])
            await asyncio.gather(*(self._expire(self._live[id]) for id in expired))
            due = [removal for removal in self._removals if removal[0] <= now]
            self._removals = self._removals[len(due) :]
            for _, stream, parts in due:
                self._remove(stream, parts, None)

    def _forget(self, live: LiveStream) -> None:
        """It has ended, and is read out of the journal until that forgets it too."""
        del self._live[live.id]
        if not live.lost:
            until = self._deps.clock.now() + self._grace_s * (1 + 1 / TOUCHES)
            self._removals.append((until, live.id, live.ledger.parts))

    async def _expire(self, live: LiveStream) -> None:
        """Nobody came back for it, or too many others came after it."""
        if live.detached_at is None or self._live.pop(live.id, None) is None:
            return  # read again, or given away, a moment ago
        self._deps.counters.add("streams_expired")
        await live.end(StreamNotFound())
        if not live.lost:
            self._remove(live.id, live.ledger.parts, live.ledger.revision)

    def _remove(self, stream: str, parts: Sequence[str], revision: int | None) -> None:
        """Nobody waits for that."""
        self._deps.spawn(self._journal.remove(stream, parts, revision), "stream-removal")


def _as_found(live: LiveStream) -> Found:
    return Found(live.id, live.request, live.plan, live.tape, live.attach)


def _finished(stream: str, request: StreamRequest, plan: Plan, tape: Tape) -> Found:
    """Nobody serves it any more, and every connection reads it for itself."""
    return Found(stream, request, plan, tape, lambda start: Reader(tape, plan.requests, start))


def _check_key(request: StreamRequest, key: str) -> None:
    if request.key != key:
        raise StreamNotFound
