"""A ticket's state out of the stores: D has what they have of it loaded into its own pages, and computes the rest."""

from services.decode.ticket import DecodeTicket
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, StoreError
from shared.transfer.link import Link
from shared.worker.loading import Loaded, Loading, load_blocks
from shared.worker.stores import Stores

_LOAD_S = 20.0
"""Within the request's deadline. Computing the same positions is no worse a way after that."""


async def load_stored(deps: Deps, link: Link, stores: Stores | None, ticket: DecodeTicket) -> Loaded:
    """As many whole blocks as the stores have, but for the last position, which is always computed. Where that fails
    nothing is loaded; StoreError where there is less then than the order demands."""
    began_at, held, why = deps.clock.now(), ticket.held, ""
    loaded, most = Loaded(held.num_tokens, held.lossiest), ticket.order.load_least
    try:
        if stores is not None:
            most = (ticket.state_len - 1) // stores.block_tokens * stores.block_tokens
            loaded = await load_blocks(deps, link, stores, loading_of(deps, ticket))
    except BatonError as error:  # the ticket's own end comes as a cancellation
        deps.counters.add("loads_failed")
        why = f": {error.message}"
    if loaded.num_tokens < min(ticket.order.load_least, most):
        raise StoreError(f"{loaded.num_tokens} positions of {ticket.order.load_least} could be brought back{why}")
    ticket.timings = ticket.timings.model_copy(
        update={
            "load_s": deps.clock.now() - began_at,
            "loaded_tokens": loaded.num_tokens - held.num_tokens,
            "loaded_bytes": loaded.num_bytes,
            "bytes": tuple((c.name, c.num_bytes) for c in loaded.components),
        }
    )
    return loaded


def loading_of(deps: Deps, ticket: DecodeTicket) -> Loading:
    """Into the ticket's own pages, behind what they have."""
    return Loading(
        key=ticket.key,
        secret=ticket.secret,
        trunk=ticket.past.trunk(ticket.order.prompt),
        sharing=ticket.sharing,
        held=ticket.held,
        deadline=min(ticket.deadline, deps.clock.now() + _LOAD_S),
        priority=ticket.order.priority,
        on_first_bytes=ticket.first_bytes,
        doors=ticket.doors,
    )
