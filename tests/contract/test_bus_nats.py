"""What only the NATS bus does: it survives the server, and it says clearly when there is none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlparse

import pytest
from nats.aio.client import Server

from shared.bus import nats, nats_connection
from shared.bus.base import BusDisconnected, BusError, Message, NoResponders
from shared.bus.server import NatsServer
from tests.support_bus import refusal

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


async def echo(message: Message) -> bytes:
    return b"re:" + message.data


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one client may be back long before its peer."""
    monkeypatch.setattr(nats, "SETTLE_S", 20.0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path) as server:
        yield server


@pytest.fixture
async def pair(server: NatsServer) -> AsyncIterator[tuple[nats.NatsBus, nats.NatsBus]]:
    a = await nats.connect(server.url, "a")
    b = await nats.connect(server.url, "b")
    yield a, b
    await a.close()
    await b.close()


async def test_a_server_restart_is_survived(server: NatsServer, eventually: Eventually) -> None:
    events: list[str] = []
    options = nats.NatsOptions(on_disconnect=lambda: events.append("down"), on_reconnect=lambda: events.append("up"))
    a = await nats.connect(server.url, "a", options)
    b = await nats.connect(server.url, "b")
    await b.subscribe("x.*", echo)
    assert await a.request("x.1", b"before", 30) == b"re:before"

    await server.stop()
    await eventually(lambda: not a.connected and not b.connected)
    assert events == ["down"]
    with pytest.raises(BusDisconnected):
        await a.request("x.1", b"too early", 0.05)
    waiting = asyncio.get_running_loop().create_task(a.request("x.1", b"patient", 30))

    await server.start()
    assert await waiting == b"re:patient"
    assert await a.request("x.2", b"after", 30) == b"re:after"
    assert a.connected
    assert events == ["down", "up"]
    assert (a.stats.disconnects, a.stats.reconnects) == (1, 1)
    await a.close()
    await b.close()
    assert events == ["down", "up"]


async def test_a_request_in_flight_is_sent_again(
    server: NatsServer, pair: tuple[nats.NatsBus, nats.NatsBus], eventually: Eventually
) -> None:
    a, b = pair
    tries = 0

    async def answers_the_second_time(message: Message) -> bytes | None:
        nonlocal tries
        tries += 1
        return None if tries == 1 else b"here"

    await b.subscribe("x", answers_the_second_time)
    asking = asyncio.get_running_loop().create_task(a.request("x", b"", 30))
    await eventually(lambda: tries == 1)
    await server.stop()
    await server.start()
    assert await asking == b"here"
    assert tries == 2


async def test_no_responders_is_not_believed_right_after_a_restart(
    server: NatsServer, pair: tuple[nats.NatsBus, nats.NatsBus], eventually: Eventually
) -> None:
    a, b = pair
    await server.stop()
    await eventually(lambda: not a.connected)
    await server.start()
    await eventually(lambda: a.connected)
    # As if b came back a little later than a.
    asking = asyncio.get_running_loop().create_task(a.request("late", b"", 30))
    await asyncio.wait([asking], timeout=0.2)
    await b.subscribe("late", echo)
    assert await asking == b"re:"


async def test_what_is_published_during_an_outage_is_sent_and_bounded(
    server: NatsServer, pair: tuple[nats.NatsBus, nats.NatsBus], eventually: Eventually
) -> None:
    a, _ = pair
    got: list[bytes] = []

    async def handler(message: Message) -> None:
        got.append(message.data[:1])

    await a.subscribe("x", handler)
    await server.stop()
    await eventually(lambda: not a.connected)
    await a.publish("x", b"1")
    await a.publish("x", b"2")
    await server.start()
    await eventually(lambda: got == [b"1", b"2"])

    await server.stop()
    await eventually(lambda: not a.connected)
    for _ in range(8):
        await a.publish("x", b"3" * 1_000_000)
    with pytest.raises(BusError, match="too much waits"):
        await a.publish("x", b"3" * 1_000_000)
    assert a.stats.refused == 1


async def test_subscriptions_made_and_ended_during_an_outage(
    server: NatsServer, pair: tuple[nats.NatsBus, nats.NatsBus], eventually: Eventually
) -> None:
    a, b = pair
    old = await b.subscribe("old", echo)
    await server.stop()
    await eventually(lambda: not b.connected)
    await old.unsubscribe()
    await b.subscribe("new", echo)
    await server.start()
    assert await a.request("new", b"", 30) == b"re:"
    with pytest.raises(BusError):
        await a.request("old", b"", 0.2)


async def test_closing_during_an_outage_is_quick(server: NatsServer, eventually: Eventually) -> None:
    a = await nats.connect(server.url, "a")
    await server.stop()
    await eventually(lambda: not a.connected)
    waiting = asyncio.get_running_loop().create_task(a.request("x", b"", 60))
    await eventually(lambda: a.stats.requests == 1)
    await asyncio.wait_for(a.close(), 10)
    with pytest.raises(BusError):
        await waiting


async def test_no_server_is_said_clearly(server: NatsServer) -> None:
    await server.stop()
    options = nats.NatsOptions(connect_timeout_s=0.3)
    said = rf"no NATS server at 127.0.0.1:{server.port} within 0.3 s: .*Connect call failed"
    await refusal(said, lambda: nats.connect(server.url, "a", options))
    with pytest.raises(BusError, match="connect"):
        await nats.connect("nats://", "a", options)


async def test_a_server_that_says_nothing_is_not_waited_for(eventually: Eventually) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(BusError, match="no NATS server"):
        await nats.connect(f"nats://127.0.0.1:{port}", "a", nats.NatsOptions(connect_timeout_s=0.3))
    for writer in writers:
        writer.close()
    listener.close()
    await listener.wait_closed()


async def is_answered(bus: nats.NatsBus) -> bool:
    try:
        return await bus.request("x", b"1", 30) == b"re:1"
    except NoResponders:
        return False


async def test_an_error_after_which_the_client_gives_up_is_mended(server: NatsServer, eventually: Eventually) -> None:
    """A proxy that says `-ERR` once: nats-py then closes for good, and a new client must take over."""
    links: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        links.append(writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, up_writer))
            group.create_task(pump(up_reader, writer))

    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    a = await nats.connect(f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "a")
    b = await nats.connect(server.url, "b")
    await a.subscribe("x", echo)
    links[0].write(b"-ERR 'Maximum Account Connections Exceeded'\r\n")
    await eventually(lambda: a.stats.reconnects == 1)
    assert len(links) == 2
    async with asyncio.timeout(60):
        while not await is_answered(b):
            await asyncio.sleep(0.005)  # a's subscription is on its way to the server
    await b.subscribe("y", echo)
    assert await a.request("y", b"2", 30) == b"re:2"
    await a.close()
    await b.close()
    listener.close()
    await listener.wait_closed()


async def test_a_client_that_loses_a_cancellation_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []

    async def stubborn(*_: object, **__: object) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if len(lost) == 2:
                    raise
                lost.append(1)

    monkeypatch.setattr(nats_connection.Client, "connect", stubborn)
    async with asyncio.timeout(10):
        with pytest.raises(BusError, match="no NATS server"):
            await nats.connect("nats://127.0.0.1:9", "a", nats.NatsOptions(connect_timeout_s=0.05))
    assert len(lost) == 2


async def test_login(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, user="baton", password="s3cret") as server:
        bus = await nats.connect(server.url, "a")
        await bus.subscribe("x", echo)
        assert await bus.request("x", b"", 30) == b"re:"
        await bus.close()
        wrong = server.url.replace("s3cret", "guess")
        options = nats.NatsOptions(connect_timeout_s=0.5)
        assert "guess" not in await refusal("Authorization Violation", lambda: nats.connect(wrong, "b", options))


async def test_a_callback_that_raises_does_no_harm(server: NatsServer, eventually: Eventually) -> None:
    def broken() -> None:
        raise RuntimeError("in a callback")

    a = await nats.connect(server.url, "a", nats.NatsOptions(on_disconnect=broken, on_reconnect=broken))
    await a.subscribe("x", echo)
    await server.stop()
    await server.start()
    await eventually(lambda: a.stats.reconnects == 1)
    assert await a.request("x", b"", 30) == b"re:"
    await a.close()


def test_who_loses_its_connection_alone_is_back_at_once() -> None:
    """Peers take a worker for dead when nobody listens there for 0.1 s; so the first try waits much less."""
    first = [nats_connection._next_server([Server(urlparse("nats://host:1"))], {})[1] for _ in range(100)]
    later = [nats_connection._next_server([Server(urlparse("nats://host:1"), reconnects=1)], {})[1] for _ in range(100)]
    assert max(first) <= 0.02 <= min(later)
    assert max(later) > 0.1
