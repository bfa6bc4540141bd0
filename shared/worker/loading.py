"""State out of the stores: a worker has what they have of a trunk's beginning loaded into a ticket of its own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.engine.sharing import Held, Sharing
from shared.protocol.messages import ComponentDigest
from shared.runtime.deps import Deps
from shared.store.keys import chain
from shared.store.runs import BlockRun, Found
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import Link, TicketKey
from shared.worker.stores import Stores

UnitTables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """What is to be loaded, and where to. trunk: the tokens whose state the ticket needs; the last one's is computed in
    any case. held: what of it is in the ticket's pages already. deadline: the clock's time. answer_s: how long the
    stores are asked; None: as the client does. is_worth: whether to load so many positions, once they are found. doors:
    where the ticket's owner notes which keys are open at its sidecar; to be fenced before its pages come free."""

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
    doors: list[TicketKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """num_tokens: leading positions whose state is in the ticket's pages now, with those that were there before.
    lossiest: what they had come by. components: what was brought."""

    num_tokens: int = 0
    lossiest: str = EXACT
    components: tuple[ComponentDigest, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(component.num_bytes for component in self.components)


async def load_blocks(deps: Deps, link: Link, stores: Stores, loading: Loading) -> Loaded:
    """As many whole blocks behind what is held as the stores have. Raises BatonError, and then nothing that came may be
    used; afterwards only the engine writes the ticket's pages."""
    found, came_by = await find_blocks(deps, stores, loading)
    if found is None:
        return Loaded(loading.held.num_tokens, loading.held.lossiest)
    try:
        if not loading.is_worth(found.num_blocks * stores.block_tokens):
            return Loaded(loading.held.num_tokens, loading.held.lossiest)
        units = stores.engine.unit_tables(loading.key)
        return await bring_blocks(deps, link, stores, loading, units, found, came_by)
    finally:
        deps.spawn(stores.client.release(found), f"release-lease-{loading.key.room}")


async def bring_blocks(
    deps: Deps, link: Link, stores: Stores, loading: Loading, units: UnitTables, found: Found, came_by: str
) -> Loaded:
    """What was found, into these units; its lease is the caller's. Raises as `load_blocks`. Where a cancellation leaves
    the door open, it is among `loading.doors`."""
    key, held_len = loading.key, loading.held.num_tokens
    loading.doors.append(key)
    try:
        await link.open(key, loading.secret, units, loading.on_first_bytes, held_len, EXACT_FORMATS)
        reply = await stores.client.load(
            found, key, loading.secret, link.address, loading.deadline, priority=loading.priority
        )
        await stores.client.check(key, reply)
    finally:
        await link.fence(key)
        loading.doors.remove(key)
    deps.counters.add("blocks_loaded", reply.num_blocks)
    return Loaded(held_len + reply.num_blocks * stores.block_tokens, came_by, reply.components)


async def find_blocks(deps: Deps, stores: Stores, loading: Loading) -> tuple[Found | None, str]:
    """The longest run there is, under the name of every loss that is accepted; what was lost least counts where there
    is as much of it. What is held goes on under its own name only. To be released."""
    held, block = loading.held, stores.block_tokens
    num_tokens = (len(loading.trunk) - 1) // block * block
    names = (held.lossiest,) if held.num_tokens else tuple(loading.sharing.accepts)
    chains = [chain(stores.lineage(loading.sharing.salt, name), loading.trunk[:num_tokens]) for name in names]
    runs = [BlockRun.of(keys, held.num_tokens // block) for keys in chains]
    async with asyncio.TaskGroup() as group:  # at once: stores that do not answer are waited for once
        lookups = [group.create_task(stores.client.lookup(run, answer_s=loading.answer_s)) for run in runs]
    best: Found | None = None
    came_by = EXACT
    for name, lookup in zip(names, lookups, strict=True):
        found = lookup.result()
        if found is None:
            continue
        if best is None or found.num_blocks > best.num_blocks:
            best, found, came_by = found, best, name
        if found is not None:
            deps.spawn(stores.client.release(found), f"release-lease-{loading.key.room}")
    return best, came_by
