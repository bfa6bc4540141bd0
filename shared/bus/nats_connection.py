"""One process's connection to NATS, which mends itself. The only file that knows nats-py, its errors and its traps,
apart from what JetStream adds to these (`nats_kv.py`).

While it is down, what is sent is buffered up to PENDING_BYTES, and subscriptions come back by themselves. Reconnecting
never gives up.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsPySubscription

from shared.bus.base import MAX_PAYLOAD_BYTES, BusDisconnected, BusError, BusStats, BusTimeout

log = logging.getLogger(__name__)

PENDING_BYTES = 8 * MAX_PAYLOAD_BYTES
RECONNECT_WAIT_S = (0.02, 0.2)
"""Each wait is drawn from this range, so that a whole cluster does not return in one instant."""
_FIRST_RECONNECT_WAIT_S = (0.0, 0.02)
"""The first wait: who has lost its connection alone is back before its peers take it for dead."""
_FIRST_CONNECT_WAIT_S = 0.1
_NO_ERROR = "no answer"
_HUNG_UP = (ConnectionResetError, BrokenPipeError, nats.errors.UnexpectedEOF)
_FLUSH_TIMEOUT_S = 5.0
_CANCEL_AGAIN_S = 0.1
_PING_INTERVAL_S = 5
_STATUS_HEADER = "Status"
_NO_RESPONDERS_STATUS = "503"

Receive = Callable[[str, bytes, str, bool], None]
"""Gets (subject, data, reply, no_responders) of each message. Must not block."""


@contextmanager
def map_nats_errors(what: str) -> Iterator[None]:
    """Turns what nats-py raises into our errors, most specific first."""
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise ValueError(f"{what}: more bytes than the server takes") from error
    except nats.errors.BadSubjectError as error:
        raise ValueError(f"{what}: malformed subject") from error
    except (nats.errors.ConnectionClosedError, nats.errors.ConnectionReconnectingError) as error:
        raise BusDisconnected(f"{what}: no connection") from error
    except nats.errors.OutboundBufferLimitError as error:
        raise BusError(f"{what}: too much waits for the connection already") from error
    except nats.errors.TimeoutError as error:
        raise BusTimeout(f"{what}: the server did not answer in time") from error
    except (nats.errors.Error, OSError) as error:
        raise BusError(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """What we show to the server, and how we know it. A user in the address is used where there is none here.

    tls: where there is one, or the address says tls://, a server without TLS gets no word from us."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    tls: ssl.SSLContext | None = None


class Interest:
    """A pattern we want messages of, for as long as it is kept, whatever happens to the connection."""

    def __init__(self, pattern: str, receive: Receive, max_waiting: int) -> None:
        self.pattern = pattern
        self.receive = receive
        self.max_waiting = max_waiting
        self.inner: NatsPySubscription | None = None

    async def on_message(self, msg: Msg) -> None:
        no_responders = (msg.headers or {}).get(_STATUS_HEADER) == _NO_RESPONDERS_STATUS
        self.receive(msg.subject, msg.data, msg.reply, no_responders)


class NatsConnection:
    """`on_down` and `on_up` are called at each loss and return, not for the first connection or our own close."""

    def __init__(
        self,
        url: str,
        name: str,
        access: NatsAccess,
        stats: BusStats,
        on_down: Callable[[], None],
        on_up: Callable[[], None],
    ) -> None:
        self._url = url
        self._name = name
        self._access = access
        self._stats = stats
        self._on_down = on_down
        self._on_up = on_up
        self._client = Client()
        self._interests: list[Interest] = []
        self._up = asyncio.Event()
        self._client_ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._last_error = _NO_ERROR
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._client.is_connected and not self._closed

    def client(self) -> Client:
        """The present one; another may take its place at any time."""
        return self._client

    async def wait_up(self) -> None:
        """Returns once there is a connection, or the connection was closed by us."""
        await self._up.wait()

    async def open(self, timeout_s: float) -> None:
        """BusError with the last cause if the server does not let us in within `timeout_s`."""
        connecting = asyncio.get_running_loop().create_task(self._connect_client())
        try:
            await asyncio.wait({connecting}, timeout=timeout_s)
        finally:
            await _end_task(connecting)
        if connecting.cancelled():
            raise BusError(f"no NATS server at {_without_login(self._url)} within {timeout_s:g} s: {self._last_error}")
        connecting.result()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def close(self) -> None:
        self._closed = True
        self._up.set()  # whoever waits for the connection goes on and finds it closed
        if self._supervisor is not None:
            await _end_task(self._supervisor)
        await _close_client(self._client)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Queues a message. BusError if that is not possible."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            with map_nats_errors(f"publish {subject}"):
                await self._client.publish(subject, data, reply=reply)
        except BusError:
            self._stats.refused += 1
            raise
        # nats-py swallows a cancellation that arrives while it waits for its flusher.
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError

    async def add(self, interest: Interest) -> None:
        self._interests.append(interest)
        if not self._client.is_closed:
            with map_nats_errors(f"subscribe {interest.pattern}"):
                await self._attach(self._client, interest)

    async def remove(self, interest: Interest) -> None:
        """Idempotent. Also while the connection is down: then it just does not come back."""
        if interest not in self._interests:
            return
        self._interests.remove(interest)
        if interest.inner is not None and not self._client.is_closed:
            with map_nats_errors(f"unsubscribe {interest.pattern}"):
                await interest.inner.unsubscribe()

    async def _connect_client(self) -> None:
        """Tries for ever; raises BusError only for what nats-py does not try again."""
        access = self._access
        insists = access.tls is not None or "tls://" in self._url
        client = self._client = _TlsClient() if insists else Client()
        with map_nats_errors("connect"):
            await client.connect(
                servers=self._url.split(","),
                name=self._name,
                error_cb=self._error_reported,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._ended,
                connect_timeout=2,
                reconnect_time_wait=_FIRST_CONNECT_WAIT_S,  # type: ignore[arg-type]
                reconnect_to_server_handler=_next_server,
                max_reconnect_attempts=-1,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                flush_timeout=_FLUSH_TIMEOUT_S,
                user=access.user,
                password=access.password,
                token=access.token,
                tls=access.tls,
            )
            for interest in self._interests:
                await self._attach(client, interest)
        self._up.set()
        self._last_error = _NO_ERROR

    async def _attach(self, client: Client, interest: Interest) -> None:
        interest.inner = await client.subscribe(
            interest.pattern, cb=interest.on_message, pending_msgs_limit=interest.max_waiting
        )

    async def _supervise(self) -> None:
        """nats-py gives up for good on some errors that a server may send; then a new client takes over."""
        while True:
            await self._client_ended.wait()
            self._client_ended.clear()
            log.error("the NATS client of %s gave up (%s); starting another", self._name, self._last_error)
            await asyncio.sleep(random.uniform(*RECONNECT_WAIT_S))
            try:
                await self._connect_client()
            except BusError as error:
                self._last_error = str(error)
                await _close_client(self._client)
                self._client_ended.set()
            else:
                await self._reconnected()

    async def _error_reported(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._stats.dropped += 1
            return
        self._stats.errors += 1
        log.debug("NATS client of %s: %r", self._name, error)
        # A server that refuses us hangs up behind its answer, and at some attempts only that is heard.
        if self._last_error == _NO_ERROR or not isinstance(error, _HUNG_UP):
            self._last_error = str(error) or repr(error)

    async def _disconnected(self) -> None:
        if self._closed or not self._up.is_set():
            return
        self._up.clear()
        self._stats.disconnects += 1
        log.warning("%s lost its connection to NATS (%s)", self._name, self._last_error)
        self._on_down()

    async def _reconnected(self) -> None:
        if self._closed:
            return
        self._up.set()
        self._last_error = _NO_ERROR
        self._stats.reconnects += 1
        log.warning("%s is connected to NATS again", self._name)
        self._on_up()

    async def _ended(self) -> None:
        if not self._closed:
            self._client_ended.set()


class _TlsClient(Client):
    """nats-py takes up TLS only where the server asks for it, and else sends the password in the clear."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS, and we insist on it")
        return super()._connect_command()


def _next_server(servers: list[Server], info: dict[str, Any]) -> tuple[Server | None, float]:
    server = random.choice(servers)
    return server, random.uniform(*(RECONNECT_WAIT_S if server.reconnects else _FIRST_RECONNECT_WAIT_S))


async def _end_task(task: asyncio.Task[None]) -> None:
    """Cancels until it is done: nats-py connects by `asyncio.wait_for`, which loses a cancellation now and then."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


async def _close_client(client: Client) -> None:
    if not client.servers:
        return  # it never got as far as opening anything
    try:
        async with asyncio.timeout(_FLUSH_TIMEOUT_S):
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError) as error:
        log.warning("the connection to NATS did not close cleanly: %r", error)


def _without_login(url: str) -> str:
    return ",".join(part.rpartition("@")[2].removeprefix("nats://") for part in url.split(","))
