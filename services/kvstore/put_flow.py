"""A put's way through the kvstore, from the granted offer to blocks that readers see: one coroutine a put, in protocol
order. The desk has already taken the units; nobody finds them until the last line but one."""

from dataclasses import dataclass

from services.kvstore.beneath import Beneath
from services.kvstore.index import Index
from services.kvstore.ticket import Put
from shared.protocol.messages import ComponentDigest
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, Corrupt, PeerLost, ProtocolError, TransferTimeout
from shared.runtime.scope import until
from shared.store.namespaces import bytes_of_blocks
from shared.transfer.link import Receipt

_LANDING_S = 5.0
"""How long bytes may be behind the worker's word."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class StoreFlow:
    """What the coroutines work with. beneath: None where there is no driver."""

    deps: Deps
    index: Index
    beneath: Beneath | None = None


async def serve_put(k: StoreFlow, put: Put) -> None:
    """Runs a granted offer to its end. Returns when its blocks are whole, or their units free."""
    link, stored = put.namespace.link, False
    try:
        with put.scope:
            put.scope.check()
            async with until(put.deadline, "the put"):
                await link.open(put.key, put.secret, put.namespace.tables(put.units), lambda _: _first_bytes(k, put))
                put.opened.set_result(None)
                record = await put.record
                _check_complete(put, record.components)
                await _await_bytes(k, put, record.components)
                await link.fence(put.key)  # from here on nobody writes these units
                digests = await put.namespace.digests(put.units)
                for (entry, held), digest in zip(put.blocks, digests, strict=True):
                    k.index.verified(entry, held, digest)
                stored = True
                put.committed()
    except BatonError as error:
        put.failed(error)
    finally:
        put.failed(PeerLost("the put was ended"))  # nothing new where it is decided
        await _release(k, put, stored=stored)


def _first_bytes(k: StoreFlow, put: Put) -> None:
    for _, held in put.blocks:
        k.index.first_bytes(held, put.namespace.name)


def _check_complete(put: Put, components: tuple[ComponentDigest, ...]) -> None:
    """Raises ProtocolError where not every row of every block was sent: our own counts would agree with theirs."""
    sent, needed = [(c.name, c.num_bytes) for c in components], bytes_of_blocks(put.namespace.layout, len(put.blocks))
    if sent != needed:
        raise ProtocolError(f"the blocks are {needed}, and {sent} was sent")


async def _await_bytes(k: StoreFlow, put: Put, components: tuple[ComponentDigest, ...]) -> None:
    """Compares our own sidecar's counts and digests with the worker's; raises Corrupt, naming the component."""
    give_up = k.deps.clock.now() + _LANDING_S
    while (landed := await put.namespace.link.received(put.key)) and _counts(landed) != [
        (c.name, c.num_bytes) for c in components
    ]:
        if k.deps.clock.now() >= give_up:
            raise TransferTimeout(f"landed {_counts(landed)}, sent {components}")
        await k.deps.clock.sleep(_POLL_S)
    for ours, theirs in zip(landed, components, strict=True):
        if ours.digest != theirs.digest:
            raise Corrupt(f"component {ours.name!r}: the bytes that arrived are not the bytes that were sent")


def _counts(receipt: Receipt) -> list[tuple[str, int]]:
    return [(one.name, one.num_bytes) for one in receipt]


async def _release(k: StoreFlow, put: Put, *, stored: bool) -> None:
    """Quarantine: first no writer may be left, then units of what did not become whole are free."""
    await put.namespace.link.fence(put.key)  # if this fails there is no proof, and the units stay held
    if not put.record.done():
        put.record.cancel()
    for entry, held in put.blocks:
        if not stored:
            k.index.give_up(entry, held)
            k.index.quiesced(held, put.namespace.name)
        elif k.beneath is not None:
            k.beneath.write_soon(entry.key)
    k.deps.counters.add("blocks_stored" if stored else "blocks_abandoned", len(put.blocks))
    k.deps.changed()
