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
    BusStats,
    BusTimeout,
    Handler,
    Message,
    NoResponders,
)
from shared.bus.dispatch import Dispatcher, DispatchLimits, Lane
from shared.bus.patterns import check_pattern, check_payload, check_subject, matches


@dataclass(frozen=True, slots=True)
class Envelope:
    """One delivery to one receiver, as a policy sees it. A reply carries the subject of its request."""

    kind: Literal["publish", "request", "reply"]
    sender: str
    receiver: str
    subject: str
    data: bytes


Policy = Callable[[Envelope], Sequence[float]]
"""The delay in seconds of each delivered copy; empty: the message is lost. Must be deterministic given its seed."""


def deliver_once(envelope: Envelope) -> Sequence[float]:
    return (0.0,)


class MemoryHub:
    """Where the clients of one simulated cluster meet. Belongs to one event loop."""

    def __init__(self, policy: Policy = deliver_once) -> None:
        self.policy = policy
        self._subscriptions: list[_MemorySubscription] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._inboxes: dict[str, tuple[str, asyncio.Future[bytes | BusClosed]]] = {}

    def client(self, name: str, limits: DispatchLimits | None = None) -> "MemoryBus":
        """A new connection; `name` is what policies see as sender and receiver."""
        return MemoryBus(self, name, limits or DispatchLimits())

    def attach(self, subscription: "_MemorySubscription") -> None:
        self._subscriptions.append(subscription)

    def detach(self, subscription: "_MemorySubscription") -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def send(self, sender: str, message: Message) -> bool:
        """Delivers to every subscription there is now; False if there is none."""
        found = [sub for sub in self._subscriptions if matches(sub.pattern, message.subject)]
        kind: Literal["publish", "request"] = "request" if message.reply else "publish"
        for sub in found:
            envelope = Envelope(kind, sender, sub.owner, message.subject, message.data)
            self._carry(envelope, partial(sub.lane.deliver, message))
        return bool(found)

    def open_inbox(self, owner: str) -> tuple[str, asyncio.Future[bytes | BusClosed]]:
        """A fresh reply subject and what its first answer sets."""
        self._sequence += 1
        inbox = f"_INBOX.{self._sequence}"
        answer: asyncio.Future[bytes | BusClosed] = asyncio.get_running_loop().create_future()
        self._inboxes[inbox] = (owner, answer)
        return inbox, answer

    def close_inbox(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def answer(self, sender: str, message: Message, data: bytes) -> None:
        """Carries the answer to whoever asked, if it still waits."""
        if message.reply in self._inboxes:
            receiver, _ = self._inboxes[message.reply]
            envelope = Envelope("reply", sender, receiver, message.subject, data)
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


class _MemorySubscription:
    def __init__(self, hub: MemoryHub, owner: str, pattern: str, lane: Lane) -> None:
        self.owner = owner
        self.pattern = pattern
        self.lane = lane
        self._hub = hub

    async def unsubscribe(self) -> None:
        self.end()

    def end(self) -> None:
        self._hub.detach(self)
        self.lane.close()


class MemoryBus:
    """One client of a hub. Closing it is how a simulated process dies: at once its peers get NoResponders."""

    def __init__(self, hub: MemoryHub, name: str, limits: DispatchLimits) -> None:
        self.name = name
        self._stats = BusStats()
        self._hub = hub
        self._dispatcher = Dispatcher(self._stats, self._reply, limits)
        self._subscriptions: list[_MemorySubscription] = []
        self._asking: dict[str, asyncio.Future[bytes | BusClosed]] = {}
        self._closed = False

    @property
    def connected(self) -> bool:
        return not self._closed

    @property
    def stats(self) -> BusStats:
        return self._stats

    async def publish(self, subject: str, data: bytes) -> None:
        self._check(subject, data)
        self._stats.published += 1
        self._hub.send(self.name, Message(subject, data))

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self._check(subject, data)
        self._stats.requests += 1
        inbox, answer = self._hub.open_inbox(self.name)
        self._asking[inbox] = answer
        try:
            if not self._hub.send(self.name, Message(subject, data, inbox)):
                self._stats.no_responders += 1
                raise NoResponders(f"nobody listens on {subject}")
            async with asyncio.timeout(timeout_s):
                result = await answer
            if isinstance(result, BusClosed):
                raise result
            return result
        except TimeoutError as error:
            self._stats.timeouts += 1
            raise BusTimeout(f"no answer from {subject} within {timeout_s:g} s") from error
        finally:
            self._hub.close_inbox(inbox)
            del self._asking[inbox]

    async def subscribe(self, subject: str, handler: Handler) -> _MemorySubscription:
        check_pattern(subject)
        if self._closed:
            raise BusClosed("the bus was closed")
        subscription = _MemorySubscription(self._hub, self.name, subject, self._dispatcher.lane(handler))
        self._subscriptions.append(subscription)
        self._hub.attach(subscription)
        return subscription

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for subscription in self._subscriptions:
            subscription.end()
        for answer in self._asking.values():
            if not answer.done():
                answer.set_result(BusClosed("the bus was closed"))
        await self._dispatcher.close()

    async def _reply(self, message: Message, data: bytes) -> None:
        self._check(message.subject, data)
        self._hub.answer(self.name, message, data)

    def _check(self, subject: str, data: bytes) -> None:
        check_subject(subject)
        check_payload(subject, data)
        if self._closed:
            raise BusClosed("the bus was closed")
