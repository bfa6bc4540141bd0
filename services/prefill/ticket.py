"""One live ticket on P: its machine and what it waits for."""

import asyncio

from shared.machines import prefill as machine
from shared.protocol.messages import Destination, Prefill
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.worker.tickets import LiveTicket


class PrefillTicket(LiveTicket[Prefill, machine.PrefillTicket]):
    """destination: where the state goes, once D has said it."""

    def __init__(self, order: Prefill, clock: Clock, counters: Counters) -> None:
        state = machine.PrefillTicket(order.room, order.generation)
        super().__init__(order, state, machine.step, clock, counters)
        self.destination: asyncio.Future[Destination] = asyncio.get_running_loop().create_future()
