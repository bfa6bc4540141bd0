"""Workers ask the gateways they work for which tickets are over.

A cancel can get lost for longer than anybody repeats it while the gateway that sent it lives on; without a question the
ticket's pages would be held until the request's deadline. The answer is sound whatever was delayed: a gateway opens a
room before anybody hears of it and never uses it again, so a room that it does not know is over. One that it has left
for another gateway it knows for a while.
"""

from collections.abc import Callable, Iterable

from shared.bus.ask import ask
from shared.protocol import subjects
from shared.protocol.messages import RollCall, RollCallReply
from shared.protocol.wire import MAX_ROLL_CALL
from shared.runtime.deps import Deps
from shared.runtime.errors import DeadlineExceeded, PeerLost, ProtocolError

EVERY_S = 2.0


class RollCalls:
    """rooms: gateway -> the rooms of its live tickets. on_gone: told of each room that its gateway does not know."""

    def __init__(
        self, deps: Deps, rooms: Callable[[], dict[str, list[int]]], on_gone: Callable[[str, Iterable[int]], None]
    ) -> None:
        self._deps = deps
        self._rooms = rooms
        self._on_gone = on_gone
        self._asking: set[str] = set()

    async def run(self) -> None:
        """Asks until cancelled, by time and not by traffic. A gateway that does not answer holds up no other."""
        while True:
            await self._deps.clock.sleep(EVERY_S)
            for gateway, rooms in self._rooms().items():
                if gateway not in self._asking:
                    self._asking.add(gateway)
                    self._deps.spawn(self._ask(gateway, rooms), f"roll-call-{gateway}")

    async def _ask(self, gateway: str, rooms: list[int]) -> None:
        deps = self._deps
        where = subjects.subject("gateway", gateway, subjects.ROLL_CALL)
        try:
            for start in range(0, len(rooms), MAX_ROLL_CALL):
                question = RollCall(sender=deps.peer, rooms=tuple(rooms[start : start + MAX_ROLL_CALL]))
                deadline = deps.clock.now() + EVERY_S
                reply = await ask(deps.bus, deps.clock, where, question, RollCallReply, deadline=deadline)
                self._on_gone(gateway, set(reply.gone) & set(question.rooms))
        except (PeerLost, DeadlineExceeded, ProtocolError):
            return  # who is gone is known from the heartbeats, and who is slow is asked again
        finally:
            self._asking.discard(gateway)
