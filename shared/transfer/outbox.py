"""The sending side of a sidecar: which transfer of which ticket runs over which backend and channel.

Transfers of one ticket run in the order they were asked for; when each has its turn among those of all tickets, the
gate says. Runs on the event loop and moves the blocking work to threads.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import TransferError
from shared.state.layout import PoolLayout
from shared.state.remap import Fit
from shared.transfer.backend import Backend, Channel, Digests, Event, Manifest, Wire
from shared.transfer.channels import Channels, in_thread
from shared.transfer.classes import HANDOFF, RANKS, Rules, Standing, TrafficClass
from shared.transfer.formats.catalog import EXACT
from shared.transfer.gate import Gate, GatedTurn
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece, Receipt, TicketKey
from shared.transfer.quiet_threads import QuietThreads, Threads
from shared.transfer.sending import travelling
from shared.transfer.traffic import TrafficSums
from shared.transfer.wire_book import Delivery, on_wire_of

_MAX_THREADS = 64
_MAX_QUIET_THREADS = 4
"""For background and recovery apart: they wait long for their turns, and must not take the threads of the others."""
_QUIET = frozenset({TrafficClass.RECOVERY, TrafficClass.BACKGROUND})
_AT_ONCE_S = 0.0002
"""How long the loop itself waits for a small transfer, before a thread does."""


@dataclass(slots=True)
class _Outgoing:
    """What is known of one ticket. asked: the classes of its transfers that are not over. turn: of the one that has its
    place or waits for it. `channel` is set while a transfer of it reads the pool, job: what a thread does for that."""

    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """By the receiver's rank."""
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: list[TrafficClass] = field(default_factory=list)
    turn: GatedTurn | None = None
    backend: str | None = None
    channel: Channel | None = None
    job: Future[Digests] | None = None
    forgotten: bool = False
    still: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """`backends` in order of preference. on_moving(key, backend) is called when a ticket's first transfer starts;
    on_thread by each thread that sends, first of all."""

    def __init__(
        self,
        layout: PoolLayout,
        backends: tuple[Backend, ...],
        on_moving: Callable[[TicketKey, str], None],
        gate: Gate | None = None,
        on_thread: Callable[[], None] | None = None,
    ) -> None:
        self._layout, self._on_moving = layout, on_moving
        self._gate = Gate(Rules()) if gate is None else gate
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "send", on_thread)
        quiet = ThreadPoolExecutor(_MAX_QUIET_THREADS, "send-quiet", on_thread)
        self._quiet_threads = QuietThreads(quiet, self._threads)
        self._channels = Channels(backends, self._threads)
        self._tickets: dict[TicketKey, _Outgoing] = {}
        self.traffic = TrafficSums()
        self.counters: Counter[str] = Counter()

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        event: Event,
        wire_format: str = EXACT,
        standing: Standing = HANDOFF,
    ) -> Delivery:
        """Returns when the peer confirmed all of it; raises TransferError otherwise. A transfer that others of its
        ticket wait for has at least their class."""
        ticket = self._tickets.get(key)
        if ticket is None:
            ticket = self._tickets[key] = _Outgoing()
        ticket.asked.append(standing.traffic)
        if ticket.turn is not None:
            ticket.turn.raise_to(standing.traffic)
        if ticket.job is not None and standing.traffic not in _QUIET:
            self._quiet_threads.hurry(ticket.job)
        try:
            async with ticket.order:
                manifest = Manifest(key, secret, pieces, Wire(wire_format))
                return await self._transfer(ticket, peer, manifest, event, standing)
        finally:
            ticket.asked.remove(standing.traffic)

    def sent(self, key: TicketKey, rank: int | None = None) -> Receipt:
        """To a rank of the receiver's, the one of our own number if none is named. Of a key nothing was sent under, an
        empty receipt."""
        ticket = self._tickets.get(key)
        ledger = ticket.ledgers.get(self._layout.rank if rank is None else rank) if ticket else None
        return (ledger or Ledger(self._layout.components)).receipt()

    async def forget(self, key: TicketKey) -> None:
        """Stops what is under way; when it returns no source unit is read for `key` any more."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return
        ticket.forgotten = True
        if ticket.turn is not None:
            ticket.turn.abort()
        while ticket.channel is not None:
            ticket.still.clear()
            ticket.channel.abort()
            if ticket.job is not None:
                ticket.job.cancel()  # it may not have a thread yet
            await ticket.still.wait()
        if self._tickets.get(key) is ticket:
            del self._tickets[key]

    async def close(self) -> None:
        """Ends every transfer and channel."""
        for key in list(self._tickets):
            await self.forget(key)
        self._channels.close()
        self._threads.shutdown(wait=False)
        self._quiet_threads.shutdown()

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    async def _transfer(
        self, ticket: _Outgoing, address: LinkAddress, manifest: Manifest, event: Event, standing: Standing
    ) -> Delivery:
        _check_live(ticket)
        began_at = self._gate.now()
        highest = min(ticket.asked, key=RANKS.__getitem__)
        turn = ticket.turn = self._gate.enter(address.boot_id, replace(standing, traffic=highest))
        try:
            await turn.seat()
            _check_live(ticket)
            backend, channel = await self._channels.take(address)
            try:
                digests = await self._run(ticket, backend, channel, replace(manifest, turn=turn), event)
            except BaseException:
                channel.close()
                self.counters[f"failed_{backend.name}"] += 1
                raise
            self._channels.keep(address.boot_id, (backend, channel))
            delivery = self._enter(ticket, manifest, backend, channel.fit, digests)
            busy_s = max(0.0, self._gate.now() - began_at - turn.waited_s)
            self.traffic.add(standing.traffic, backend.name, delivery.on_wire, turn.waited_s, busy_s)
            return delivery
        finally:
            ticket.turn = None
            turn.leave()

    async def _run(
        self, ticket: _Outgoing, backend: Backend, channel: Channel, manifest: Manifest, event: Event
    ) -> Digests:
        _check_live(ticket)
        ticket.channel = channel
        highest = min(ticket.asked, key=RANKS.__getitem__)
        threads: Threads = self._quiet_threads if highest in _QUIET else self._threads

        def keep(job: Future[Digests]) -> None:
            ticket.job = job

        def abort() -> None:
            channel.abort()
            if ticket.turn is not None:
                ticket.turn.abort()

        try:
            # A small transfer is over before its start has been told.
            begun = channel.begin(manifest) if event.wait(0) else None
            found = None if begun is None else begun.poll(_AT_ONCE_S)
            if ticket.backend != backend.name:
                ticket.backend = backend.name
                self._on_moving(manifest.key, backend.name)
            if found is None:
                work = partial(channel.transfer, manifest, event) if begun is None else begun.finish
                found = await in_thread(threads, work, abort, keep)
            return found
        finally:
            ticket.channel = ticket.job = None
            ticket.still.set()

    def _enter(
        self, ticket: _Outgoing, manifest: Manifest, backend: Backend, fit: Fit | None, digests: Digests
    ) -> Delivery:
        """What was confirmed, in the books."""
        components, rank = self._layout.components, self._layout.rank
        if fit is not None:
            components, rank = fit.components, fit.target_rank
        if rank not in ticket.ledgers:
            ticket.ledgers[rank] = Ledger(components)
        num_bytes, pieces = 0, travelling(fit, manifest.pieces)
        for piece, layers in zip(pieces, digests, strict=True):
            ticket.ledgers[rank].record(
                piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer
            )
            component = components[piece.component]
            num_bytes += payload_bytes(component, len(piece.units), piece.rows_in_last, len(layers))
        self.counters[f"sent_{backend.name}"] += 1
        self.counters[f"sent_{backend.name}_bytes"] += num_bytes
        for name, coded_bytes in manifest.wire.used.values():
            self.counters[f"coded_{name}_bytes"] += coded_bytes
        return Delivery(on_wire_of(components, pieces, manifest.wire), manifest.wire.bytes_per_s)


def _check_live(ticket: _Outgoing) -> None:
    if ticket.forgotten:
        raise TransferError("the ticket was forgotten")
