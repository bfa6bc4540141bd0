"""What Baton needs of a message bus. NATS is one (`nats.py`), its in-memory twin another (`memory.py`); both pass the
same contract suite. Delivery is at most once and unordered between publishers: everything above repeats and fences.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shared.bus.kv import Bucket, KeyValue

MAX_PAYLOAD_BYTES = 1024 * 1024


class BusError(Exception):
    """The bus cannot do this now."""


class BusTimeout(BusError):
    """Nobody answered in time."""


class NoResponders(BusError):
    """Nobody listens on that subject, and it is known at once. The peer is gone, or has lost its connection for a
    moment: ask a second time before declaring it dead."""


class BusDisconnected(BusError):
    """There was no connection to the bus, so this says nothing about the peer."""


class BusClosed(BusError):
    """The connection was closed on our side."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as delivered; `reply` is empty where nobody waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(slots=True)
class BusStats:
    """Counters of one client, since it was made."""

    published: int = 0
    requests: int = 0
    replies: int = 0
    delivered: int = 0
    """Messages handed to a handler."""
    dropped: int = 0
    """Messages for us that found the backlog full."""
    answers: int = 0
    """Answers that somebody waited for."""
    late_answers: int = 0
    """Answers that nobody waited for any more (by NATS only; the twin never carries one)."""
    handler_errors: int = 0
    timeouts: int = 0
    no_responders: int = 0
    disconnects: int = 0
    reconnects: int = 0
    refused: int = 0
    """Messages that could not be queued for sending."""
    errors: int = 0
    """What else the connection reported."""


Handler = Callable[[Message], Awaitable[bytes | None]]
"""Gets a message and returns the answer (None: no answer is sent, and a request times out). It may raise: the error is
logged and counted, no answer is sent, and the subscription lives on. It runs in a task of its own, owned by the bus,
so a slow handler does not hold others. Handlers of one subscription start in the order of arrival."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Idempotent. No handler starts afterwards; those that run go on."""


class Bus(Protocol):
    """Subjects that are malformed raise ValueError from every method that takes one."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Sends and forgets. Raises BusError if it cannot even be queued, ValueError above MAX_PAYLOAD_BYTES."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """One answer, or BusTimeout / NoResponders / BusError. The peer may get the request more than once."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """`subject` may hold the wildcards `*` (one token) and a final `>` (all the rest). On return the
        subscription is in force, unless there is no connection: then it is once there is one."""

    async def bucket(self, bucket: "Bucket") -> "KeyValue":
        """A key-value memory beside the bus (`kv.py`), made where it is not there; NoKeyValue where this bus has
        none."""

    @property
    def connected(self) -> bool: ...

    @property
    def stats(self) -> BusStats: ...

    async def close(self) -> None:
        """Ends every subscription and running handler, except a handler that calls it. Idempotent."""
