"""A ticket's state out of the stores: D has what they have of it loaded into its own pages, and computes the rest."""

from dataclasses import dataclass

from services.decode.ticket import DecodeTicket
from shared.protocol.messages import ComponentDigest
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, StoreError
from shared.store.keys import chain
from shared.store.runs import BlockRun, Found
from shared.transfer.formats.agree import EXACT_FORMATS, accepted
from shared.transfer.formats.catalog import EXACT, lossiest
from shared.transfer.link import Link
from shared.worker.stores import Stores

_LOAD_S = 20.0
"""Within the request's deadline. Computing the same positions is no worse a way after that."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """num_tokens: leading positions whose state is in the ticket's pages. lossiest: what the blocks had come by."""

    num_tokens: int = 0
    lossiest: str = EXACT
    components: tuple[ComponentDigest, ...] = ()


async def load_stored(deps: Deps, link: Link, stores: Stores | None, ticket: DecodeTicket) -> Loaded:
    """As many whole blocks as the stores have, but for the last position, which is always computed. Where that fails
    nothing is loaded; StoreError where it is less than the order demands."""
    began_at, wanted, why = deps.clock.now(), ticket.order.load_least, ""
    try:
        if stores is None:
            loaded, most = Loaded(), wanted
        else:
            loaded, most = Loaded(), (ticket.state_len - 1) // stores.block_tokens * stores.block_tokens
            loaded = await _load(deps, link, stores, ticket)
    except BatonError as error:  # the ticket's own end comes as a cancellation
        deps.counters.add("loads_failed")
        why = f": {error.message}"
    if loaded.num_tokens < min(wanted, most):
        raise StoreError(f"the stores brought {loaded.num_tokens} positions of {wanted}{why}")
    ticket.timings = ticket.timings.model_copy(
        update={
            "load_s": deps.clock.now() - began_at,
            "loaded_tokens": loaded.num_tokens,
            "bytes": tuple((c.name, c.num_bytes) for c in loaded.components),
        }
    )
    return loaded


async def _load(deps: Deps, link: Link, stores: Stores, ticket: DecodeTicket) -> Loaded:
    found, came_by = await _find(deps, stores, ticket)
    if found is None:
        return Loaded()
    try:
        key, units = ticket.key, stores.engine.unit_tables(ticket.key)
        await link.open(key, ticket.secret, units, ticket.first_bytes, formats=EXACT_FORMATS)
        try:
            deadline = min(ticket.deadline, deps.clock.now() + _LOAD_S)
            reply = await stores.client.load(
                found, key, ticket.secret, link.address, deadline, priority=ticket.order.priority
            )
            await stores.client.check(key, reply)
        finally:
            await link.fence(key)  # from here on only the engine writes these pages
    finally:
        deps.spawn(stores.client.release(found), f"release-lease-{ticket.key.room}")
    deps.counters.add("blocks_loaded", reply.num_blocks)
    return Loaded(reply.num_blocks * stores.block_tokens, came_by, reply.components)


async def _find(deps: Deps, stores: Stores, ticket: DecodeTicket) -> tuple[Found | None, str]:
    """The longest leading run there is, under the name of every loss that the request accepts; what was lost least
    counts where there is as much of it."""
    trunk = ticket.past.trunk(ticket.order.prompt)
    num_tokens = (len(trunk) - 1) // stores.block_tokens * stores.block_tokens
    best: Found | None = None
    came_by = EXACT
    for name in dict.fromkeys(lossiest((one,)) for one in accepted(ticket.order.kv_precision)):
        keys = chain(stores.lineage(ticket.order.salt, name), trunk[:num_tokens])
        found = await stores.client.lookup(BlockRun.of(keys))
        if found is None:
            continue
        if best is None or found.num_blocks > best.num_blocks:
            best, found, came_by = found, best, name
        if found is not None:
            deps.spawn(stores.client.release(found), f"release-lease-{ticket.key.room}")
    return best, came_by
