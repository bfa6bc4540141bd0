"""One attempt of a request: a ticket, the pair of workers that serves it, and what they are asked for."""

from dataclasses import dataclass, field

from services.gateway.generation import GenerationRequest
from services.gateway.inbox import Letterbox
from services.gateway.router import Route
from shared.machines import request as machine
from shared.machines.stepping import Event, Outcome
from shared.protocol import subjects
from shared.protocol.messages import Prefill, Reserve, WireModel


@dataclass(slots=True)
class Attempt:
    """state: its machine. box: what arrives for it. stopped: choices that the text side ended. proven: its legs were
    seen to work."""

    state: machine.Attempt
    box: Letterbox
    began_at: float
    stopped: set[int] = field(default_factory=set)
    route: Route | None = None
    cancel_legs: bool = False
    proven: bool = False

    @property
    def room(self) -> int:
        return self.state.room

    @property
    def generation(self) -> int:
        return self.state.generation

    @property
    def peers(self) -> frozenset[str]:
        return frozenset() if self.route is None else frozenset(worker.peer for worker in self.route.workers)

    @property
    def done(self) -> bool:
        return all(finished or c in self.stopped for c, finished in enumerate(self.box.finished))

    @property
    def may_start_over(self) -> bool:
        """A leg failed while the client has nothing yet: what has arrived is dropped, and another attempt sends it."""
        return self.box.failure is not None and self.state.retryable and not all(self.box.finished)

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
    """Reserve for D, and where a P computes the prompt, prefill for it; each names the other leg."""
    decode, prefill = route.decode.peer, route.prefill.peer if route.prefill is not None else None
    identity = route.decode.report.identity or ""
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
        prompt=request.prompt,
        sampling=request.sampling,
        remaining_s=remaining_s,
        waited_s=waited_s,
        kv_precision=request.kv_precision,
        priority=request.priority,
    )
    return (*orders, Order("prefill", prefill, subjects.PREFILL, compute))
