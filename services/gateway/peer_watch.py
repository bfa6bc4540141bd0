"""The gateway pings the workers that serve its requests: one that died is noticed in a fraction of a second.

Heartbeats say that a worker is silent; only the bus says that it is gone, because nobody listens at its address any
more. That is asked several times a second, once for all requests of a worker, so that the other legs of its requests
end at once and not when a timer of theirs runs out. A worker that does not answer is not judged here: it may be slow,
or the network may be cut; heartbeats and replays find that out.
"""

from collections.abc import Callable, Iterable

from shared.bus.base import BusError, NoResponders
from shared.protocol import subjects
from shared.protocol.messages import Ping
from shared.protocol.wire import encode
from shared.runtime.deps import Deps

EVERY_S = 0.1
_ANSWER_S = 1.0
_MISSES_UNTIL_LOST = 4
_PAUSE_S = 0.025


class PeerWatch:
    """in_use: (role, peer) of the workers that serve us now. on_gone: called with a peer that nobody answers for."""

    def __init__(
        self, deps: Deps, in_use: Callable[[], Iterable[tuple[str, str]]], on_gone: Callable[[str], None]
    ) -> None:
        self._deps = deps
        self._in_use = in_use
        self._on_gone = on_gone
        self._asking: set[str] = set()

    async def run(self) -> None:
        """Asks until cancelled, by time and not by traffic; no worker holds up another."""
        while True:
            await self._deps.clock.sleep(EVERY_S)
            for role, peer in self._in_use():
                if peer not in self._asking:
                    self._asking.add(peer)
                    self._deps.spawn(self._ask(role, peer), f"ping-{peer}")

    async def _ask(self, role: str, peer: str) -> None:
        deps, where = self._deps, subjects.subject(role, peer, subjects.PING)
        try:
            for _ in range(_MISSES_UNTIL_LOST):
                try:
                    await deps.bus.request(where, encode(Ping()), _ANSWER_S)
                    return
                except NoResponders:  # it may have lost its connection for a moment
                    await deps.clock.sleep(_PAUSE_S)
                except BusError:
                    return
            self._on_gone(peer)
        finally:
            self._asking.discard(peer)
