"""Control messages are idempotent and repeated until they are answered: this is the repeating."""

from typing import TypeVar

from shared.bus.base import Bus, BusClosed, BusError, BusTimeout, NoResponders
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode
from shared.runtime.clock import Clock
from shared.runtime.errors import DeadlineExceeded, PeerLost, ProtocolError

R = TypeVar("R", bound=WireModel)

_MISSES_UNTIL_LOST = 4
_PAUSE_S = 0.05
_PROMPT_TRIES = 2
_DOUBLINGS = 16
_LONGEST_S = 8.0
"""After so many tries each waits twice as long as the one before, up to this: where a round trip takes longer than
`every_s`, as on an overloaded host, the answer must find somebody who still waits for it."""
_LEAST_S = 1e-6
"""Less time than this is none: added to the clock it may not even change its reading."""


async def ask(
    bus: Bus,
    clock: Clock,
    subject: str,
    message: WireModel,
    answer: type[R],
    *,
    deadline: float,
    every_s: float = 0.5,
) -> R:
    """Sends `message` every `every_s`, later less often, until it is answered; its `remaining_s`, if it has one,
    shrinks meanwhile.

    Raises PeerLost once the bus says several times running that nobody listens there, DeadlineExceeded at `deadline`
    (clock time), ProtocolError for an answer of the wrong kind. A bus that is away is waited for.
    """
    misses = tries = 0
    began = clock.now()
    remaining_s = getattr(message, "remaining_s", None)
    while (left := deadline - clock.now()) > _LEAST_S:
        if remaining_s is not None:
            message = message.model_copy(update={"remaining_s": max(0.0, remaining_s - (clock.now() - began))})
        try:
            tries += 1
            wait_s = min(max(every_s, _LONGEST_S), every_s * 2.0 ** min(_DOUBLINGS, max(0, tries - _PROMPT_TRIES)))
            return decode(answer, await bus.request(subject, encode(message), min(wait_s, left)))
        except MalformedMessage as error:
            raise ProtocolError(f"{subject} answered with something else: {error}") from error
        except BusTimeout:
            misses = 0
        except NoResponders as error:
            misses += 1
            if misses >= _MISSES_UNTIL_LOST:
                raise PeerLost(f"nobody answers at {subject}") from error
            await clock.sleep(_PAUSE_S)
        except BusClosed as error:
            raise PeerLost("our own bus connection was closed") from error
        except BusError:
            await clock.sleep(_PAUSE_S)
    raise DeadlineExceeded(f"no answer from {subject} in time")
