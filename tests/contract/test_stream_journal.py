"""What gateways write down of their streams, in JetStream and in its in-memory twin."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from services.gateway.generation import GenerationRequest, PathPolicy, TokenEvent
from services.gateway.streams.journal import Journal
from services.gateway.streams.ledger import PART_TOKENS, Ledger
from services.gateway.streams.records import plan_of, request_of, tape_of
from services.gateway.streams.tape import Tape
from shared.bus import nats
from shared.bus.base import Bus, BusTimeout
from shared.bus.kv import Bucket, Entry, KeyValue
from shared.bus.memory import MemoryHub
from shared.bus.server import NatsServer
from shared.protocol.messages import FinishReason, SamplingSpec, TokenLogprob
from shared.protocol.stream_messages import StreamPrompt, StreamRequest
from shared.runtime.clock import LoopClock
from shared.runtime.errors import InvalidRequest, JournalUnavailable, NotResumable, StreamMoved, StreamNotFound

Connect = Callable[[], Awaitable[Bus]]
N = 2
REQUEST = StreamRequest(
    request_id="req-1",
    key="k",
    tenant="t",
    chat=False,
    model="m",
    created=1,
    prompts=(StreamPrompt(prompt=(1, 2, 3), sampling=SamplingSpec(n=N), echo="e"),),
    n=N,
    stops=("STOP",),
)


def event(choice: int, index: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(choice, index, 1000 * choice + index, TokenLogprob(logprob=-0.5, top=((7, -0.5),)), finish)


class JournalContract:
    @pytest.fixture
    async def journal(self, connect: Connect) -> Journal:
        return Journal(await connect(), LoopClock(), 60.0, 60.0)

    @pytest.fixture
    async def other(self, connect: Connect) -> Journal:
        """Another gateway's."""
        return Journal(await connect(), LoopClock(), 60.0, 60.0)

    @pytest.fixture
    def stream(self) -> str:
        return secrets.token_hex(16)

    async def begin(self, journal: Journal, stream: str, owner: str = "one") -> Ledger:
        ledger = Ledger(stream, journal, Tape.empty(1, N), N, owner, LoopClock(), asyncio.get_running_loop().time() + 9)
        await ledger.begin(REQUEST)
        return ledger

    async def read(self, journal: Journal, stream: str, owner: str = "two") -> tuple[Ledger, Any]:
        page = await journal.read(stream)
        assert page is not None
        tape = tape_of(page.state, await journal.parts(stream, page.state.parts), N)
        return Ledger(stream, journal, tape, N, owner, LoopClock(), asyncio.get_running_loop().time() + 9), page

    async def test_what_one_writes_another_reads(self, journal: Journal, other: Journal, stream: str) -> None:
        ledger = await self.begin(journal, stream)
        for index in range(5):
            ledger.draft.events[0].append(event(0, index))
            ledger.draft.events[1] += [event(1, 2 * index), event(1, 2 * index + 1)]
            await ledger.write()
        ledger.draft.events[0].append(event(0, 5, FinishReason.LENGTH))
        ledger.draft.stopped.add(1)
        ledger.draft.timings[0] = {"queue_s": 0.5}
        await ledger.write()
        found, page = await self.read(other, stream)
        assert found.tape.prompts == ledger.tape.prompts
        assert found.tape.prompts[0].timings == {"queue_s": 0.5}
        assert page.state.ended
        assert 8 < page.state.remaining_s <= 9
        assert await other.request(stream) == REQUEST

    async def test_what_is_not_written_is_not_on_the_tape(self, journal: Journal, stream: str) -> None:
        ledger = await self.begin(journal, stream)
        ledger.draft.events[0].append(event(0, 0))
        assert ledger.tape.said() == (0, 0)
        await ledger.write()
        assert ledger.tape.said() == (1, 0)

    async def test_long_streams_come_back_whole(self, journal: Journal, other: Journal, stream: str) -> None:
        ledger = await self.begin(journal, stream)
        index = 0
        while index < 3 * PART_TOKENS:
            ledger.draft.events[0] += [event(0, index + k) for k in range(37)]
            ledger.draft.events[1] += [event(1, index + k) for k in range(37)]
            index += 37
            await ledger.write()
        assert len(ledger.parts) >= 2
        found, page = await self.read(other, stream)
        assert found.tape.prompts == ledger.tape.prompts
        assert sum(len(one.tokens) for one in page.state.choices) < PART_TOKENS + 2 * 37 + 1
        await found.claim(page)
        found.draft.events[0].append(event(0, index))
        await found.write()
        again, _ = await self.read(journal, stream)
        assert again.tape.prompts == found.tape.prompts
        assert again.tape.said() == (index + 1, index)

    async def test_who_lost_it_neither_writes_nor_keeps(self, journal: Journal, other: Journal, stream: str) -> None:
        ledger = await self.begin(journal, stream)
        found, page = await self.read(other, stream)
        await found.claim(page)
        ledger.draft.events[0].append(event(0, 0))
        with pytest.raises(StreamMoved):
            await ledger.write()
        assert ledger.tape.said() == (0, 0)
        found.draft.events[0].append(event(0, 0))
        await found.write()
        assert found.tape.said() == (1, 0)

    async def test_of_two_who_claim_one_gets_it(self, journal: Journal, other: Journal, stream: str) -> None:
        await self.begin(journal, stream)
        two, page_two = await self.read(journal, stream, "two")
        three, page_three = await self.read(other, stream, "three")
        claims = await asyncio.gather(two.claim(page_two), three.claim(page_three), return_exceptions=True)
        assert sorted(type(claim).__name__ for claim in claims) == ["NoneType", "StreamMoved"]
        page = await other.read(stream)
        assert page is not None
        assert page.state.owner == ("two" if claims[0] is None else "three")

    async def test_what_was_removed_is_not_there(self, journal: Journal, other: Journal, stream: str) -> None:
        ledger = await self.begin(journal, stream)
        await journal.remove(stream, ledger.parts, ledger.revision + 9)
        assert await other.read(stream) is not None
        await journal.remove(stream, ledger.parts, ledger.revision)
        assert await other.read(stream) is None
        with pytest.raises(StreamNotFound):
            await other.request(stream)
        with pytest.raises(JournalUnavailable, match="lost the stream, or forgotten it"):
            await ledger.write()

    async def test_a_state_that_nobody_writes_expires(self, connect: Connect, stream: str) -> None:
        journal = Journal(await connect(), LoopClock(), 1.0, 60.0)
        left, kept = await self.begin(journal, stream), await self.begin(journal, stream[::-1])
        async with asyncio.timeout(30):
            while await journal.read(stream) is not None:
                await kept.write()
                await asyncio.sleep(0.2)
        assert await journal.read(stream[::-1]) is not None
        with pytest.raises(JournalUnavailable, match="lost the stream, or forgotten it"):
            await left.write()

    async def test_much_that_came_at_once_is_written_in_parts(
        self, journal: Journal, other: Journal, stream: str
    ) -> None:
        """While the journal was away: more than an entry holds, with twenty log probabilities for each token."""
        ledger = await self.begin(journal, stream)
        top = tuple((token, -1.25) for token in range(20))
        for choice, count in enumerate((1500, 700)):
            for index in range(count):
                logprob = TokenLogprob(logprob=-0.5, top=top)
                ledger.draft.events[choice].append(TokenEvent(choice, index, index % 100, logprob))
        before = [list(events) for events in ledger.draft.events]
        await ledger.write()
        assert ledger.tape.said() == (1500, 700)
        found, _ = await self.read(other, stream, "two")
        assert found.tape.prompts[0].events == before

    async def test_a_request_that_is_too_large(self, journal: Journal, stream: str) -> None:
        ledger = Ledger(stream, journal, Tape.empty(1, 1), 1, "one", LoopClock(), 9.0)
        huge = REQUEST.model_copy(update={"n": 1, "prompts": (StreamPrompt(prompt=(1,) * 300_000, sampling={}),)})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="too large"):
            await ledger.begin(huge)

    @pytest.mark.parametrize("method", ["update", "create"])
    async def test_an_answer_that_got_lost_is_found_out(
        self, connect: Connect, stream: str, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was written, and nobody said so: that is our own word, and no other gateway's."""
        bus = await connect()
        lossy = LossyBus(bus, method)
        journal = Journal(lossy, LoopClock(), 60.0, 60.0)
        ledger = await self.begin(journal, stream)
        lossy.left = 3
        for index in range(PART_TOKENS + 20):
            ledger.draft.events[0].append(event(0, index))
            await ledger.write()
            if index % 100 == 50:
                lossy.left = 1
        assert ledger.tape.said() == (PART_TOKENS + 20, 0)
        found, _ = await self.read(journal, stream)
        assert found.tape.prompts == ledger.tape.prompts
        assert lossy.lost >= 1

    async def test_a_server_that_lost_it_all(self, connect: Connect, stream: str) -> None:
        lossy = LossyBus(await connect(), "update")
        journal = Journal(lossy, LoopClock(), 60.0, 60.0)
        ledger = await self.begin(journal, stream)
        await self.lose_all(lossy.bus)
        with pytest.raises(JournalUnavailable):
            await ledger.write()
        assert await journal.read(stream) is None
        await self.begin(journal, stream[::-1])  # a new stream finds a new bucket

    async def lose_all(self, bus: Bus) -> None:
        raise NotImplementedError


class LossyBus:
    """Loses the answers of one method; `left` of them are still to be lost."""

    def __init__(self, bus: Bus, method: str) -> None:
        self.bus = bus
        self.method = method
        self.left = self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bus, name)

    async def bucket(self, bucket: Bucket) -> KeyValue:
        return Lossy(await self.bus.bucket(bucket), self)


class Lossy:
    def __init__(self, inner: KeyValue, bus: LossyBus) -> None:
        self._inner = inner
        self._bus = bus

    async def get(self, key: str) -> Entry | None:
        return await self._inner.get(key)

    async def create(self, key: str, value: bytes) -> int:
        return self._lose("create", await self._inner.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return self._lose("update", await self._inner.update(key, value, revision))

    async def delete(self, key: str, revision: int | None = None) -> None:
        await self._inner.delete(key, revision)

    def _lose(self, method: str, revision: int) -> int:
        if method == self._bus.method and self._bus.left:
            self._bus.left -= 1
            self._bus.lost += 1
            raise BusTimeout("no answer in time")
        return revision


class TestMemory(JournalContract):
    @pytest.fixture
    def hub(self) -> MemoryHub:
        return MemoryHub()

    @pytest.fixture
    def connect(self, hub: MemoryHub) -> Connect:
        async def connect() -> Bus:
            return hub.client("test")

        return connect

    async def lose_all(self, bus: Bus) -> None:
        hub: MemoryHub = bus._hub  # type: ignore[attr-defined]
        assert hub.stores is not None
        for store in hub.stores.values():
            store.entries.clear()


class TestNats(JournalContract):
    @pytest.fixture
    async def server(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
        async with NatsServer(tmp_path_factory.mktemp("nats")) as server:
            yield server

    @pytest.fixture
    async def connect(self, server: NatsServer) -> AsyncIterator[Connect]:
        opened: list[Bus] = []

        async def connect() -> Bus:
            opened.append(await nats.connect(server.url, "test"))
            return opened[-1]

        yield connect
        for bus in opened:
            await bus.close()

    async def lose_all(self, bus: Bus) -> None:
        assert isinstance(bus, nats.NatsBus)
        context = bus._connection.client().jetstream()
        for name in ("baton-v1-streams", "baton-v1-stream-parts"):
            await context.delete_key_value(name)

    async def test_without_jetstream(self, tmp_path_factory: pytest.TempPathFactory, stream: str) -> None:
        async with NatsServer(tmp_path_factory.mktemp("nats"), jetstream=False) as plain:
            bus = await nats.connect(plain.url, "test")
            journal = Journal(bus, LoopClock(), 60.0, 60.0)
            with pytest.raises(NotResumable):
                await self.begin(journal, stream)
            with pytest.raises(NotResumable):
                await journal.read(stream)
            await journal.remove(stream, (), 1)
            await bus.close()


@pytest.mark.parametrize("path", get_args(PathPolicy))
def test_every_path_can_be_written_down(path: PathPolicy) -> None:
    plan = plan_of(REQUEST, 9.0, 60.0)
    asked = replace(plan, requests=tuple(replace(request, path=path) for request in plan.requests))
    assert plan_of(request_of(asked, "k", 1), 9.0, 60.0) == asked


def test_a_plan_comes_back_as_it_was() -> None:
    plan = plan_of(REQUEST, 9.0, 60.0)
    assert request_of(plan, "k", 1) == REQUEST
    assert plan.requests == (
        GenerationRequest("req-1", (1, 2, 3), SamplingSpec(n=N), timeout_s=9.0, tenant="t", orphan_grace_s=60.0),
    )
