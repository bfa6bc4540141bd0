"""A prompt's blocks go into the stores as its chunks are computed, and the gateway is told how far they have them."""

from services.prefill.ticket import PrefillTicket
from shared.bus.base import BusError
from shared.protocol import subjects
from shared.protocol.messages import Tokens
from shared.protocol.wire import encode
from shared.runtime.deps import Deps
from shared.transfer.formats.catalog import EXACT
from shared.worker.checkpoint import Checkpoint
from shared.worker.stores import Stores


def checkpoint_of(deps: Deps, stores: Stores, ticket: PrefillTicket) -> Checkpoint:
    """What P computes itself lost nothing on its way."""
    order = ticket.order

    def tell(position: int) -> None:
        deps.spawn(_tell_stored(deps, ticket, position), f"stored-{ticket.key.room}")

    lineage, tenant = stores.lineage(order.salt, EXACT), order.salt.partition("/")[0]
    return Checkpoint(deps, stores, ticket.key, lineage, order.prompt, tenant, tell)


async def _tell_stored(deps: Deps, ticket: PrefillTicket, position: int) -> None:
    message = Tokens(sender=deps.peer, entries=(), stored=((ticket.key.room, position),))
    try:
        await deps.bus.publish(subjects.subject("gateway", ticket.order.gateway, subjects.TOKENS), encode(message))
    except BusError:
        deps.counters.add("stored_unheard")  # D offers the same blocks, and says so as well
