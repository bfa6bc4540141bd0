"""One request handed from P to D, as a model: the real machines of gateway, P, D and door, real page books on both
sides, and a network that keeps every message until somebody delivers or drops it.

All attempts share one room, and messages reach a machine by room alone, so that the generation is the only fence. A
page remembers the generation whose state it holds; what D generates from foreign state is visibly wrong.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shared.machines import decode, prefill, request, transfer
from shared.machines.stepping import FINISHED, Cause, Ended, Event, Outcome, Quiesced, Step, TellGateway
from shared.state.pages import PageAllocator

ROOM = 1
NUM_UNITS = 2
NUM_TOKENS = 4
D_PAGES, P_PAGES = 5, 4
DECODE, PREFILL, GATEWAY = "decode", "prefill", "gateway"
D, P = decode.DecodeState, prefill.PrefillState
WRONG = -1


def right_token(index: int) -> int:
    return 100 + index


@dataclass(frozen=True)
class Message:
    """`boot`: the incarnation of the receiver it is for. `data`: of tokens (index, token), of a failure its cause."""

    to: str
    boot: int
    kind: str
    generation: int
    data: Any = None


@dataclass
class Writer:
    """A transfer that was let in. It may write until it leaves, also after it was told to stop."""

    generation: int
    units: tuple[int, ...]
    at: int = 0


@dataclass
class DecodeSide:
    """pages: of the ticket, in logical order. content: page -> generation of the state in it, for ever."""

    boot: int = 1
    books: PageAllocator = field(default_factory=lambda: PageAllocator(D_PAGES))
    content: dict[int, int] = field(default_factory=dict)
    ticket: decode.DecodeTicket | None = None
    pages: list[int] = field(default_factory=list)
    door: transfer.ReceivingTicket | None = None
    writers: list[Writer] = field(default_factory=list)
    landed: Counter[int] = field(default_factory=Counter)
    records: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    in_step: bool = False
    num_tokens: int = 0


@dataclass
class PrefillSide:
    boot: int = 1
    books: PageAllocator = field(default_factory=lambda: PageAllocator(P_PAGES))
    ticket: prefill.PrefillTicket | None = None
    sent: int = 0
    reading: int | None = None
    """The generation whose pages are being read."""
    ended: set[int] = field(default_factory=set)


@dataclass
class World:
    network: list[Message] = field(default_factory=list)
    attempt: request.Attempt | None = None
    generation: int = 0
    emitted: list[int] = field(default_factory=list)
    d: DecodeSide = field(default_factory=DecodeSide)
    p: PrefillSide = field(default_factory=PrefillSide)
    commits: Counter[int] = field(default_factory=Counter)
    first_causes: dict[tuple[str, int], Cause] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    is_closing: bool = False

    # The network

    def send(self, to: str, kind: str, generation: int, data: Any = None) -> None:
        boot = {DECODE: self.d.boot, PREFILL: self.p.boot, GATEWAY: 0}[to]
        self.network.append(Message(to, boot, kind, generation, data))

    def deliver(self, message: Message) -> None:
        """A message for an earlier incarnation reaches nobody."""
        if message.boot == {DECODE: self.d.boot, PREFILL: self.p.boot, GATEWAY: 0}[message.to]:
            getattr(self, f"_{message.to}_gets_{message.kind}")(message)

    # The gateway

    def begin_attempt(self) -> bool:
        """A new attempt, if there is none and nothing has reached the client yet."""
        is_busy = self.attempt is not None and self.attempt.state not in request.TERMINAL
        if is_busy or self.emitted or self.is_closing:
            return False
        self.generation += 1
        self.attempt = request.Attempt(ROOM, self.generation)
        self._step_gateway(request.WorkersChosen(self.generation))
        self.repeat_orders()
        return True

    def repeat_orders(self) -> None:
        self.send(DECODE, "reserve", self.generation)
        self.send(PREFILL, "prefill", self.generation)

    def end_attempt(self, cause: Cause) -> None:
        self._step_gateway(Ended(self.generation, cause))

    def _step_gateway(self, event: Event) -> None:
        assert self.attempt is not None
        step = request.step(self.attempt, event)
        self.outcomes[step.outcome] += 1
        self.attempt = step.ticket
        for _ in step.effects:  # CancelLegs
            self.send(DECODE, "cancel", self.generation)
            self.send(PREFILL, "cancel", self.generation)

    def _gateway_gets_tokens(self, message: Message) -> None:
        """The inbox: of the attempt under way, the next expected index and nothing else."""
        index, token = message.data
        attempt = self.attempt
        if attempt is None or attempt.state in request.TERMINAL or message.generation != attempt.generation:
            return
        if index == len(self.emitted):
            self._step_gateway(request.TokensArrived(message.generation))
            self.emitted.append(token)
        if len(self.emitted) == NUM_TOKENS:
            self._step_gateway(request.AllDone(message.generation))

    def _gateway_gets_fail(self, message: Message) -> None:
        if self.attempt is not None:
            self._step_gateway(Ended(message.generation, message.data))

    # P

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

    # D

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
        d.door, d.num_tokens = transfer.ReceivingTicket(message.generation), 0
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

    # Ends

    def times_out(self, side: str) -> None:
        ticket = self.d.ticket if side == DECODE else self.p.ticket
        step = self._step_d if side == DECODE else self._step_p
        if ticket is not None:
            step(Ended(ticket.generation, Cause("deadline_exceeded", by=side)))

    def crash(self, side: str) -> None:
        """kill -9 and a new incarnation. What was written stays written; D's memory does not outlive it."""
        if side == DECODE:
            self.d = DecodeSide(boot=self.d.boot + 1, ended=self.d.ended | set(range(self.generation + 1)))
        else:
            self.p = PrefillSide(boot=self.p.boot + 1, ended=self.p.ended | set(range(self.generation + 1)))
            for writer in self.d.writers:
                writer.units = writer.units[: writer.at]  # its bytes end here
                writer.at += 1  # and what it has written is not all of it
        self.p.reading = None
        if side == DECODE and self.p.ticket is not None:
            self._step_p(Ended(self.p.ticket.generation, Cause("peer_lost", by=DECODE)))
        if self.attempt is not None:
            self.end_attempt(Cause("peer_lost", by=side))

    def _note(self, side: str, ticket: Any, step: Step[Any]) -> None:
        self.outcomes[step.outcome] += 1
        if step.ticket.cause is not None:
            first = self.first_causes.setdefault(
                (f"{side}{self.d.boot}{self.p.boot}", ticket.generation), step.ticket.cause
            )
            assert step.ticket.cause == first, "the first cause is kept"

    # What happens of itself

    def proceed(self) -> bool:
        """The next thing of an undisturbed hand-over; False where all is done."""
        natural: tuple[Callable[[], bool], ...] = (
            self.d_matches,
            self.d_ends_a_step,
            self.d_begins_a_step,
            self.d_resumes,
            self.d_quiesces,
            self.p_quiesces,
            self.writer_writes,
            self.writer_leaves,
            self._deliver_oldest,
            self.p_sends_a_unit,
            lambda: self.p.ticket is not None and self.p.ticket.state is P.COMPUTING and self.p_commits(),
            self.begin_attempt,
        )
        return any(act() for act in natural)

    def _deliver_oldest(self) -> bool:
        if not self.network:
            return False
        self.deliver(self.network.pop(0))
        return True

    def calm_down(self) -> None:
        """No more faults and no new attempt: what messages do not end, timers do, and all that is held comes free."""
        self.is_closing = True
        if self.attempt is not None:
            self.end_attempt(Cause("cancelled"))
        self._run_dry()
        for side in (DECODE, PREFILL):
            self.times_out(side)
        self._run_dry()

    def _run_dry(self) -> None:
        for _ in range(500):
            if not self.proceed():
                return
        raise AssertionError("it never ends")
