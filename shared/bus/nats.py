"""The bus over NATS.

While there is no connection: `publish` is buffered up to a bound and sent on reconnect, `request` waits within its
timeout and is sent (again) on reconnect, subscriptions come back by themselves. Reconnecting never gives up.
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.bus.base import (
    BusClosed,
    BusDisconnected,
    BusError,
    BusStats,
    BusTimeout,
    Handler,
    Message,
    NoResponders,
)
from shared.bus.dispatch import Dispatcher, DispatchLimits, Lane
from shared.bus.kv import Bucket
from shared.bus.nats_connection import Interest, NatsAccess, NatsConnection
from shared.bus.nats_kv import NatsKeyValue, open_bucket
from shared.bus.patterns import check_pattern, check_payload, check_subject
from shared.runtime.settings import CommonSettings, ConfigError

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""After a reconnect peers may not be back yet: for that long NoResponders is not believed but asked again."""
_RETRY_S = 0.05
_ROUND_TRIP_TIMEOUT_S = 5.0
_MAX_ANSWERS_WAITING = 65536

Notify = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """`on_disconnect` and `on_reconnect` run on the event loop and must not block."""

    connect_timeout_s: float = 5.0
    access: NatsAccess = field(default_factory=NatsAccess)
    limits: DispatchLimits = field(default_factory=DispatchLimits)
    on_disconnect: Notify | None = None
    on_reconnect: Notify | None = None


class _ConnectionLost(Exception):
    """The answer to a request in flight may never come, so the request is sent again."""


async def connect(url: str, name: str, options: NatsOptions | None = None) -> "NatsBus":
    """A connected bus; BusError if `url` does not let us in within `connect_timeout_s`. The caller closes it.

    `url` is `nats://[user:password@]host:port`, or several of them with commas; `tls://` insists on TLS.
    """
    options = options or NatsOptions()
    bus = NatsBus(url, name, options)
    try:
        await bus.open(options.connect_timeout_s)
    except BaseException:
        await bus.close()
        raise
    return bus


def options_from(settings: CommonSettings) -> NatsOptions:
    """As a process's settings say. ConfigError where its TLS files are not what they should be."""
    password, token = settings.nats_password, settings.nats_token
    access = NatsAccess(
        user=settings.nats_user,
        password=None if password is None else password.get_secret_value(),
        token=None if token is None else token.get_secret_value(),
        tls=_tls_context(settings),
    )
    return NatsOptions(access=access)


def _tls_context(settings: CommonSettings) -> ssl.SSLContext | None:
    ca, cert, key = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
    if ca is None and cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{settings.role}: nats_tls_ca: {ca} holds no certificate ({error})") from error
    try:
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{settings.role}: nats_tls_cert: {cert} and {key} do not fit ({error})") from error
    return context


class NatsSubscription:
    def __init__(
        self, interest: Interest, lane: Lane, removed: Callable[["NatsSubscription"], Awaitable[None]]
    ) -> None:
        self.interest = interest
        self.lane = lane
        self._removed = removed

    async def unsubscribe(self) -> None:
        self.lane.close()
        await self._removed(self)


class NatsBus:
    """One process's client. Made by `connect`."""

    def __init__(self, url: str, name: str, options: NatsOptions) -> None:
        self._options = options
        self._stats = BusStats()
        self._connection = NatsConnection(url, name, options.access, self._stats, self._lost, self._back)
        self._dispatcher = Dispatcher(self._stats, self._reply, options.limits)
        self._subscriptions: list[NatsSubscription] = []
        self._inbox_prefix = f"_INBOX.{secrets.token_hex(11)}"
        self._asking: dict[str, asyncio.Future[bytes | Exception]] = {}
        self._num_inboxes = 0
        self._settled_at = 0.0
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def stats(self) -> BusStats:
        return self._stats

    async def open(self, timeout_s: float) -> None:
        await self._connection.open(timeout_s)
        await self._connection.add(Interest(f"{self._inbox_prefix}.*", self._answered, _MAX_ANSWERS_WAITING))

    async def publish(self, subject: str, data: bytes) -> None:
        self._check(subject, data)
        await self._connection.send(subject, data)
        self._stats.published += 1

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Raises BusDisconnected where the time ran out without a connection."""
        self._check(subject, data)
        self._stats.requests += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask_until_answered(subject, data)
        except TimeoutError as error:
            self._stats.timeouts += 1
            if not self.connected:
                raise BusDisconnected(f"no connection to ask {subject} within {timeout_s:g} s") from error
            raise BusTimeout(f"no answer from {subject} within {timeout_s:g} s") from error
        except NoResponders:
            self._stats.no_responders += 1
            raise

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        check_pattern(subject)
        self._check_open()
        lane = self._dispatcher.lane(handler)

        def receive(subject: str, data: bytes, reply: str, no_responders: bool) -> None:
            lane.deliver(Message(subject, data, reply))

        limits = self._options.limits
        interest = Interest(subject, receive, limits.max_running + limits.max_waiting)
        await self._connection.add(interest)
        subscription = NatsSubscription(interest, lane, self._remove)
        self._subscriptions.append(subscription)
        await self._round_trip()
        return subscription

    async def bucket(self, bucket: Bucket) -> NatsKeyValue:
        self._check_open()
        return await open_bucket(bucket, self._connection.client)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for subscription in self._subscriptions:
            subscription.lane.close()
        self._end_requests(BusClosed("the bus was closed"))
        await self._withdraw()
        await self._dispatcher.close()
        await self._connection.close()

    async def _withdraw(self) -> None:
        """Ends the subscriptions at the server first, so that peers get NoResponders from the moment `close` returns,
        not from when the server has noticed that the socket is closed."""
        try:
            for subscription in self._subscriptions:
                await self._connection.remove(subscription.interest)
            await self._round_trip()
        except BusError as error:
            log.warning("subscriptions could not be withdrawn: %r", error)

    async def _remove(self, subscription: NatsSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            await self._connection.remove(subscription.interest)
            await self._round_trip()

    def _check(self, subject: str, data: bytes) -> None:
        check_subject(subject)
        check_payload(subject, data)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed("the bus was closed")

    async def _reply(self, message: Message, data: bytes) -> None:
        check_payload(message.subject, data)
        await self._connection.send(message.reply, data)

    async def _ask_until_answered(self, subject: str, data: bytes) -> bytes:
        while True:
            await self._connection.wait_up()
            self._check_open()
            try:
                return await self._ask(subject, data)
            except NoResponders:
                if asyncio.get_running_loop().time() >= self._settled_at:
                    raise
            except (_ConnectionLost, BusDisconnected):
                log.debug("a request to %s is sent again", subject)
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, subject: str, data: bytes) -> bytes:
        with self._inbox() as (inbox, answer):
            await self._connection.send(subject, data, inbox)
            result = await answer
        if isinstance(result, Exception):
            raise result
        return result

    async def _round_trip(self) -> None:
        """Waits until the server has done what we sent before, if there is a connection. (nats-py's own flush does not
        promise that: its ping overtakes what its flusher has not written yet.)"""
        if not self.connected:
            return
        with self._inbox() as (inbox, answer):
            try:
                await self._connection.send(inbox, b"")
                async with asyncio.timeout(_ROUND_TRIP_TIMEOUT_S):
                    await answer
            except (TimeoutError, BusError) as error:
                log.warning("NATS did not confirm a subscription in time: %r", error)

    @contextmanager
    def _inbox(self) -> Iterator[tuple[str, asyncio.Future[bytes | Exception]]]:
        """A reply subject, and what its first answer sets. An error is set as a value: a future whose exception nobody
        comes to fetch would complain."""
        self._num_inboxes += 1
        token = str(self._num_inboxes)
        answer: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()
        self._asking[token] = answer
        try:
            yield f"{self._inbox_prefix}.{token}", answer
        finally:
            del self._asking[token]

    def _answered(self, subject: str, data: bytes, reply: str, no_responders: bool) -> None:
        answer = self._asking.get(subject.rpartition(".")[2])
        is_awaited = answer is not None and not answer.done()
        if not no_responders:
            self._stats.answers += is_awaited
            self._stats.late_answers += not is_awaited
        if answer is not None and is_awaited:
            answer.set_result(NoResponders("nobody listens on that subject") if no_responders else data)

    def _end_requests(self, error: Exception) -> None:
        for answer in self._asking.values():
            if not answer.done():
                answer.set_result(error)

    def _lost(self) -> None:
        self._end_requests(_ConnectionLost())
        _notify(self._options.on_disconnect)

    def _back(self) -> None:
        self._settled_at = asyncio.get_running_loop().time() + SETTLE_S
        _notify(self._options.on_reconnect)


def _notify(callback: Notify | None) -> None:
    if callback is None:
        return
    try:
        callback()
    except Exception:
        log.exception("a connection callback failed")
