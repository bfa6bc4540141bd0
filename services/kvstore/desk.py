"""The kvstore's front desk: what arrives over NATS becomes a put, a load, a lease, or a counted no-op. Everything is
answered the same when it is asked again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.kvstore.entries import Chain
from services.kvstore.load_flow import serve_load
from services.kvstore.namespaces import Namespaces
from services.kvstore.put_flow import StoreFlow, serve_put
from services.kvstore.ticket import LoadTicket, Put
from shared.bus.base import Subscription
from shared.bus.listen import listen
from shared.protocol import subjects
from shared.protocol.messages import Cancel, CommitStatus, Ping, Verdict
from shared.protocol.store_messages import (
    Lease,
    Load,
    LoadReply,
    LoadStatus,
    Lookup,
    LookupReply,
    Offer,
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.protocol.wire import WireModel
from shared.runtime.errors import BatonError, Cancelled, DeadRoom, PeerLost, QueueFull, ShuttingDown, UnknownRoom
from shared.runtime.tombstones import Tombstones
from shared.store.namespaces import name_of
from shared.transfer.link import TicketKey

ROLE = "kvstore"
_ANSWER_S = 0.4
_MAX_PUTS, _MAX_LOADS = 256, 256
_LONGEST_PUT_S, _LONGEST_LEASE_S, _LONGEST_PIN_S = 60.0, 600.0, 86_400.0

R = TypeVar("R")
Handler = Callable[[Any], Awaitable[WireModel | None]]


class StoreDesk:
    """Owns the puts and loads under way. `start` subscribes; their coroutines belong to the service."""

    def __init__(self, flow: StoreFlow, namespaces: Namespaces) -> None:
        self.flow, self.namespaces = flow, namespaces
        self.deps, self.index = flow.deps, flow.index
        self.puts: dict[int, Put] = {}
        self.loads: dict[int, LoadTicket] = {}
        self.draining = False
        self._stored: Tombstones[StoredReply] = Tombstones(self.deps.clock)
        self._loaded: Tombstones[LoadReply] = Tombstones(self.deps.clock)
        self._released: Tombstones[bool] = Tombstones(self.deps.clock)
        """Leases that were let go: a question that comes late does not bring one back."""
        self._subscriptions: list[Subscription] = []

    def handlers(self) -> dict[str, tuple[type[WireModel], Handler]]:
        return {
            subjects.OFFER: (Offer, self.on_offer),
            subjects.STORED: (Stored, self.on_stored),
            subjects.LOOKUP: (Lookup, self.on_lookup),
            subjects.LOAD: (Load, self.on_load),
            subjects.LEASE: (Lease, self.on_lease),
            subjects.CANCEL: (Cancel, self.on_cancel),
            subjects.PING: (Ping, self.on_ping),
        }

    async def start(self) -> None:
        for verb, (kind, handle) in self.handlers().items():
            self._subscriptions.append(
                await listen(self.deps.bus, ROLE, self.deps.peer, verb, kind, handle, self.deps.counters)
            )

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def __len__(self) -> int:
        return len(self.puts) + len(self.loads)

    async def on_offer(self, order: Offer) -> OfferReply:
        """Takes units for what is not here yet, and opens them to the worker's sidecar."""
        try:
            put = await self._put_of(order)
        except BatonError as error:
            return OfferReply(status=OfferStatus.REFUSED, code=error.code, message=error.message)
        if isinstance(put, OfferReply):
            return put
        await asyncio.wait({put.opened})
        if put.answer.done() and (ended := put.answer.result()).status is CommitStatus.FAILED:
            return OfferReply(status=OfferStatus.REFUSED, code=ended.code, message=ended.message)
        return put.reply(max(0.0, put.deadline - self.deps.clock.now()))

    async def on_stored(self, record: Stored) -> StoredReply:
        """The put's record; *pending* means: ask again."""
        put = self.puts.get(record.room)
        if put is None or put.key.generation != record.generation:
            dead = StoredReply(status=CommitStatus.DEAD, code=DeadRoom.code, message="there is no such put any more")
            return self._stored.get(record.room) or dead
        if not put.record.done():
            put.record.set_result(record)
        pending = StoredReply(status=CommitStatus.PENDING)
        return await _answer_in_time(put.answer, pending)

    async def on_lookup(self, question: Lookup) -> LookupReply:
        """What is found is leased."""
        self.deps.counters.add("blocks_asked", len(question.keys))
        chain = Chain(name_of(question.namespace), question.keys, first_block=question.first_block)
        away = self.flow.beneath is None or self.flow.beneath.is_away
        over = self.draining or self._released.get(question.lease) is not None
        if over or not self.index.held_of(chain, memory_only=away):
            return LookupReply(num_blocks=0)
        try:
            self.namespaces.open_soon(question.namespace)  # it may have nothing but blocks beneath
            now = self.deps.clock.now()
            until, pin_until = now + min(question.remaining_s, _LONGEST_LEASE_S), _pin_until(now, question.pin_s)
            lease = self.index.lookup(question.lease, chain, now, until, pin_until, memory_only=away)
        except BatonError as error:
            return LookupReply(num_blocks=0, code=error.code, message=error.message)
        if lease is None:
            return LookupReply(num_blocks=0)
        self.deps.counters.add("blocks_found", len(lease.entries))
        only_beneath = tuple(k for k, entry in enumerate(lease.entries) if not entry.is_whole)
        num_bytes = sum(entry.num_bytes for entry in lease.entries)
        return LookupReply(num_blocks=len(lease.entries), num_bytes=num_bytes, beneath=only_beneath)

    async def on_load(self, order: Load) -> LoadReply:
        """The first blocks of a lease, into that ticket; *pending* means: ask again."""
        load = self.loads.get(order.room)
        if load is None and (ended := self._loaded.get(order.room)) is not None:
            return ended
        if load is not None and load.answer.done():
            return load.answer.result()  # as after its end, which has yet to run
        try:
            load = load or await self._begin_load(order)
            if (load.key.generation, load.lease.name) != (order.generation, order.lease):
                raise DeadRoom("that room is another load's")
        except BatonError as error:
            return LoadReply(status=LoadStatus.FAILED, code=error.code, message=error.message)
        return await _answer_in_time(load.answer, LoadReply(status=LoadStatus.PENDING))

    async def on_lease(self, order: Lease) -> Verdict:
        """Keeps it for longer, or lets it go."""
        now = self.deps.clock.now()
        lease = self.index.leases.find(order.lease, now)
        if not order.remaining_s:
            self._released.put(order.lease, True)
        if lease is None:
            return Verdict(ok=order.remaining_s == 0, code=UnknownRoom.code, message="there is no such lease any more")
        lease.deadline = now + min(order.remaining_s, _LONGEST_LEASE_S)
        self.index.sweep(now)
        self.deps.changed()
        return Verdict(ok=True)

    async def on_cancel(self, order: Cancel) -> Verdict:
        """Ends the put or load of that ticket."""
        tickets: tuple[Put | LoadTicket | None, ...] = (self.puts.get(order.room), self.loads.get(order.room))
        for ticket in tickets:
            if ticket is not None and ticket.key.generation == order.generation:
                ticket.end(Cancelled(order.reason))
        return Verdict(ok=True)

    async def on_ping(self, _ping: Ping) -> Verdict:
        return Verdict(ok=True)

    def end_lost(self, keys: tuple[TicketKey, ...]) -> None:
        """A sidecar of ours died: these puts will never fill."""
        for key in keys:
            if (put := self.puts.get(key.room)) is not None:
                put.end(PeerLost("the kvstore's sidecar is gone"))

    def end_all(self) -> None:
        tickets: tuple[Put | LoadTicket, ...] = (*self.puts.values(), *self.loads.values())
        for ticket in tickets:
            ticket.end(PeerLost("the kvstore is shutting down"))

    async def _put_of(self, order: Offer) -> Put | OfferReply:
        """The put of this offer, begun if it is a new one; or the answer, where there is nothing to put."""
        namespace = await self.namespaces.open(order.namespace)
        if (put := self.puts.get(order.room)) is not None:
            return put
        if self._stored.get(order.room) is not None:
            raise DeadRoom("that put has ended")
        if self.draining or len(self.puts) >= _MAX_PUTS:
            raise ShuttingDown() if self.draining else QueueFull(f"{_MAX_PUTS} puts are under way")
        now = self.deps.clock.now()
        chain = Chain(namespace.name, order.keys, order.parent, order.first_block)
        wanted = self.index.reserve(chain, order.tenant, now, _pin_until(now, order.pin_s))
        if wanted is None:
            return OfferReply(status=OfferStatus.ORPHAN)
        held = self.index.held_of(chain)
        if not wanted:
            return OfferReply(status=OfferStatus.NOTHING, held=held)
        put = Put(order, namespace, wanted, held, now + min(order.remaining_s, _LONGEST_PUT_S))
        self.puts[order.room] = put
        self.deps.spawn(self._serve_put(put), f"put-{order.room}")
        self.deps.changed()
        return put

    async def _begin_load(self, order: Load) -> LoadTicket:
        """The load of this order; meanwhile a repeat of it may have begun it."""
        lease = self.index.leases.find(order.lease, self.deps.clock.now())
        namespace = None if lease is None else await self.namespaces.opened(lease.namespace)
        if (load := self.loads.get(order.room)) is not None:
            return load
        now = self.deps.clock.now()
        lease = self.index.leases.find(order.lease, now)
        if lease is None or namespace is None:
            raise UnknownRoom("there is no such lease any more")
        if self.draining or len(self.loads) >= _MAX_LOADS:
            raise ShuttingDown() if self.draining else QueueFull(f"{_MAX_LOADS} loads are under way")
        load = LoadTicket(order, namespace, lease, now + order.remaining_s)
        lease.loads += 1
        self.loads[order.room] = load
        self.deps.spawn(self._serve_load(load), f"load-{order.room}")
        self.deps.changed()
        return load

    async def _serve_put(self, put: Put) -> None:
        try:
            await serve_put(self.flow, put)
        finally:
            del self.puts[put.key.room]
            self._stored.put(put.key.room, put.answer.result())

    async def _serve_load(self, load: LoadTicket) -> None:
        try:
            await serve_load(self.flow, load)
        finally:
            del self.loads[load.key.room]
            self._loaded.put(load.key.room, load.answer.result())


def _pin_until(now: float, pin_s: float) -> float:
    return now + min(pin_s, _LONGEST_PIN_S) if pin_s else 0.0


async def _answer_in_time(answer: "asyncio.Future[R]", otherwise: R) -> R:
    done, _ = await asyncio.wait({answer}, timeout=_ANSWER_S)
    return answer.result() if done else otherwise
