"""P's half of the model."""

from dataclasses import replace

from shared.machines import decode, prefill, transfer
from shared.machines.stepping import Cause, Ended, Event, Outcome, Quiesced, TellGateway
from tests.machines.handoff_parts import DECODE, GATEWAY, NUM_UNITS, PREFILL, ROOM, Message, P, Parts, Writer


class PrefillHalf(Parts):
    def _step_p(self, event: Event) -> None:
        ticket = self.p.ticket
        if ticket is None:
            return
        step = prefill.step(ticket, event)
        self._note(PREFILL, ticket, step)
        self.p.ticket = step.ticket
        for effect in step.effects:
            if isinstance(effect, prefill.TellDecode):
                self.send(DECODE, "fail", ticket.generation, replace(effect.cause, by=PREFILL))
            elif isinstance(effect, TellGateway):
                self.send(GATEWAY, "fail", ticket.generation, effect.cause)
        if step.ticket.state in prefill.TERMINAL:
            self.p.books.give_back_all(ticket.generation)
            self.p.ended.add(ticket.generation)
            self.p.ticket = None

    def _prefill_gets_prefill(self, message: Message) -> None:
        if self.p.ticket is not None or message.generation in self.p.ended or self.p.books.free < NUM_UNITS:
            return
        self.p.books.take(NUM_UNITS, message.generation)
        self.p.ticket, self.p.sent = prefill.PrefillTicket(ROOM, message.generation), 0

    def _prefill_gets_destination(self, message: Message) -> None:
        self._step_p(prefill.DestinationArrived(message.generation))

    def _prefill_gets_cancel(self, message: Message) -> None:
        self.p.ended.add(message.generation)
        self._step_p(Ended(message.generation, Cause("cancelled", by=GATEWAY)))

    def _prefill_gets_fail(self, message: Message) -> None:
        self._step_p(Ended(message.generation, message.data))

    def _prefill_gets_committed(self, message: Message) -> None:
        if self.p.ticket is not None and self.p.ticket.state is not P.WAITING and self.p.sent >= NUM_UNITS:
            self._step_p(prefill.CommitAnswered(message.generation))

    def p_sends_a_unit(self) -> bool:
        """Knocks at D's door with the next unit; the door alone decides."""
        ticket, door = self.p.ticket, self.d.door
        if ticket is None or ticket.state is not P.COMPUTING or self.p.sent >= NUM_UNITS or self.p.reading is not None:
            return False
        if door is None or not transfer.may_write(door):
            self._step_p(Ended(ticket.generation, Cause("transfer_refused", by=PREFILL)))
            return True
        step = transfer.step(door, transfer.WriterEntered(ticket.generation))
        if step.outcome is not Outcome.APPLIED:
            self._step_p(Ended(ticket.generation, Cause("transfer_refused", by=PREFILL)))
            return True
        self.d.door, self.p.reading = step.ticket, ticket.generation
        self.d.writers.append(Writer(ticket.generation, (self.p.sent,)))
        if transfer.AnnounceFirstBytes() in step.effects:
            self._step_d(decode.FirstBytes(ticket.generation))
        return True

    def p_commits(self) -> bool:
        """All was confirmed: the record goes out. Also its repetition."""
        ticket = self.p.ticket
        if ticket is None or self.p.sent < NUM_UNITS or self.p.reading is not None:
            return False
        if ticket.state is P.COMPUTING:
            self._step_p(prefill.AllSent(ticket.generation))
        elif ticket.state is not P.COMMITTING:
            return False
        self.send(DECODE, "commit", ticket.generation)
        return True

    def p_quiesces(self) -> bool:
        """No transfer reads its pages any more."""
        if self.p.ticket is None or self.p.ticket.state is not P.RELEASING or self.p.reading is not None:
            return False
        self._step_p(Quiesced(self.p.ticket.generation))
        return True
