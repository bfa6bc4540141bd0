"""One live ticket on P: its machine and what it waits for."""

import asyncio
from collections.abc import Callable
from typing import Any

from shared.machines import prefill as machine
from shared.machines.stepping import Event, Outcome
from shared.protocol.messages import Destination, Prefill
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.scope import EndScope
from shared.transfer.link import TicketKey


class LiveTicket:
    """Belongs to the desk's table from the verdict until its pages are free.

    Every change of state goes through `apply`, which steps the machine and hands the effects to `perform`.
    """

    def __init__(self, order: Prefill, clock: Clock, counters: Counters) -> None:
        self.order = order
        self.key = TicketKey(order.room, order.generation)
        self.state = machine.PrefillTicket(order.room, order.generation)
        self.scope = EndScope()
        self.destination: asyncio.Future[Destination] = asyncio.get_running_loop().create_future()
        self.perform: Callable[[Any], None] = lambda effect: None
        self.deadline = clock.now() + order.remaining_s
        self._counters = counters

    def apply(self, event: Event) -> None:
        """Steps the machine. A stale or late event is counted and changes nothing."""
        step = machine.step(self.state, event)
        if step.outcome is not Outcome.APPLIED:
            self._counters.add(f"events_{step.outcome.value}")
            return
        self.state = step.ticket
        for effect in step.effects:
            self.perform(effect)
