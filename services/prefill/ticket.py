"""One live ticket on P: its machine and what it waits for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.engine.sharing import Sharing
from shared.machines import prefill as machine
from shared.protocol.messages import Destination, Prefill
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.worker.tickets import LiveTicket


class UnderWay:
    """For how long at least one of several spans of time was open."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._num_open = 0
        self._since = 0.0

    @contextmanager
    def span(self, clock: Clock) -> Iterator[None]:
        if not self._num_open:
            self._since = clock.now()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.total_s += clock.now() - self._since


class PrefillTicket(LiveTicket[Prefill, machine.PrefillTicket]):
    """destination: where the state goes, once D has said it. moving: while state of it is on its way."""

    def __init__(self, order: Prefill, clock: Clock, counters: Counters) -> None:
        state = machine.PrefillTicket(order.room, order.generation)
        super().__init__(order, state, machine.step, clock, counters)
        self.destination: asyncio.Future[Destination] = asyncio.get_running_loop().create_future()
        self.moving = UnderWay()
        self.sharing = Sharing(order.salt)
