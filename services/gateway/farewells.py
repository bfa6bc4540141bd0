"""Telling workers that an attempt is over, until they hear it.

A worker that misses its cancel holds pages until the request's deadline, so each is told until it answers, is gone,
or that deadline has passed. The number of those being told is bounded: beyond it a farewell is dropped and counted, and
the worker learns of the end by its own roll call (`shared/worker/roll_call.py`).
"""

from shared.bus.ask import ask
from shared.protocol import subjects
from shared.protocol.messages import Cancel, Verdict
from shared.runtime.deps import Deps
from shared.runtime.errors import DeadlineExceeded, PeerLost, ProtocolError

_EAGER_S = 5.0
_EVERY_S = 0.5
_LATER_EVERY_S = 2.0


class Farewells:
    """capacity: cancels under way at once."""

    def __init__(self, deps: Deps, capacity: int = 4096) -> None:
        self._deps = deps
        self._capacity = capacity
        self._num_open = 0

    def __len__(self) -> int:
        return self._num_open

    def tell(self, role: str, peer: str, order: Cancel, until: float) -> None:
        """Returns at once. until: after that the worker's own timer has ended it."""
        if self._num_open >= self._capacity:
            self._deps.counters.add("cancels_dropped")
            return
        self._num_open += 1
        self._deps.spawn(
            self._tell(subjects.subject(role, peer, subjects.CANCEL), order, until), f"cancel-{order.room}"
        )

    async def _tell(self, where: str, order: Cancel, until: float) -> None:
        deps = self._deps
        eager_until = deps.clock.now() + _EAGER_S  # also where the deadline was what ended it
        try:
            try:
                await ask(deps.bus, deps.clock, where, order, Verdict, deadline=eager_until, every_s=_EVERY_S)
            except DeadlineExceeded:
                await ask(deps.bus, deps.clock, where, order, Verdict, deadline=until, every_s=_LATER_EVERY_S)
        except (PeerLost, DeadlineExceeded, ProtocolError):
            deps.counters.add("cancels_unheard")
        finally:
            self._num_open -= 1
