"""The sending side of a sidecar: which transfer of which ticket runs when, over which backend and channel.

Transfers of one ticket run in the order they were asked for; tickets do not wait for each other beyond a bound on
transfers to one peer. Runs on the event loop and moves the blocking work to threads.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import PeerLost, TransferError
from shared.state.layout import PoolLayout
from shared.state.remap import Fit
from shared.transfer.backend import Backend, Channel, Digests, Event, Manifest, Wire
from shared.transfer.formats.catalog import EXACT
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece, Receipt, TicketKey
from shared.transfer.sending import travelling

_PER_PEER = 2
_MAX_THREADS = 16
_AT_ONCE_S = 0.0002
"""How long the loop itself waits for a small transfer, before a thread does."""
_IDLE_S = 60.0
"""How long a channel that nobody uses stays open for the next hand-off to the same peer."""
T = TypeVar("T")


@dataclass(slots=True)
class _Peer:
    """Channels to one boot of one peer."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PER_PEER))
    idle: list[tuple[Backend, Channel]] = field(default_factory=list)
    expiries: dict[Channel, asyncio.TimerHandle] = field(default_factory=dict)
    """Of the idle ones."""
    users: int = 0


@dataclass(slots=True)
class _Outgoing:
    """What is known of one ticket. `channel` is set while a transfer of it reads the pool."""

    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """By the receiver's rank."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    backend: str | None = None
    channel: Channel | None = None
    forgotten: bool = False
    still: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """`backends` in order of preference. on_moving(key, backend) is called when a ticket's first transfer starts."""

    def __init__(
        self, layout: PoolLayout, backends: tuple[Backend, ...], on_moving: Callable[[TicketKey, str], None]
    ) -> None:
        self._layout, self._backends, self._on_moving = layout, backends, on_moving
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="send")
        self._peers: dict[str, _Peer] = {}
        self._tickets: dict[TicketKey, _Outgoing] = {}
        self.counters: Counter[str] = Counter()

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        event: Event,
        wire_format: str = EXACT,
    ) -> Wire:
        """Returns when the peer confirmed all of it; raises TransferError otherwise."""
        ticket = self._tickets.get(key)
        if ticket is None:
            ticket = self._tickets[key] = _Outgoing()
        async with ticket.turn:
            manifest = Manifest(key, secret, pieces, Wire(wire_format))
            digests, fit = await self._transfer(ticket, peer, manifest, event)
            ledger = self._ledger(ticket, fit)
            for piece, layers in zip(travelling(fit, pieces), digests, strict=True):
                ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer)
        for name, num_bytes in manifest.wire.used.values():
            self.counters[f"coded_{name}_bytes"] += num_bytes
        return manifest.wire

    def sent(self, key: TicketKey, rank: int | None = None) -> Receipt:
        """To a rank of the receiver's, the one of our own number if none is named. Of a key nothing was sent under, an
        empty receipt."""
        ticket = self._tickets.get(key)
        ledger = ticket.ledgers.get(self._layout.rank if rank is None else rank) if ticket else None
        return (ledger or Ledger(self._layout.components)).receipt()

    def _ledger(self, ticket: _Outgoing, fit: Fit | None) -> Ledger:
        rank = self._layout.rank if fit is None else fit.target_rank
        if rank not in ticket.ledgers:
            ticket.ledgers[rank] = Ledger(self._layout.components if fit is None else fit.components)
        return ticket.ledgers[rank]

    async def forget(self, key: TicketKey) -> None:
        """Stops what is under way; when it returns no source unit is read for `key` any more."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return
        ticket.forgotten = True
        while ticket.channel is not None:
            ticket.still.clear()
            ticket.channel.abort()
            await ticket.still.wait()
        if self._tickets.get(key) is ticket:
            del self._tickets[key]

    async def close(self) -> None:
        """Ends every transfer and channel."""
        for key in list(self._tickets):
            await self.forget(key)
        for peer in self._peers.values():
            for _, channel in peer.idle:
                peer.expiries.pop(channel).cancel()
                channel.close()
            peer.idle.clear()
        self._peers.clear()
        self._threads.shutdown(wait=False)

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    async def _transfer(
        self, ticket: _Outgoing, address: LinkAddress, manifest: Manifest, event: Event
    ) -> tuple[Digests, Fit | None]:
        self._check_live(ticket)
        peer = self._peers.get(address.boot_id)
        if peer is None:
            peer = self._peers[address.boot_id] = _Peer()
        peer.users += 1
        try:
            async with peer.slots:
                self._check_live(ticket)
                backend, channel = await self._channel(peer, address)
                try:
                    digests = await self._run(ticket, backend, channel, manifest, event)
                except BaseException:
                    channel.close()
                    self.counters[f"failed_{backend.name}"] += 1
                    raise
                self._keep(peer, (backend, channel))
                return digests, channel.fit
        finally:
            peer.users -= 1
            self._prune()

    async def _run(
        self, ticket: _Outgoing, backend: Backend, channel: Channel, manifest: Manifest, event: Event
    ) -> Digests:
        self._check_live(ticket)
        ticket.channel = channel
        try:
            # A small transfer is over before its start has been told.
            begun = channel.begin(manifest) if event.wait(0) else None
            found = None if begun is None else begun.poll(_AT_ONCE_S)
            if ticket.backend != backend.name:
                ticket.backend = backend.name
                self._on_moving(manifest.key, backend.name)
            if found is None:
                work = partial(channel.transfer, manifest, event) if begun is None else begun.finish
                found = await self._in_thread(work, channel.abort)
        finally:
            ticket.channel = None
            ticket.still.set()
        self.counters[f"sent_{backend.name}"] += 1
        components = self._layout.components if channel.fit is None else channel.fit.components
        self.counters[f"sent_{backend.name}_bytes"] += sum(
            payload_bytes(components[piece.component], len(piece.units), piece.rows_in_last, len(layers))
            for piece, layers in zip(travelling(channel.fit, manifest.pieces), found, strict=True)
        )
        return found

    def _keep(self, peer: _Peer, entry: tuple[Backend, Channel]) -> None:
        """Leaves a channel open for a while: a connection costs more than a small hand-off."""

        def expire() -> None:
            del peer.expiries[entry[1]]
            peer.idle.remove(entry)
            entry[1].close()
            self._prune()

        peer.idle.append(entry)
        peer.expiries[entry[1]] = asyncio.get_running_loop().call_later(_IDLE_S, expire)

    async def _channel(self, peer: _Peer, address: LinkAddress) -> tuple[Backend, Channel]:
        while peer.idle:
            backend, channel = peer.idle.pop()
            peer.expiries.pop(channel).cancel()
            if channel.is_idle():
                return backend, channel
            channel.close()
        lost: PeerLost | None = None
        for backend in self._backends:
            if not backend.reaches(address):
                continue
            try:
                return backend, await self._connect(backend, address)
            except PeerLost as error:
                lost = error
        offered = ", ".join(address.backends) or "none"
        raise lost or PeerLost(f"no backend of ours reaches the peer, which offers {offered}")

    async def _connect(self, backend: Backend, address: LinkAddress) -> Channel:
        opened: list[Channel] = []

        def connect() -> Channel:
            opened.append(backend.connect(address))
            return opened[0]

        try:
            return await self._in_thread(connect, lambda: None)
        except asyncio.CancelledError:
            for channel in opened:
                channel.close()
            raise

    async def _in_thread(self, work: Callable[[], T], abort: Callable[[], None]) -> T:
        """Runs `work` in a thread. If we are cancelled it is told to stop and waited for: it reads our pages."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            abort()
            await asyncio.wait([running])
            running.exception()
            raise

    def _check_live(self, ticket: _Outgoing) -> None:
        if ticket.forgotten:
            raise TransferError("the ticket was forgotten")

    def _prune(self) -> None:
        """Drops peers nobody uses: a peer that restarts never comes back under that boot."""
        for boot_id, peer in list(self._peers.items()):
            if not peer.users and not peer.idle:
                del self._peers[boot_id]
