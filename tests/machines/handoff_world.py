"""One request handed from P to D, as a model: the real machines of gateway, P, D and door, real page books on both
sides, and a network that does what it is told.

All attempts share one room, and messages reach a machine by room alone, so that the generation is the only fence. A
page remembers the generation whose state it holds; what D generates from foreign state is visibly wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.machines import request
from shared.machines.stepping import Cause, Ended, Event
from tests.machines.handoff_decode import DecodeHalf
from tests.machines.handoff_parts import (
    DECODE,
    GATEWAY,
    NUM_TOKENS,
    PREFILL,
    ROOM,
    DecodeSide,
    Message,
    P,
    PrefillSide,
)
from tests.machines.handoff_prefill import PrefillHalf


@dataclass
class World(PrefillHalf, DecodeHalf):
    """The whole of it. Each method that returns a bool says whether there was anything to do."""

    def deliver(self, message: Message) -> None:
        """A message for an earlier incarnation reaches nobody."""
        if message.boot == {DECODE: self.d.boot, PREFILL: self.p.boot, GATEWAY: 0}[message.to]:
            getattr(self, f"_{message.to}_gets_{message.kind}")(message)

    # The gateway

    def begin_attempt(self) -> bool:
        """A new attempt, if there is none and something is left to send: behind what has reached the client."""
        is_busy = self.attempt is not None and self.attempt.state not in request.TERMINAL
        if is_busy or len(self.emitted) == NUM_TOKENS or self.is_closing:
            return False
        self.generation += 1
        self.history_len = len(self.emitted)
        self.attempt = request.Attempt(ROOM, self.generation)
        self._step_gateway(request.WorkersChosen(self.generation))
        self.repeat_orders()
        return True

    def repeat_orders(self) -> None:
        self.send(DECODE, "reserve", self.generation, self.history_len)
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
