"""The contract of `shared.bus.base.Bus`, run on NATS and on its in-memory twin."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.bus import nats
from shared.bus.base import (
    MAX_PAYLOAD_BYTES,
    Bus,
    BusClosed,
    BusTimeout,
    Handler,
    Message,
    NoResponders,
)
from shared.bus.dispatch import DispatchLimits
from shared.bus.memory import MemoryHub

Client = Callable[..., Awaitable[Bus]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def record(into: list[Message]) -> Handler:
    async def handler(message: Message) -> None:
        into.append(message)

    return handler


async def echo(message: Message) -> bytes:
    return b"re:" + message.data


async def hang(message: Message) -> bytes:
    await asyncio.Event().wait()
    return b"never"


class BusContract:
    @pytest.fixture
    def base(self) -> str:
        """A prefix for the subjects of one test: the server is shared."""
        return f"test.{secrets.token_hex(6)}"

    async def test_publish_reaches_every_subscriber_of_the_subject(
        self, client: Client, base: str, eventually: Eventually
    ) -> None:
        a, b = await client("a"), await client("b")
        got_a: list[Message] = []
        got_b: list[Message] = []
        other: list[Message] = []
        await a.subscribe(f"{base}.x", record(got_a))
        await b.subscribe(f"{base}.x", record(got_b))
        await b.subscribe(f"{base}.y", record(other))
        await a.publish(f"{base}.x", b"one")
        await a.publish(f"{base}.x", b"")
        expected = [Message(f"{base}.x", b"one"), Message(f"{base}.x", b"")]
        await eventually(lambda: len(got_a) == len(got_b) == 2)
        assert got_a == got_b == expected
        assert other == []
        assert a.stats.published == 2
        assert a.stats.delivered == b.stats.delivered == 2

    async def test_messages_of_one_publisher_arrive_in_order(
        self, client: Client, base: str, eventually: Eventually
    ) -> None:
        a, b = await client("a"), await client("b")
        got: list[Message] = []
        await b.subscribe(f"{base}.>", record(got))
        for i in range(200):
            await a.publish(f"{base}.{i % 3}", str(i).encode())
        await eventually(lambda: len(got) == 200)
        assert [int(message.data) for message in got] == list(range(200))

    @pytest.mark.parametrize(
        ("pattern", "matching", "others"),
        [
            ("*.x", ["a.x", "b.x"], ["x", "a.b.x", "a.y"]),
            ("a.*.z", ["a.b.z"], ["a.z", "a.b.c.z", "b.b.z"]),
            ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
            ("a.b", ["a.b"], ["a.bb", "a.b.c", "a"]),
        ],
    )
    async def test_wildcards(
        self,
        client: Client,
        base: str,
        eventually: Eventually,
        pattern: str,
        matching: list[str],
        others: list[str],
    ) -> None:
        bus = await client("a")
        got: list[Message] = []
        last: list[Message] = []
        await bus.subscribe(f"{base}.{pattern}", record(got))
        await bus.subscribe(f"{base}-last", record(last))
        for subject in [*matching, *others]:
            await bus.publish(f"{base}.{subject}", b"")
        await bus.publish(f"{base}-last", b"")
        await eventually(lambda: len(last) == 1)
        assert [message.subject for message in got] == [f"{base}.{subject}" for subject in matching]

    async def test_request_gets_the_answer(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")
        await b.subscribe(f"{base}.echo", echo)
        assert await a.request(f"{base}.echo", b"hello", 30) == b"re:hello"
        assert await b.request(f"{base}.echo", b"self", 30) == b"re:self"
        assert (a.stats.requests, b.stats.replies) == (1, 2)

    async def test_an_empty_answer_is_an_answer(self, client: Client, base: str) -> None:
        bus = await client("a")

        async def empty(message: Message) -> bytes:
            return b""

        await bus.subscribe(f"{base}.empty", empty)
        assert await bus.request(f"{base}.empty", b"", 30) == b""

    async def test_concurrent_requests_get_their_own_answers(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")

        async def slower_first(message: Message) -> bytes:
            await asyncio.sleep((20 - int(message.data)) * 0.002)
            return message.data

        await b.subscribe(f"{base}.n", slower_first)
        answers = await asyncio.gather(*(a.request(f"{base}.n", str(i).encode(), 30) for i in range(20)))
        assert answers == [str(i).encode() for i in range(20)]

    async def test_nobody_there_is_known_at_once(self, client: Client, base: str) -> None:
        bus = await client("a")
        with pytest.raises(NoResponders):
            await asyncio.wait_for(bus.request(f"{base}.nobody", b"", 60), 30)
        await bus.publish(f"{base}.nobody", b"lost, and no error")
        assert bus.stats.no_responders == 1

    async def test_no_answer_in_time(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")

        async def none(message: Message) -> None:
            return None

        await b.subscribe(f"{base}.hang", hang)
        await b.subscribe(f"{base}.none", none)
        for subject in (f"{base}.hang", f"{base}.none"):
            with pytest.raises(BusTimeout):
                await a.request(subject, b"", 0.05)
        assert a.stats.timeouts == 2

    async def test_a_late_answer_harms_nobody(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")
        release = asyncio.Event()

        async def late(message: Message) -> bytes:
            await release.wait()
            return message.data

        await b.subscribe(f"{base}.late", late)
        with pytest.raises(BusTimeout):
            await a.request(f"{base}.late", b"first", 0.05)
        release.set()
        assert await a.request(f"{base}.late", b"second", 30) == b"second"

    async def test_a_handler_that_raises_is_counted_and_its_subscription_lives(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")

        async def picky(message: Message) -> bytes:
            if message.data == b"bad":
                raise RuntimeError("cannot")
            if message.data == b"cancelled":
                raise asyncio.CancelledError
            if message.data == b"huge":
                return b"x" * (MAX_PAYLOAD_BYTES + 1)
            return b"good"

        await b.subscribe(f"{base}.picky", picky)
        for data in (b"bad", b"cancelled", b"huge"):
            with pytest.raises(BusTimeout):
                await a.request(f"{base}.picky", data, 0.1)
        assert await a.request(f"{base}.picky", b"fine", 30) == b"good"
        assert b.stats.handler_errors == 3
        assert b.stats.replies == 1

    async def test_a_slow_handler_holds_no_other_message(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")

        async def slow_or_not(message: Message) -> bytes:
            return await (hang if message.data == b"slow" else echo)(message)

        await b.subscribe(f"{base}.work", slow_or_not)
        slow = asyncio.get_running_loop().create_task(a.request(f"{base}.work", b"slow", 30))
        assert await a.request(f"{base}.work", b"fast", 30) == b"re:fast"
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    async def test_running_and_waiting_handlers_are_bounded_and_drops_counted(
        self, client: Client, base: str, eventually: Eventually
    ) -> None:
        a = await client("a")
        b = await client("b", DispatchLimits(max_running=2, max_waiting=3))
        release = asyncio.Event()
        started: list[bytes] = []

        async def handler(message: Message) -> None:
            started.append(message.data)
            await release.wait()

        last: list[Message] = []
        await b.subscribe(f"{base}.x", handler)
        await b.subscribe(f"{base}.last", record(last))
        for i in range(7):
            await a.publish(f"{base}.x", b"%d" % i)
        await a.publish(f"{base}.last", b"")
        await eventually(lambda: len(last) == 1 and len(started) == 2)
        assert started == [b"0", b"1"]
        assert b.stats.dropped == 2
        release.set()
        await eventually(lambda: len(started) == 5)
        assert started == [b"0", b"1", b"2", b"3", b"4"]

    async def test_after_unsubscribe_nothing_starts(self, client: Client, base: str, eventually: Eventually) -> None:
        a, b = await client("a"), await client("b")
        got: list[Message] = []
        kept: list[Message] = []
        subscription = await b.subscribe(f"{base}.x", record(got))
        await b.subscribe(f"{base}.kept", record(kept))
        await a.publish(f"{base}.x", b"1")
        await eventually(lambda: len(got) == 1)
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        await a.publish(f"{base}.x", b"2")
        await a.publish(f"{base}.kept", b"")
        await eventually(lambda: len(kept) == 1)
        assert len(got) == 1
        with pytest.raises(NoResponders):
            await a.request(f"{base}.x", b"", 30)

    async def test_unsubscribe_drops_what_waits_and_lets_run_what_runs(
        self, client: Client, base: str, eventually: Eventually
    ) -> None:
        b = await client("b", DispatchLimits(max_running=1, max_waiting=8))
        release = asyncio.Event()
        ended: list[bytes] = []

        async def handler(message: Message) -> None:
            await release.wait()
            ended.append(message.data)

        last: list[Message] = []
        subscription = await b.subscribe(f"{base}.x", handler)
        await b.subscribe(f"{base}.last", record(last))
        for data in (b"runs", b"waits"):
            await b.publish(f"{base}.x", data)
        await b.publish(f"{base}.last", b"")
        await eventually(lambda: len(last) == 1)
        await subscription.unsubscribe()
        release.set()
        await eventually(lambda: bool(ended))
        await b.publish(f"{base}.last", b"")
        await eventually(lambda: len(last) == 2)
        assert ended == [b"runs"]

    async def test_close_ends_handlers_requests_and_subscriptions(
        self, client: Client, base: str, eventually: Eventually
    ) -> None:
        a, b = await client("a"), await client("b")
        ended: list[str] = []
        started = asyncio.Event()

        async def handler(message: Message) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("handler")

        await a.subscribe(f"{base}.hang", hang)
        await b.subscribe(f"{base}.x", handler)
        await a.publish(f"{base}.x", b"")
        await started.wait()
        asking = asyncio.get_running_loop().create_task(b.request(f"{base}.hang", b"", 60))
        await eventually(lambda: b.stats.requests == 1)
        await b.close()
        assert ended == ["handler"]
        with pytest.raises(BusClosed):
            await asyncio.wait_for(asking, 30)
        with pytest.raises(NoResponders):
            await a.request(f"{base}.x", b"", 30)
        await b.close()
        assert not b.connected
        for call in (b.publish("a", b""), b.request("a", b"", 1), b.subscribe("a", echo)):
            with pytest.raises(BusClosed):
                await call

    async def test_a_handler_may_close_its_bus(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")
        closed = asyncio.Event()

        async def stop(message: Message) -> None:
            await b.close()
            closed.set()

        await b.subscribe(f"{base}.stop", stop)
        await a.publish(f"{base}.stop", b"")
        await asyncio.wait_for(closed.wait(), 30)

    async def test_the_payload_limit(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")
        most = b"x" * MAX_PAYLOAD_BYTES

        async def as_is(message: Message) -> bytes:
            return message.data

        await b.subscribe(f"{base}.x", as_is)
        assert await a.request(f"{base}.x", most, 30) == most
        with pytest.raises(ValueError, match="more than a message may hold"):
            await a.publish(f"{base}.x", most + b"x")
        with pytest.raises(ValueError, match="more than a message may hold"):
            await a.request(f"{base}.x", most + b"x", 1)
        assert a.connected

    @pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB b 0", "a.*", "a.>", "*"])
    async def test_malformed_subjects_to_send_to(self, client: Client, subject: str) -> None:
        bus = await client("a")
        with pytest.raises(ValueError, match="not a subject"):
            await bus.publish(subject, b"")
        with pytest.raises(ValueError, match="not a subject"):
            await bus.request(subject, b"", 1)
        assert bus.connected

    @pytest.mark.parametrize("pattern", ["", "a.", "a..b", "a b", "a.>.b", "a*", "a.b>", "a\n"])
    async def test_malformed_patterns(self, client: Client, pattern: str) -> None:
        bus = await client("a")
        with pytest.raises(ValueError, match="not a subject"):
            await bus.subscribe(pattern, echo)

    async def test_the_first_of_several_answers_wins(self, client: Client, base: str) -> None:
        a, b = await client("a"), await client("b")
        await a.subscribe(f"{base}.*", hang)
        await b.subscribe(f"{base}.x", echo)
        assert await b.request(f"{base}.x", b"1", 30) == b"re:1"


class TestMemoryBus(BusContract):
    @pytest.fixture
    async def client(self) -> AsyncIterator[Client]:
        hub = MemoryHub()
        buses: list[Bus] = []

        async def make(name: str, limits: DispatchLimits | None = None) -> Bus:
            buses.append(hub.client(name, limits))
            return buses[-1]

        yield make
        for bus in buses:
            await bus.close()


class TestNatsBus(BusContract):
    @pytest.fixture
    async def client(self, nats_url: str) -> AsyncIterator[Client]:
        buses: list[Bus] = []

        async def make(name: str, limits: DispatchLimits | None = None) -> Bus:
            options = nats.NatsOptions(limits=limits or DispatchLimits())
            buses.append(await nats.connect(nats_url, name, options))
            return buses[-1]

        yield make
        for bus in buses:
            await bus.close()
