"""NATS's in-memory twin: the same semantics inside one process, for tests and for simulations on virtual time.

A `MemoryHub` stands for the server, each `MemoryBus` for one process's connection. Everything goes through the event
loop in a fixed order; a `policy` may drop, duplicate, delay and so reorder each delivery.
"""

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shared.bus.base import (
    BusClosed,
    BusDisconnected,
    BusStats,
    BusTimeout,
    Handler,
    Message,
    NoResponders,
)
from shared.bus.dispatch import Dispatcher, DispatchLimits, Lane
from shared.bus.kv import Bucket, NoKeyValue, check_bucket
from shared.bus.memory_kv import MemoryKeyValue, MemoryStore
from shared.bus.patterns import check_pattern, check_payload, check_subject, matches

SETTLE_S = 2.0
"""So long after a connection came back, *nobody listens* may only mean that the others are not back yet."""
_RETRY_S = 0.05
_NUM_ROUTES = 4096


@dataclass(frozen=True, slots=True)
class Envelope:
    """One delivery to one receiver, as a policy sees it. A reply carries the subject of its request; `asked` is what
    was asked."""

    kind: Literal["publish", "request", "reply"]
    sender: str
    receiver: str
    subject: str
    data: bytes
    asked: bytes = b""


Policy = Callable[[Envelope], Sequence[float]]
"""The delay in seconds of each delivered copy; empty: the message is lost. Must be deterministic given its seed."""

Answer = bytes | BusClosed | BusDisconnected


def deliver_once(envelope: Envelope) -> Sequence[float]:
    return (0.0,)


class MemoryHub:
    """Where the clients of one simulated cluster meet. Belongs to one event loop."""

    def __init__(self, policy: Policy = deliver_once) -> None:
        self.policy = policy
        self.stores: dict[str, MemoryStore] | None = {}
        """By bucket; None: a server without such a memory."""
        self._subscriptions: list[_MemorySubscription] = []
        self._routes: dict[str, list[_MemorySubscription]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._inboxes: dict[str, tuple[str, asyncio.Future[Answer]]] = {}

    def client(self, name: str, limits: DispatchLimits | None = None) -> "MemoryBus":
        """A new connection; `name` is what policies see as sender and receiver."""
        return MemoryBus(self, name, limits or DispatchLimits())

    def attach(self, subscription: "_MemorySubscription") -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def detach(self, subscription: "_MemorySubscription") -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._routes.clear()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer."""
        return len(self._inboxes)

    def send(self, sender: str, message: Message) -> bool:
        """Delivers to every subscription of a connected client there is now; False if there is none."""
        found = [sub for sub in self._route(message.subject) if sub.bus.connected]
        kind: Literal["publish", "request"] = "request" if message.reply else "publish"
        for sub in found:
            envelope = Envelope(kind, sender, sub.bus.name, message.subject, message.data)
            self._carry(envelope, partial(sub.deliver, message))
        return bool(found)

    def inject(self, message: Message, delay_s: float) -> None:
        """Delivers a message that nobody sent, past the policy: what a late or hostile peer may still say."""
        for sub in self._route(message.subject):
            asyncio.get_running_loop().call_later(delay_s, sub.deliver, message)

    def open_inbox(self, owner: str) -> tuple[str, asyncio.Future[Answer]]:
        """A fresh reply subject and what its first answer sets."""
        self._sequence += 1
        inbox = f"_INBOX.{self._sequence}"
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._inboxes[inbox] = (owner, answer)
        return inbox, answer

    def close_inbox(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def answer(self, sender: str, message: Message, data: bytes) -> None:
        """Carries the answer to whoever asked, if it still waits."""
        if message.reply in self._inboxes:
            receiver, _ = self._inboxes[message.reply]
            envelope = Envelope("reply", sender, receiver, message.subject, data, message.data)
            self._carry(envelope, partial(self._set_answer, message.reply, data))

    def _set_answer(self, inbox: str, data: bytes) -> None:
        if inbox in self._inboxes:
            _, answer = self._inboxes[inbox]
            if not answer.done():
                answer.set_result(data)

    def _carry(self, envelope: Envelope, deliver: Callable[[], None]) -> None:
        """Calls `deliver` as often and as late as the policy says, never before the caller yields."""
        loop = asyncio.get_running_loop()
        for delay_s in self.policy(envelope):
            if delay_s <= 0:
                loop.call_soon(deliver)
                continue
            # asyncio does not keep timers of the same instant in order. So one timer an entry, each of which takes
            # the first entry of all: that one is due, since it is no later than the entry the timer was made for.
            when = loop.time() + delay_s
            self._sequence += 1
            heapq.heappush(self._due, (when, self._sequence, deliver))
            loop.call_at(when, self._deliver_first)

    def _deliver_first(self) -> None:
        heapq.heappop(self._due)[2]()

    def _route(self, subject: str) -> list["_MemorySubscription"]:
        """The subscriptions to a subject, in the order they were made; remembered until one comes or goes."""
        found = self._routes.get(subject)
        if found is None:
            if len(self._routes) >= _NUM_ROUTES:
                self._routes.clear()
            found = [sub for sub in self._subscriptions if matches(sub.pattern, subject)]
            self._routes[subject] = found
        return found


class _MemorySubscription:
    def __init__(self, hub: MemoryHub, bus: "MemoryBus", pattern: str, lane: Lane) -> None:
        self.bus = bus
        self.pattern = pattern
        self.lane = lane
        self._hub = hub

    def deliver(self, message: Message) -> None:
        if self.bus.connected:
            self.lane.deliver(message)

    async def unsubscribe(self) -> None:
        self.end()

    def end(self) -> None:
        self._hub.detach(self)
        self.lane.close()


class MemoryBus:
    """One client of a hub. Closing it is how a simulated process dies: at once its peers get NoResponders. `cut` and
    `mend` are its connection's way to the server; nothing is kept for it meanwhile."""

    def __init__(self, hub: MemoryHub, name: str, limits: DispatchLimits) -> None:
        self.name = name
        self._stats = BusStats()
        self._hub = hub
        self._dispatcher = Dispatcher(self._stats, self._reply, limits)
        self._subscriptions: list[_MemorySubscription] = []
        self._asking: dict[str, asyncio.Future[Answer]] = {}
        self._up = asyncio.Event()
        self._up.set()
        self._settled_at = 0.0
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    @property
    def stats(self) -> BusStats:
        return self._stats

    def cut(self) -> None:
        """The connection is lost, and the client notices."""
        if self.connected:
            self._up.clear()
            self._stats.disconnects += 1
            self._end_requests(BusDisconnected("the connection was lost"))

    def mend(self) -> None:
        """The connection is back, with all its subscriptions."""
        if not self._closed and not self._up.is_set():
            self._up.set()
            self._stats.reconnects += 1
            self._settled_at = asyncio.get_running_loop().time() + SETTLE_S

    async def publish(self, subject: str, data: bytes) -> None:
        self._check(subject, data)
        self._check_connected()
        self._stats.published += 1
        self._hub.send(self.name, Message(subject, data))

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

    async def subscribe(self, subject: str, handler: Handler) -> _MemorySubscription:
        check_pattern(subject)
        if self._closed:
            raise BusClosed("the bus was closed")
        subscription = _MemorySubscription(self._hub, self, subject, self._dispatcher.lane(handler))
        self._subscriptions.append(subscription)
        self._hub.attach(subscription)
        return subscription

    async def bucket(self, bucket: Bucket) -> MemoryKeyValue:
        check_bucket(bucket)
        self._check_connected()
        if self._hub.stores is None:
            raise NoKeyValue("this server has no memory")
        store = self._hub.stores.setdefault(bucket.name, MemoryStore(bucket))
        store.bucket = bucket
        return MemoryKeyValue(store, self._check_connected)

    def sever(self) -> None:
        """kill -9, as the others see it: from now on nothing comes from here and nothing arrives."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.end()
        self._end_requests(BusClosed("the bus was closed"))
        self._up.set()

    async def close(self) -> None:
        self.sever()
        await self._dispatcher.close()

    async def _ask_until_answered(self, subject: str, data: bytes) -> bytes:
        while True:
            await self._up.wait()
            self._check(subject, data)
            try:
                return await self._ask(subject, data)
            except NoResponders:
                if asyncio.get_running_loop().time() >= self._settled_at:
                    raise
            except BusDisconnected:
                pass  # asked again once there is a connection
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, subject: str, data: bytes) -> bytes:
        inbox, answer = self._hub.open_inbox(self.name)
        self._asking[inbox] = answer
        try:
            if not self._hub.send(self.name, Message(subject, data, inbox)):
                raise NoResponders(f"nobody listens on {subject}")
            result = await answer
        finally:
            self._hub.close_inbox(inbox)
            del self._asking[inbox]
        if isinstance(result, Exception):
            raise result
        return result

    async def _reply(self, message: Message, data: bytes) -> None:
        self._check(message.subject, data)
        self._check_connected()
        self._hub.answer(self.name, message, data)

    def _end_requests(self, error: BusClosed | BusDisconnected) -> None:
        for answer in self._asking.values():
            if not answer.done():
                answer.set_result(error)

    def _check(self, subject: str, data: bytes) -> None:
        check_subject(subject)
        check_payload(subject, data)
        if self._closed:
            raise BusClosed("the bus was closed")

    def _check_connected(self) -> None:
        if not self.connected:
            raise BusDisconnected("there is no connection")
