"""A load's way through the kvstore, from the accepted question to bytes in the reader's pages: one coroutine a load.

Batch by batch: while one is sent the next is read from beneath. A batch holds units only while it is brought and sent,
so that many loads share a small memory, and none waits for room while it holds some.
"""

import asyncio
from collections.abc import Sequence

from services.kvstore.entries import Entry
from services.kvstore.put_flow import StoreFlow
from services.kvstore.ticket import LoadTicket
from services.kvstore.tier import Held
from shared.protocol.store_messages import LoadReply, LoadStatus
from shared.runtime.errors import BatonError, PeerLost, ProtocolError, StoreError, StoreFull
from shared.runtime.scope import until
from shared.transfer.classes import Standing, TrafficClass
from shared.transfer.link import digests_of

_BATCH_BYTES = 16 << 20
_ROOM_POLL_S = 0.005
_TRIES = 3
"""A block that was brought may have been evicted before anybody got to read it."""


async def serve_load(k: StoreFlow, load: LoadTicket) -> None:
    """Runs a load to its end. Returns when nothing of it is read any more."""
    link = load.namespace.link
    try:
        with load.scope:
            load.scope.check()
            async with until(load.deadline, "the load"):
                await _send_leading(k, load)
                receipt = await link.sent(load.key)
                reply = LoadReply(
                    status=LoadStatus.DONE,
                    num_blocks=load.sent,
                    components=digests_of(receipt),
                    on_wire=link.on_wire(load.key),
                    backend=link.actual_backend(load.key),
                )
                k.deps.counters.add("blocks_sent", load.sent)
                load.done(reply)
    except BatonError as error:
        k.deps.counters.add("loads_failed")
        load.failed(error)
    finally:
        load.failed(PeerLost("the load was ended"))  # nothing new where it is decided
        await link.forget(load.key)  # if this fails nobody knows whether the sidecar reads, and the units stay held
        _leave(k, load, load.reading)
        load.lease.loads -= 1
        k.index.sweep(k.deps.clock.now())
        k.deps.changed()


async def _send_leading(k: StoreFlow, load: LoadTicket) -> None:
    """Sends as many leading blocks as can be had. StoreError where there is none."""
    entries, at, size = load.entries, 0, max(1, _BATCH_BYTES // load.namespace.block_bytes)
    lost: StoreError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            sending: asyncio.Task[None] | None = None
            while at < len(entries) and lost is None:
                held, lost = await _bring(k, load, entries[at : at + size])
                if sending is not None:
                    await asyncio.wait({sending})
                if held:
                    sending = group.create_task(_send(k, load, held, at))
                    at += len(held)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    if lost is not None and not load.sent:
        raise lost


async def _bring(k: StoreFlow, load: LoadTicket, entries: Sequence[Entry]) -> tuple[list[Held], StoreError | None]:
    """The leading ones of them, in memory and held by this reader, and why the next one cannot be had; None where it is
    only that there was no room for more at the moment."""
    found: list[Held] = []
    lost: StoreError | None = None
    _begin_reading(k, entries)
    for entry in entries:
        try:
            held = await _bring_one(k, load, entry, may_wait=not found)
        except StoreError as error:
            lost = error
            break
        if held is None:
            break
        found.append(held)
        load.reading.append(held)
    return await _undamaged(k, load, found, entries, lost)


def _begin_reading(k: StoreFlow, entries: Sequence[Entry]) -> None:
    """Of all of them at once, as far as there is room."""
    for entry in entries:
        if k.beneath is None or k.beneath.is_away:
            return
        if entry.beneath and entry.held is None:
            try:
                k.beneath.begin_reading(entry)
            except StoreFull:
                return


async def _bring_one(k: StoreFlow, load: LoadTicket, entry: Entry, *, may_wait: bool) -> Held | None:
    """None where there is no room for it and it may not wait for some."""
    for _ in range(_TRIES):
        if entry.is_whole:
            return k.index.enter(entry)
        while entry.beneath and k.beneath is not None:
            try:
                await k.beneath.read(entry)
            except StoreFull:
                if not may_wait:
                    return None
                await k.deps.clock.sleep(_ROOM_POLL_S)
            else:
                break
    raise StoreError("a stored block is not there any more")


async def _undamaged(
    k: StoreFlow, load: LoadTicket, found: list[Held], entries: Sequence[Entry], lost: StoreError | None
) -> tuple[list[Held], StoreError | None]:
    """Those before the first one whose bytes are not those that were put."""
    digests = await load.namespace.digests([held.unit for held in found])
    for place, (entry, held, digest) in enumerate(zip(entries, found, digests, strict=False)):
        if digest != entry.digest:
            k.deps.counters.add("blocks_damaged")
            k.index.give_up(entry, held)
            _leave(k, load, found[place:])
            return found[:place], StoreError("a stored block was damaged")
    return found, lost


async def _send(k: StoreFlow, load: LoadTicket, held: list[Held], place: int) -> None:
    """place: of the first one in the lease."""
    order, namespace = load.order, load.namespace
    if order.first_token % namespace.block_tokens:
        raise ProtocolError(f"position {order.first_token} is not that of a block of {namespace.block_tokens} tokens")
    pieces = namespace.pieces([one.unit for one in held], order.first_token // namespace.block_tokens + place)
    standing = Standing(TrafficClass.RECOVERY, order.priority)
    await namespace.link.send(load.key, order.secret, order.link, pieces, order.wire_format, standing)
    load.sent += len(held)
    _leave(k, load, held)


def _leave(k: StoreFlow, load: LoadTicket, held: Sequence[Held]) -> None:
    for one in list(held):
        load.reading.remove(one)
        k.index.leave(one, load.namespace.name)
