"""Subscribing a typed handler to one verb of one process."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.bus.base import Bus, Message, Subscription
from shared.protocol import subjects
from shared.protocol.messages import Verdict
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode
from shared.runtime.counters import Counters

M = TypeVar("M", bound=WireModel)


async def listen(
    bus: Bus,
    role: str,
    peer: str,
    verb: str,
    kind: type[M],
    handle: Callable[[M], Awaitable[WireModel | None]],
    counters: Counters,
) -> Subscription:
    """Subscribes `handle` to one verb. What comes is counted, and what does not decode is answered with a refusal."""

    async def on_message(message: Message) -> bytes | None:
        counters.add(f"received_{verb}")
        try:
            decoded = decode(kind, message.data)
        except MalformedMessage as error:
            counters.add(f"malformed_{verb}")
            return encode(Verdict(ok=False, code="protocol_error", message=str(error)))
        answer = await handle(decoded)
        return None if answer is None else encode(answer)

    return await bus.subscribe(subjects.subject(role, peer, verb), on_message)
