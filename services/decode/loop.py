"""From the engine's steps to the gateways: each step's tokens leave as one message per gateway.

A ticket's tokens are kept until its tombstone goes, so a message that NATS loses costs a replay and nothing else.
"""

import asyncio
from collections.abc import Callable

from services.decode.ticket import DecodeTicket
from shared.bus.base import BusError
from shared.engine.api import StepOutput
from shared.machines import decode as machine
from shared.protocol import subjects
from shared.protocol.messages import TicketTimings, TokenEntry, Tokens
from shared.protocol.wire import encode
from shared.runtime.deps import Deps
from shared.transfer.link import TicketKey


class TokenOutbox:
    """The engine's listener. One task sends; what arrives while a message is on its way leaves together in the next."""

    def __init__(
        self,
        deps: Deps,
        find: Callable[[TicketKey], DecodeTicket | None],
        begun_at: Callable[[TicketKey], float | None],
    ) -> None:
        self._deps = deps
        self._find = find
        self._begun_at = begun_at
        self._pending: dict[str, dict[tuple[int, int], TokenEntry]] = {}
        self._timings: dict[str, dict[int, TicketTimings]] = {}
        self._stored: dict[str, dict[int, int]] = {}
        self._wake = asyncio.Event()

    def on_step(self, output: StepOutput) -> None:
        """Logs the step's tokens with their tickets and queues them. A token of a ticket that ended is dropped."""
        for out in output.tokens:
            ticket = self._find(out.key)
            if ticket is None or not ticket.log(out):
                self._deps.counters.add("tokens_dropped")
                continue
            if not ticket.timed:
                self._time_prompt(ticket)
            self.send_from(ticket, out.index, out.choice)
        for failure in output.failed:
            if (ticket := self._find(failure.key)) is not None:
                ticket.end(failure.code, failure.message, by="decode")
        for key in output.preempted:
            if (ticket := self._find(key)) is not None:
                ticket.apply(machine.Preempted(key.generation))
        for key in output.resumed:
            if (ticket := self._find(key)) is not None:
                ticket.apply(machine.Resumed(key.generation))

    def _time_prompt(self, ticket: DecodeTicket) -> None:
        """The engine has drawn the ticket's first token and nothing was handed over: the prompt was computed here."""
        now = self._deps.clock.now()
        begun_at = self._begun_at(ticket.key) or now
        told = {"queue_s": begun_at - ticket.granted_at, "prefill_s": now - begun_at}
        ticket.timings = ticket.timings.model_copy(update=told)

    def send_from(self, ticket: DecodeTicket, index: int, choice: int | None = None) -> None:
        """Queues choice `choice` (all of them: None) from token `index` on for the ticket's gateway."""
        gateway = ticket.order.gateway
        pending = self._pending.setdefault(gateway, {})
        for number in range(len(ticket.choices)) if choice is None else (choice,):
            earlier = pending.get((ticket.key.room, number))
            start = index if earlier is None else min(index, earlier.index)
            pending[ticket.key.room, number] = ticket.entry(number, start)
        if not ticket.timed:
            ticket.timed = True
            self._timings.setdefault(gateway, {})[ticket.key.room] = ticket.timings
        self._wake.set()

    def send_stored(self, ticket: DecodeTicket, position: int) -> None:
        """The stores can bring the ticket's state back up to there."""
        self._stored.setdefault(ticket.order.gateway, {})[ticket.key.room] = position
        self._wake.set()

    async def run(self) -> None:
        """Sends for ever; the service owns this task."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, {}
            timings, self._timings = self._timings, {}
            stored, self._stored = self._stored, {}
            for gateway in dict.fromkeys((*pending, *stored)):
                message = Tokens(
                    sender=self._deps.peer,
                    entries=tuple(pending.get(gateway, {}).values()),
                    timings=tuple(timings.get(gateway, {}).items()),
                    stored=tuple(stored.get(gateway, {}).items()),
                )
                await self._send(gateway, message)

    async def _send(self, gateway: str, message: Tokens) -> None:
        try:
            await self._deps.bus.publish(subjects.subject("gateway", gateway, subjects.TOKENS), encode(message))
        except (BusError, ValueError):  # ValueError: more than a message holds
            # The gateway notices the gap or the silence and asks for a replay.
            self._deps.counters.add("token_messages_unsent")
