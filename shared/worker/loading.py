"""State out of the stores: a worker has what they have of a trunk's beginning loaded into a ticket of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.sharing import Held, Sharing
from shared.protocol.messages import ComponentDigest
from shared.runtime.deps import Deps
from shared.store.keys import chain
from shared.store.runs import BlockRun, Found
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import Link, TicketKey
from shared.worker.stores import Stores


@dataclass(frozen=True, slots=True)
class Loading:
    """What is to be loaded, and where to. trunk: the tokens whose state the ticket needs; the last one's is computed in
    any case. held: what of it is in the ticket's pages already. deadline: the clock's time. answer_s: how long the
    stores are asked; None: as the client does. is_worth: whether to load so many positions, once they are found."""

    key: TicketKey
    secret: bytes
    trunk: tuple[int, ...]
    sharing: Sharing
    held: Held
    deadline: float
    priority: int
    on_first_bytes: Callable[[TicketKey], None] = lambda key: None
    answer_s: float | None = None
    is_worth: Callable[[int], bool] = lambda num_tokens: True


@dataclass(frozen=True, slots=True)
class Loaded:
    """num_tokens: leading positions whose state is in the ticket's pages now, with those that were there before.
    lossiest: what they had come by. components: what was brought."""

    num_tokens: int = 0
    lossiest: str = EXACT
    components: tuple[ComponentDigest, ...] = ()


async def load_blocks(deps: Deps, link: Link, stores: Stores, loading: Loading) -> Loaded:
    """As many whole blocks behind what is held as the stores have. Raises BatonError, and then nothing that came may be
    used; afterwards only the engine writes the ticket's pages."""
    held = loading.held
    nothing = Loaded(held.num_tokens, held.lossiest)
    found, came_by = await _find(deps, stores, loading)
    if found is None:
        return nothing
    key = loading.key
    try:
        if not loading.is_worth(found.num_blocks * stores.block_tokens):
            return nothing
        units = stores.engine.unit_tables(key)
        await link.open(key, loading.secret, units, loading.on_first_bytes, held.num_tokens, EXACT_FORMATS)
        try:
            reply = await stores.client.load(
                found, key, loading.secret, link.address, loading.deadline, priority=loading.priority
            )
            await stores.client.check(key, reply)
        finally:
            await link.fence(key)
    finally:
        deps.spawn(stores.client.release(found), f"release-lease-{key.room}")
    deps.counters.add("blocks_loaded", reply.num_blocks)
    return Loaded(held.num_tokens + reply.num_blocks * stores.block_tokens, came_by, reply.components)


async def _find(deps: Deps, stores: Stores, loading: Loading) -> tuple[Found | None, str]:
    """The longest run there is, under the name of every loss that is accepted; what was lost least counts where there
    is as much of it. What is held goes on under its own name only."""
    held, block = loading.held, stores.block_tokens
    num_tokens = (len(loading.trunk) - 1) // block * block
    best: Found | None = None
    came_by = EXACT
    for name in (held.lossiest,) if held.num_tokens else loading.sharing.accepts:
        keys = chain(stores.lineage(loading.sharing.salt, name), loading.trunk[:num_tokens])
        found = await stores.client.lookup(BlockRun.of(keys, held.num_tokens // block), answer_s=loading.answer_s)
        if found is None:
            continue
        if best is None or found.num_blocks > best.num_blocks:
            best, found, came_by = found, best, name
        if found is not None:
            deps.spawn(stores.client.release(found), f"release-lease-{loading.key.room}")
    return best, came_by
