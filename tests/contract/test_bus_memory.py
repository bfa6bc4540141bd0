"""What only the in-memory bus does: faults by policy, on virtual time, the same every time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from shared.bus.base import BusClosed, BusDisconnected, BusTimeout, Message, NoResponders
from shared.bus.memory import Envelope, MemoryHub

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing is ready."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def policy_by_data(delays: dict[bytes, Sequence[float]]) -> Callable[[Envelope], Sequence[float]]:
    return lambda envelope: delays.get(envelope.data, (0.0,))


def test_messages_are_dropped_duplicated_delayed_and_reordered() -> None:
    async def main() -> list[tuple[float, bytes]]:
        hub = MemoryHub(policy_by_data({b"lost": (), b"twice": (0.5, 0.0), b"late": (2.0,)}))
        a, b = hub.client("a"), hub.client("b")
        got: list[tuple[float, bytes]] = []

        async def handler(message: Message) -> None:
            got.append((asyncio.get_running_loop().time(), message.data))

        await b.subscribe("x", handler)
        for data in (b"late", b"lost", b"twice", b"plain"):
            await a.publish("x", data)
        await asyncio.sleep(3)
        await a.close()
        await b.close()
        return got

    assert run(main) == [(0.0, b"twice"), (0.0, b"plain"), (0.5, b"twice"), (2.0, b"late")]


def test_equal_delays_keep_their_order() -> None:
    async def main() -> list[int]:
        hub = MemoryHub(lambda envelope: (1.0,))
        bus = hub.client("a")
        got: list[int] = []

        async def handler(message: Message) -> None:
            got.append(int(message.data))

        await bus.subscribe("x", handler)
        for i in range(100):
            await bus.publish("x", b"%d" % i)
        await asyncio.sleep(1.5)
        await bus.close()
        return got

    assert run(main) == list(range(100))


def test_policies_see_every_leg_and_its_ends() -> None:
    seen: list[Envelope] = []

    def policy(envelope: Envelope) -> Sequence[float]:
        seen.append(envelope)
        return (0.0,)

    async def main() -> None:
        hub = MemoryHub(policy)
        a, b, c = hub.client("a"), hub.client("b"), hub.client("c")

        async def answer(message: Message) -> bytes:
            return b"answer"

        async def ignore(message: Message) -> None:
            return None

        await b.subscribe("ask", answer)
        for bus in (b, c):
            await bus.subscribe("tell.*", ignore)
        await a.publish("tell.all", b"news")
        assert await a.request("ask", b"question", 1) == b"answer"
        for bus in (a, b, c):
            await bus.close()

    run(main)
    assert seen == [
        Envelope("publish", "a", "b", "tell.all", b"news"),
        Envelope("publish", "a", "c", "tell.all", b"news"),
        Envelope("request", "a", "b", "ask", b"question"),
        Envelope("reply", "b", "a", "ask", b"answer", asked=b"question"),
    ]


@pytest.mark.parametrize("kind", ["request", "reply"])
def test_a_lost_leg_is_a_timeout_and_takes_exactly_that_long(kind: str) -> None:
    async def main() -> float:
        hub = MemoryHub(lambda envelope: () if envelope.kind == kind else (0.0,))
        a, b = hub.client("a"), hub.client("b")

        async def echo(message: Message) -> bytes:
            return message.data

        await b.subscribe("x", echo)
        with pytest.raises(BusTimeout):
            await a.request("x", b"", 30)
        await a.close()
        await b.close()
        return asyncio.get_running_loop().time()

    assert run(main) == 30


def test_a_closed_client_is_gone_at_once_even_with_slow_links() -> None:
    async def main() -> float:
        hub = MemoryHub(lambda envelope: (5.0,))
        a, b = hub.client("a"), hub.client("b")
        got: list[Message] = []

        async def handler(message: Message) -> None:
            got.append(message)

        await b.subscribe("x", handler)
        await a.publish("x", b"on its way")
        await b.close()
        with pytest.raises(NoResponders):
            await a.request("x", b"", 30)
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert got == []
        await a.close()
        return now

    assert run(main) == 0


def test_a_duplicated_request_runs_twice_and_is_answered_once() -> None:
    async def main() -> int:
        hub = MemoryHub(lambda envelope: (0.0, 0.1))
        a, b = hub.client("a"), hub.client("b")
        num_calls = 0

        async def count(message: Message) -> bytes:
            nonlocal num_calls
            num_calls += 1
            return b"%d" % num_calls

        await b.subscribe("x", count)
        assert await a.request("x", b"", 1) == b"1"
        await asyncio.sleep(1)
        await a.close()
        await b.close()
        return num_calls

    assert run(main) == 2


def test_equal_seeds_give_equal_runs() -> None:
    def trace(seed: int) -> list[tuple[float, str, bytes]]:
        chance = random.Random(seed)

        def policy(envelope: Envelope) -> Sequence[float]:
            return [chance.random() for _ in range(chance.choice((0, 1, 1, 1, 2)))]

        async def main() -> list[tuple[float, str, bytes]]:
            loop = asyncio.get_running_loop()
            hub = MemoryHub(policy)
            clients = [hub.client(f"c{i}") for i in range(4)]
            log: list[tuple[float, str, bytes]] = []

            async def ask(index: int) -> None:
                try:
                    answer = await clients[index].request(f"c{(index + 1) % 4}.x", b"%d" % index, 1.5)
                except BusTimeout:
                    answer = b"timeout"
                log.append((loop.time(), f"c{index} answered", answer))

            for client in clients:

                async def handler(message: Message, name: str = client.name) -> bytes:
                    log.append((loop.time(), name, message.data))
                    await asyncio.sleep(0.01)
                    return b"from " + name.encode()

                await client.subscribe(f"{client.name}.>", handler)
            for _ in range(20):
                async with asyncio.TaskGroup() as group:
                    for index in range(4):
                        group.create_task(ask(index))
            for client in clients:
                await client.close()
            return log

        return run(main)

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_a_lost_connection_is_noticed_and_a_request_waits_for_it_to_come_back() -> None:
    async def main() -> None:
        hub = MemoryHub()
        a, b = hub.client("a"), hub.client("b")
        got: list[bytes] = []

        async def handler(message: Message) -> bytes:
            got.append(message.data)
            return b"yes"

        await b.subscribe("x", handler)
        a.cut()
        assert not a.connected
        with pytest.raises(BusDisconnected):
            await a.publish("x", b"lost")
        with pytest.raises(BusDisconnected):
            await a.request("x", b"lost", 1.0)
        asyncio.get_running_loop().call_later(2.0, a.mend)
        assert await a.request("x", b"again", 5.0) == b"yes"
        b.cut()
        await asyncio.sleep(3)  # a has settled: what nobody hears it is told at once
        with pytest.raises(NoResponders):
            await a.request("x", b"nobody", 1.0)
        b.mend()
        assert await a.request("x", b"back", 1.0) == b"yes"
        assert got == [b"again", b"back"]
        await a.close()
        await b.close()

    run(main)


def test_a_client_that_is_severed_says_and_hears_nothing_any_more() -> None:
    async def main() -> None:
        hub = MemoryHub()
        a, b = hub.client("a"), hub.client("b")
        got: list[bytes] = []

        async def handler(message: Message) -> None:
            got.append(message.data)

        await b.subscribe("x", handler)
        b.sever()
        with pytest.raises(NoResponders):
            await a.request("x", b"anybody?", 1.0)
        with pytest.raises(BusClosed):
            await b.publish("x", b"from the grave")
        assert got == []
        await a.close()
        await b.close()

    run(main)
