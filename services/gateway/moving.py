"""Streams leave a decode worker that is told to end: each goes on elsewhere, as after a loss, but while all is well.

A few at a time: those who take them over compute what the stores lack of several in one step, and are not flooded. Who
finds no other place stays to the end.
"""

from collections.abc import Callable

from services.gateway.admission import RoomQueue
from services.gateway.router import Demand
from shared.runtime.errors import BatonError

_AT_ONCE = 4


class Draining(BatonError):
    """The worker that serves a stream is about to end, and another one can take it over. Never reaches a client."""

    code = "draining"
    retryable = True


class Moves:
    """Of one gateway. is_on: whether streams are moved at all."""

    def __init__(self, rooms: RoomQueue, *, is_on: bool) -> None:
        self._rooms = rooms
        self._is_on = is_on
        self._under_way: set[object] = set()

    def may_begin(self, who: object, worker: str, demand: Callable[[], Demand]) -> bool:
        """True: `who` is on its way from now on until `ended`."""
        if not self._is_on or len(self._under_way) >= _AT_ONCE:
            return False
        if not self._rooms.could_serve(demand(), without=worker):
            return False
        self._under_way.add(who)
        return True

    def ended(self, who: object) -> None:
        """It has its next token, was refused, or ended itself. Harmless where it was not on its way."""
        self._under_way.discard(who)
