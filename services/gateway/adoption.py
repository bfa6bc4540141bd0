"""Taking up a ticket that another gateway's request had: its decode worker has the state and goes on, so nothing is
computed again. It is told where its tokens go from now on, and asked for those that the client lacks."""

from typing import TYPE_CHECKING

from services.gateway.attempt import Attempt, cancel_of
from services.gateway.generation import GenerationRequest
from services.gateway.history import Past
from services.gateway.legs import Legs
from services.gateway.router import Route
from shared.machines import request as machine
from shared.machines.stepping import Cause, Ended
from shared.protocol.stream_messages import StreamTicket
from shared.runtime.errors import BatonError

if TYPE_CHECKING:
    from services.gateway.flow import GatewayFlow

_KNOWN_WITHIN_S = 1.0
"""A gateway that has just started may not have heard of the worker yet."""
_LOOK_EVERY_S = 0.05


async def adopt(
    g: "GatewayFlow", request: GenerationRequest, past: Past, trunk_len: int, deadline: float
) -> tuple[Attempt, Legs] | None:
    """The attempt, which tokens come for from now on; None where there is no such ticket any more. What may be left of
    it there is told to end then; whoever is stopped in the midst of it leaves the ticket to the next gateway."""
    ticket = past.ticket
    if ticket is None:
        return None
    box = g.inbox.open(ticket.room, ticket.generation, past.history)  # before anybody can ask for it
    state = machine.Attempt(ticket.room, ticket.generation)
    attempt = Attempt(state, box, past.history, g.deps.clock.now(), trunk_len, epoch=past.epoch)
    try:
        if (route := await _route_to(g, ticket)) is not None:
            legs = await _take(g, request, attempt, route, deadline)
            if legs is not None:
                attempt.path = past.path
                g.deps.counters.add("tickets_adopted")
                return attempt, legs
    except BaseException:
        g.inbox.close(attempt.room, keep_s=request.orphan_grace_s)
        raise
    g.deps.counters.add("tickets_not_adopted")
    attempt.apply(Ended(attempt.generation, Cause("stream_moved", "the ticket was not taken up")))
    g.inbox.close(attempt.room)
    g.farewells.tell("decode", ticket.decode, cancel_of(attempt, "the request goes on elsewhere"), deadline)
    return None


async def _take(
    g: "GatewayFlow", request: GenerationRequest, attempt: Attempt, route: Route, deadline: float
) -> Legs | None:
    attempt.route = route
    legs = Legs(g, request, attempt, route, deadline)
    attempt.apply(machine.WorkersChosen(attempt.generation))
    attempt.box.senders.add(route.decode.peer)  # it has taken over long ago
    try:
        was_told = await legs.replay(mine=True)
    except BatonError:
        return None
    if not was_told or (attempt.box.failure is not None and not attempt.box.events):
        return None
    for choice, over in enumerate(attempt.history.over):
        if over:  # the word that a stop string ended it may have been lost with the gateway
            legs.stop_choice(choice)
    return legs


async def _route_to(g: "GatewayFlow", ticket: StreamTicket) -> Route | None:
    give_up = g.deps.clock.now() + _KNOWN_WITHIN_S
    while True:
        worker = g.registry.find(ticket.decode)
        if worker is not None or g.deps.clock.now() >= give_up:
            return None if worker is None else Route(worker, None)
        await g.deps.clock.sleep(_LOOK_EVERY_S)
