"""D's half of the model, with the door of its sidecar and the writers inside."""

from dataclasses import replace

from shared.machines import decode, transfer
from shared.machines.stepping import FINISHED, Cause, Ended, Event, Quiesced, TellGateway
from tests.machines.handoff_parts import (
    DECODE,
    GATEWAY,
    NUM_TOKENS,
    NUM_UNITS,
    PREFILL,
    ROOM,
    WRONG,
    D,
    Message,
    P,
    Parts,
    right_token,
)


class DecodeHalf(Parts):
    def _step_d(self, event: Event) -> None:
        ticket = self.d.ticket
        if ticket is None:
            return
        step = decode.step(ticket, event)
        self._note(DECODE, ticket, step)
        self.d.ticket = step.ticket
        for effect in step.effects:
            self._perform_d(ticket.generation, effect)
        if step.ticket.state in decode.TERMINAL:
            self.d.books.give_back_all(ticket.generation)
            self.d.ended.add(ticket.generation)
            self.d.ticket, self.d.pages = None, []

    def _perform_d(self, generation: int, effect: object) -> None:
        match effect:
            case decode.StartGroup():
                self.commits[generation] += 1
                self._step_d(decode.Started(generation))
            case decode.AckCommit():
                self.send(PREFILL, "committed", generation)
            case decode.Quarantine():
                self._fence()
            case decode.TellPrefill(cause=cause):
                self.send(PREFILL, "fail", generation, replace(cause, by=DECODE))
            case TellGateway(cause=cause):
                self.send(GATEWAY, "fail", generation, cause)

    def _decode_gets_reserve(self, message: Message) -> None:
        d = self.d
        if d.ticket is not None or message.generation in d.ended or d.books.free < NUM_UNITS + 1:
            return
        d.pages = d.books.take(NUM_UNITS + 1, message.generation)
        d.ticket = decode.DecodeTicket(ROOM, message.generation, remote=True)
        d.door, d.num_tokens = transfer.ReceivingTicket(message.generation), message.data
        self.d_publishes()

    def d_publishes(self) -> bool:
        """The destination; also its repetition."""
        ticket = self.d.ticket
        if ticket is None or ticket.state not in (D.RESERVED, D.FILLING):
            return False
        self.send(PREFILL, "destination", ticket.generation)
        return True

    def _decode_gets_commit(self, message: Message) -> None:
        """Kept until the counts agree. Of a ticket that has taken over it is only answered."""
        ticket = self.d.ticket
        if ticket is not None and ticket.committed and ticket.generation == message.generation:
            self.send(PREFILL, "committed", message.generation)
        self.d.records.append(message.generation)

    def _decode_gets_cancel(self, message: Message) -> None:
        self.d.ended.add(message.generation)
        self._step_d(Ended(message.generation, Cause("cancelled", by=GATEWAY)))

    def _decode_gets_fail(self, message: Message) -> None:
        if self.d.ticket is not None and not self.d.ticket.committed:
            self._step_d(Ended(message.generation, message.data))

    def d_matches(self) -> bool:
        """A record whose bytes have all landed: the door is shut, and then D takes over. Which ticket a record is for
        is for the machine to say."""
        for generation in self.d.records:
            if self.d.landed[generation] == NUM_UNITS:
                if self.d.door is not None and self.d.door.generation == generation:
                    self._fence()
                    if self.d.door.state not in transfer.TERMINAL:
                        return False
                self.d.records.remove(generation)
                self._step_d(decode.CommitMatched(generation))
                return True
        return False

    def d_begins_a_step(self) -> bool:
        if self.d.ticket is None or self.d.ticket.state is not D.STARTED or self.d.in_step:
            return False
        self.d.in_step = True
        return True

    def d_ends_a_step(self) -> bool:
        """The step reads the ticket's state and writes the last page; what it gives is right if all it read was."""
        d, ticket = self.d, self.d.ticket
        if not d.in_step or ticket is None:
            return False
        d.in_step = False
        is_right = all(d.content.get(page) == ticket.generation for page in d.pages[:NUM_UNITS])
        d.content[d.pages[-1]] = ticket.generation
        if ticket.state is not D.STARTED or d.num_tokens == NUM_TOKENS:
            return True
        token = right_token(d.num_tokens) if is_right else WRONG
        self.send(GATEWAY, "tokens", ticket.generation, (d.num_tokens, token))
        d.num_tokens += 1
        if d.num_tokens == NUM_TOKENS:
            self._step_d(Ended(ticket.generation, Cause(FINISHED)))
        return True

    def d_preempts(self) -> bool:
        d, ticket = self.d, self.d.ticket
        if ticket is None or ticket.state is not D.STARTED or d.in_step:
            return False
        self._step_d(decode.Preempted(ticket.generation))
        d.books.give_back_all(ticket.generation)
        d.pages = []
        return True

    def d_resumes(self) -> bool:
        """The engine computes the state anew."""
        d, ticket = self.d, self.d.ticket
        if ticket is None or ticket.state is not D.PREEMPTED:
            return False
        d.pages = d.books.take(NUM_UNITS + 1, ticket.generation)
        d.content |= dict.fromkeys(d.pages, ticket.generation)
        self._step_d(decode.Resumed(ticket.generation))
        return True

    def d_quiesces(self) -> bool:
        """Proof: the door says that no writer is inside, and no step uses the pages."""
        d = self.d
        if d.ticket is None or d.ticket.state is not D.QUARANTINED or d.in_step:
            return False
        if d.door is None or d.door.state not in transfer.TERMINAL:
            return False
        self._step_d(Quiesced(d.ticket.generation))
        return True

    # The door, and who goes in and out of it

    def _fence(self) -> None:
        if self.d.door is not None:
            self.d.door = transfer.step(self.d.door, transfer.FenceRequested(self.d.door.generation)).ticket

    def writer_writes(self) -> bool:
        """Also after the fence: a writer that stands still for a while does not know better."""
        for writer in self.d.writers:
            if writer.at < len(writer.units):
                page = self.d.pages[writer.units[writer.at]]
                assert self.d.books.held_by(writer.generation), "written by who holds nothing"
                self.d.content[page] = writer.generation
                writer.at += 1
                return True
        return False

    def writer_leaves(self) -> bool:
        """Landed if it wrote everything and the door was still open."""
        if not self.d.writers or self.d.door is None:
            return False
        writer = self.d.writers.pop(0)
        is_open = transfer.may_write(self.d.door)
        self.d.door = transfer.step(self.d.door, transfer.WriterLeft(writer.generation)).ticket
        landed = is_open and writer.at == len(writer.units)
        if self.p.reading == writer.generation:
            self.p.reading = None
        if landed:
            self.d.landed[writer.generation] += len(writer.units)
        ticket = self.p.ticket
        if ticket is not None and ticket.generation == writer.generation and ticket.state is P.COMPUTING:
            if landed:
                self.p.sent += len(writer.units)
            else:
                self._step_p(Ended(ticket.generation, Cause("transfer_failed", by=PREFILL)))
        return True
