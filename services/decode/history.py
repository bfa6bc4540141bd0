"""The beginning of a prompt out of the stores while a prefill worker computes and sends the rest: path `hybrid`.

The two never write the same unit: the stores have a ticket of their own at the sidecar, with the units of the beginning
alone, and P is told that D has these already.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from services.decode.loading import loading_of
from services.decode.ticket import DecodeTicket
from shared.engine.sharing import Held
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, StoreError
from shared.runtime.ids import new_room
from shared.state.components import IndexKind
from shared.store.runs import Found
from shared.transfer.link import Link, TicketKey
from shared.worker.loading import Loading, UnitTables, bring_blocks, find_blocks
from shared.worker.stores import Stores

_SECRET_BYTES = 32
_ANSWER_S = 0.25
"""P waits for D's destination meanwhile."""


@asynccontextmanager
async def stored_history(deps: Deps, link: Link, stores: Stores | None, ticket: DecodeTicket) -> AsyncIterator[None]:
    """Inside, `ticket.given` says what P need not send, and it is on its way; afterwards it is there. StoreError where
    it did not all come: then the ticket cannot go on, since nobody else sends it."""
    ticket.given = ticket.held
    if stores is None or not ticket.order.load:
        yield
        return
    loading = replace(
        loading_of(deps, ticket),
        key=TicketKey(new_room(), 1),
        secret=secrets.token_bytes(_SECRET_BYTES),
        on_first_bytes=lambda key: None,
        answer_s=_ANSWER_S,
    )
    found, came_by = await find_blocks(deps, stores, loading)
    if found is None:
        yield
        return
    ticket.given = Held(ticket.held.num_tokens + found.num_blocks * stores.block_tokens, came_by)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_bring(deps, link, stores, ticket, loading, found))
            yield
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        deps.spawn(stores.client.release(found), f"release-lease-{ticket.key.room}")


async def _bring(deps: Deps, link: Link, stores: Stores, ticket: DecodeTicket, loading: Loading, found: Found) -> None:
    began_at, given = deps.clock.now(), ticket.given
    units = _leading(stores, ticket.key, given.num_tokens)
    try:
        loaded = await bring_blocks(deps, link, stores, loading, units, found, given.lossiest)
    except BatonError as error:
        deps.counters.add("loads_failed")
        raise StoreError(f"what the stores have of the prompt did not come: {error.message}") from error
    if loaded.num_tokens < given.num_tokens:
        raise StoreError(f"{loaded.num_tokens} positions came of {given.num_tokens} that were found")
    ticket.timings = ticket.timings.model_copy(
        update={
            "load_s": deps.clock.now() - began_at,
            "loaded_tokens": given.num_tokens - ticket.held.num_tokens,
            "loaded_bytes": loaded.num_bytes,
        }
    )


def _leading(stores: Stores, key: TicketKey, num_tokens: int) -> UnitTables:
    """The ticket's units up to there: nothing behind can be written by the stores."""
    layout = stores.engine.layout
    num_pages = num_tokens // layout.page_tokens
    tables = zip(layout.components, stores.engine.unit_tables(key), strict=True)
    return tuple(units[:num_pages] if c.index is IndexKind.PAGE else units for c, units in tables)
