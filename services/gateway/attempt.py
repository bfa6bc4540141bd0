"""One attempt of a request: a ticket, the pair of workers that serves it, and what they are asked for."""

from dataclasses import dataclass

from services.gateway.generation import GenerationRequest
from services.gateway.history import History
from services.gateway.inbox import Letterbox
from services.gateway.router import Route
from shared.machines import request as machine
from shared.machines.stepping import Event, Outcome
from shared.protocol import subjects
from shared.protocol.messages import Cancel, Prefill, Reserve, TicketTimings
from shared.protocol.wire import WireModel


@dataclass(slots=True)
class Attempt:
    """state: its machine. box: what arrives for it. history: the request's own. trunk_len: positions
    whose state it needs first. proven: its legs were seen to work. path: which way the state came, where its route does
    not say so: it was taken up from another gateway. epoch: ours, where it was; else 0."""

    state: machine.Attempt
    box: Letterbox
    history: History
    began_at: float
    trunk_len: int
    route: Route | None = None
    cancel_legs: bool = False
    has_tokens: bool = False
    proven: bool = False
    path: str | None = None
    epoch: int = 0

    @property
    def room(self) -> int:
        return self.state.room

    @property
    def generation(self) -> int:
        return self.state.generation

    @property
    def peers(self) -> frozenset[str]:
        return frozenset() if self.route is None else frozenset(worker.peer for worker in self.route.workers)

    def path_by(self, ticket: TicketTimings) -> str:
        """Which way the state came; pending as long as P's first tokens are here and D alone can say whether the stores
        have brought anything. ticket: what it says of itself."""
        assert self.route is not None
        if self.path is not None or not self.route.load:
            return self.path or self.route.path
        if not self.box.taken_over:
            return "pending"
        otherwise = "local" if self.route.prefill is None else "remote"
        return self.route.path if ticket.loaded_tokens else otherwise

    @property
    def done(self) -> bool:
        return all(finished or over for finished, over in zip(self.box.finished, self.history.over, strict=True))

    @property
    def granted(self) -> bool:
        """Its legs have said yes, or were at work already."""
        return self.state.state in (machine.RequestState.WAITING, machine.RequestState.STREAMING)

    def apply(self, event: Event) -> None:
        step = machine.step(self.state, event)
        if step.outcome is Outcome.APPLIED:
            self.state = step.ticket
            self.cancel_legs |= machine.CancelLegs() in step.effects


@dataclass(frozen=True, slots=True)
class Order:
    """What one leg is asked for."""

    role: str
    peer: str
    verb: str
    message: WireModel


def orders_of(
    request: GenerationRequest, attempt: Attempt, route: Route, gateway: str, remaining_s: float, waited_s: float
) -> tuple[Order, ...]:
    """Reserve for D, and where a P computes the prompt, prefill for it; each names the other leg. They go on behind
    what the client has."""
    decode, prefill = route.decode.peer, route.prefill.peer if route.prefill is not None else None
    identity, history = route.decode.report.identity or "", attempt.history
    reserve = Reserve(
        room=attempt.room,
        generation=attempt.generation,
        request_id=request.request_id,
        gateway=gateway,
        prefill=prefill,
        identity=identity,
        prompt=request.prompt,
        sampling=request.sampling,
        remaining_s=remaining_s,
        waited_s=waited_s,
        kv_precision=request.kv_precision,
        priority=request.priority,
        history=history.told(),
        finished=history.finished(),
        salt=request.salt,
        orphan_grace_s=request.orphan_grace_s,
        held_least=route.held_least,
        load=route.load,
        load_least=history.stored // 2 if route.path == "store" else 0,  # with less a P would have been sooner
    )
    orders = (Order("decode", decode, subjects.RESERVE, reserve),)
    if prefill is None:
        return orders
    compute = Prefill(
        room=attempt.room,
        generation=attempt.generation,
        request_id=request.request_id,
        gateway=gateway,
        decode=decode,
        identity=identity,
        prompt=history.prefix(request.prompt),
        sampling=request.sampling,
        remaining_s=remaining_s,
        waited_s=waited_s,
        kv_precision=request.kv_precision,
        priority=request.priority,
        resumed=history.begun,
        salt=request.salt,
    )
    return (*orders, Order("prefill", prefill, subjects.PREFILL, compute))


def cancel_of(attempt: Attempt, reason: str, choice: int | None = None) -> Cancel:
    """What ends it, or a choice of it; under our epoch, so that it ends nothing once another gateway has it."""
    room, generation = attempt.room, attempt.generation
    return Cancel(room=room, generation=generation, reason=reason, choice=choice, epoch=attempt.epoch)
