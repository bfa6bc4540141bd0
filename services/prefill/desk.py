"""P's front desk: what arrives over NATS becomes a ticket, an event of a ticket, or a counted no-op."""

import asyncio
from collections.abc import Callable

from services.prefill import flow
from services.prefill.loading import PromptLoading
from services.prefill.parts import PrefillFlow, PrefillFlowSettings
from services.prefill.ticket import PrefillTicket
from services.prefill.wire_choice import WireChoice
from shared.engine.api import Engine, StepOutput
from shared.machines import prefill as machine
from shared.machines.stepping import Cause
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Destination,
    DestinationReply,
    DestinationStatus,
    Fail,
    Prefill,
    PrefillTimings,
    Verdict,
)
from shared.protocol.wire import WireModel
from shared.runtime.deps import Deps
from shared.runtime.errors import GeometryMismatch, IdentityMismatch
from shared.transfer.link import Link
from shared.worker.desk import Handler, WorkerDesk, code_of
from shared.worker.geometry import check_geometry
from shared.worker.stores import Stores

_EARLY_HOLD_S = 0.4
_EARLY_LIMIT = 64
"""Well below the messages that a subscription handles at once, so that orphans never hold up the others."""


class PrefillDesk(WorkerDesk[PrefillTicket]):
    role = "prefill"

    def __init__(
        self,
        deps: Deps,
        engine: Engine,
        link: Link,
        settings: PrefillFlowSettings | None = None,
        observe: Callable[[PrefillTimings], None] = lambda timings: None,
        stores: Stores | None = None,
    ) -> None:
        super().__init__(deps, engine, link)
        self._arrived: dict[int, asyncio.Event] = {}
        self._num_held = 0
        wire = WireChoice(engine.layout, link, deps.counters)
        loading = None if stores is None else PromptLoading(deps, link, stores, wire)
        chosen = settings or PrefillFlowSettings()
        self._flow = PrefillFlow(deps, engine, link, wire, chosen, observe, stores, loading)

    def handlers(self) -> dict[str, tuple[type[WireModel], Handler]]:
        return {
            subjects.PREFILL: (Prefill, self.on_prefill),
            subjects.DESTINATION: (Destination, self.on_destination),
            subjects.CANCEL: (Cancel, self.on_cancel),
            subjects.FAIL: (Fail, self.on_fail),
        }

    async def serve(self, ticket: PrefillTicket) -> None:
        await flow.serve_ticket(self._flow, ticket)

    def perform(self, ticket: PrefillTicket, effect: object) -> None:
        flow.perform(self._flow, ticket, effect)

    async def on_prefill(self, order: Prefill) -> Verdict:
        """Takes the prompt's pages. Who holds a destination for it is woken."""
        make = lambda: PrefillTicket(order, self.deps.clock, self.deps.counters)  # noqa: E731
        verdict = self.admit(order, make, decodes=False)
        if verdict.ok and (waiting := self._arrived.pop(order.room, None)) is not None:
            waiting.set()
        return verdict

    async def on_destination(self, destination: Destination) -> DestinationReply:
        """Where the state goes. May come before the prompt (NATS does not order two publishers): then it is held for a
        moment. It is repeated, also to ask whether the ticket still lives here."""
        ticket = self.tickets.addressed(destination)
        if ticket is None and self.tickets.end_of(destination) is None:
            await self._hold(destination.room)
            ticket = self.tickets.addressed(destination)
        if ticket is None:
            if (cause := self.tickets.end_of(destination)) is not None:
                return DestinationReply(status=DestinationStatus.DEAD, code=code_of(cause), message=cause.message)
            return DestinationReply(status=DestinationStatus.UNKNOWN)
        if ticket.state.cause is not None:
            cause = ticket.state.cause
            return DestinationReply(status=DestinationStatus.DEAD, code=code_of(cause), message=cause.message)
        try:
            self._check_pair(ticket.order, destination)
        except (IdentityMismatch, GeometryMismatch) as error:
            ticket.end(error.code, error.message, by="prefill")
            return DestinationReply(status=DestinationStatus.REFUSED, code=error.code, message=error.message)
        ticket.apply(machine.DestinationArrived(destination.generation))
        if not ticket.destination.done():
            ticket.destination.set_result(destination)
        return DestinationReply(status=DestinationStatus.ACCEPTED)

    async def _hold(self, room: int) -> None:
        """Waits a moment for a room nobody has heard of yet; the number of those who wait is bounded."""
        if self._num_held >= _EARLY_LIMIT:
            self.deps.counters.add("early_destinations_refused")
            return
        arrived = self._arrived.setdefault(room, asyncio.Event())
        self._num_held += 1
        try:
            async with asyncio.timeout(_EARLY_HOLD_S):
                await arrived.wait()
        except TimeoutError:
            self.deps.counters.add("early_destinations_unknown")
        finally:
            self._num_held -= 1
            if self._arrived.get(room) is arrived:
                del self._arrived[room]

    def _check_pair(self, order: Prefill, destination: Destination) -> None:
        """Raises IdentityMismatch or GeometryMismatch where these two workers cannot hand over, naming what differs."""
        if destination.identity != self.engine.identity:
            raise IdentityMismatch(f"prefill holds {self.engine.identity}, decode holds {destination.identity}")
        check_geometry(self.engine.layout, destination.geometry)
        held, page_tokens = destination.held_len, destination.geometry.page_tokens
        if held >= len(order.prompt) or held % page_tokens:
            raise GeometryMismatch(
                f"decode has {held} of {len(order.prompt)} tokens, and a page of decode holds {page_tokens}"
            )

    async def on_fail(self, notice: Fail) -> Verdict:
        """D gave the ticket up. One that we have not heard of yet can never begin."""
        cause = Cause(notice.code, notice.message, by="decode")
        if (ticket := self.tickets.addressed(notice)) is not None:
            ticket.end(cause.code, cause.message, cause.by)
        else:
            self.tickets.bury(notice, cause)
        return Verdict(ok=True)

    def on_step(self, output: StepOutput) -> None:
        """The engine's listener: what became of prompts that are computed ahead."""
        told = (
            (output.preempted, machine.Yielded),
            (output.resumed, machine.Returned),
            (output.parked, machine.ComputedAhead),
        )
        for keys, event in told:
            for key in keys:
                if (ticket := self.tickets.find(key)) is not None:
                    ticket.apply(event(key.generation))
        for failure in output.failed:
            if (ticket := self.tickets.find(failure.key)) is not None:
                ticket.end(failure.code, failure.message, by="prefill")
        if output.preempted or output.resumed or output.parked:
            self.deps.changed()

    def end_unstarted(self, reason: str) -> None:
        for ticket in self.tickets:
            if ticket.state.state is not machine.PrefillState.COMMITTING:  # its bytes are confirmed
                ticket.end("peer_lost", reason, by="prefill")
