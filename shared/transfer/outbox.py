"""The sending side of a sidecar: which transfer of which ticket runs over which backend and channel.

Transfers of one ticket run in the order they were asked for; when each has its turn among those of all tickets, the
gate says. Runs on the event loop and moves the blocking work to threads.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import PeerLost, TransferError
from shared.state.layout import PoolLayout
from shared.transfer.backend import Backend, Channel, Digests, Event, Manifest
from shared.transfer.classes import HANDOFF, RANKS, Rules, Standing, TrafficClass
from shared.transfer.gate import Gate, GatedTurn
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece, Receipt, TicketKey
from shared.transfer.traffic import TrafficSums

_MAX_THREADS = 64
_MAX_QUIET_THREADS = 4
"""For background and recovery apart: they wait long for their turns, and must not take the threads of the others."""
_QUIET = frozenset({TrafficClass.RECOVERY, TrafficClass.BACKGROUND})
_IDLE_S = 5.0
"""How long a channel that nobody uses stays open for the next hand-off to the same peer."""
T = TypeVar("T")


@dataclass(slots=True)
class _Peer:
    """Channels to one boot of one peer."""

    idle: list[tuple[Backend, Channel]] = field(default_factory=list)
    users: int = 0


@dataclass(slots=True)
class _Outgoing:
    """What is known of one ticket. asked: the classes of its transfers that are not over. turn: of the one that has its
    place or waits for it. `channel` is set while a transfer of it reads the pool."""

    ledger: Ledger
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: list[TrafficClass] = field(default_factory=list)
    turn: GatedTurn | None = None
    backend: str | None = None
    channel: Channel | None = None
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
        self._layout, self._backends, self._on_moving = layout, backends, on_moving
        self._gate = Gate(Rules()) if gate is None else gate
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "send", on_thread)
        self._quiet_threads = ThreadPoolExecutor(_MAX_QUIET_THREADS, "send-quiet", on_thread)
        self.traffic = TrafficSums()
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
        standing: Standing = HANDOFF,
    ) -> None:
        """Returns when the peer confirmed all of it; raises TransferError otherwise. A transfer that others of its
        ticket wait for has at least their class."""
        ticket = self._tickets.get(key)
        if ticket is None:
            ticket = self._tickets[key] = _Outgoing(Ledger(self._layout.components))
        ticket.asked.append(standing.traffic)
        if ticket.turn is not None:
            ticket.turn.raise_to(standing.traffic)
        try:
            async with ticket.order:
                digests = await self._transfer(ticket, peer, Manifest(key, secret, pieces), event, standing)
                for piece, layers in zip(pieces, digests, strict=True):
                    ticket.ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers)
        finally:
            ticket.asked.remove(standing.traffic)

    def sent(self, key: TicketKey) -> Receipt:
        """Of a key nothing was sent under, an empty receipt."""
        ticket = self._tickets.get(key)
        return ticket.ledger.receipt() if ticket else Ledger(self._layout.components).receipt()

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
            await ticket.still.wait()
        if self._tickets.get(key) is ticket:
            del self._tickets[key]

    async def close(self) -> None:
        """Ends every transfer and channel."""
        for key in list(self._tickets):
            await self.forget(key)
        for peer in self._peers.values():
            for _, channel in peer.idle:
                channel.close()
            peer.idle.clear()
        self._peers.clear()
        self._threads.shutdown(wait=False)
        self._quiet_threads.shutdown(wait=False)

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    async def _transfer(
        self, ticket: _Outgoing, address: LinkAddress, manifest: Manifest, event: Event, standing: Standing
    ) -> Digests:
        self._check_live(ticket)
        peer = self._peers.setdefault(address.boot_id, _Peer())
        peer.users += 1
        began_at = self._gate.now()
        highest = min(ticket.asked, key=RANKS.__getitem__)
        turn = ticket.turn = self._gate.enter(address.boot_id, replace(standing, traffic=highest))
        try:
            await turn.seat()
            self._check_live(ticket)
            backend, channel = await self._channel(peer, address)
            try:
                digests = await self._run(ticket, backend, channel, replace(manifest, turn=turn), event)
            except BaseException:
                channel.close()
                self.counters[f"failed_{backend.name}"] += 1
                raise
            self._keep(peer, (backend, channel))
            busy_s = max(0.0, self._gate.now() - began_at - turn.waited_s)
            self._count(manifest, backend, standing.traffic, turn.waited_s, busy_s)
            return digests
        finally:
            ticket.turn = None
            turn.leave()
            peer.users -= 1
            self._prune()

    async def _run(
        self, ticket: _Outgoing, backend: Backend, channel: Channel, manifest: Manifest, event: Event
    ) -> Digests:
        self._check_live(ticket)
        if ticket.backend != backend.name:
            ticket.backend = backend.name
            self._on_moving(manifest.key, backend.name)
        ticket.channel = channel
        threads = self._quiet_threads if ticket.asked[0] in _QUIET else self._threads

        def abort() -> None:
            channel.abort()
            if ticket.turn is not None:
                ticket.turn.abort()

        try:
            return await self._in_thread(lambda: channel.transfer(manifest, event), abort, threads)
        finally:
            ticket.channel = None
            ticket.still.set()

    def _count(
        self, manifest: Manifest, backend: Backend, traffic: TrafficClass, queue_s: float, busy_s: float
    ) -> None:
        components = self._layout.components
        runs = [(components[piece.component], len(piece.units), piece.rows_in_last) for piece in manifest.pieces]
        num_bytes = [(component.name, payload_bytes(component, units, rows)) for component, units, rows in runs]
        self.traffic.add(traffic, backend.name, num_bytes, queue_s, busy_s)
        self.counters[f"sent_{backend.name}"] += 1
        self.counters[f"sent_{backend.name}_bytes"] += sum(count for _, count in num_bytes)

    def _keep(self, peer: _Peer, entry: tuple[Backend, Channel]) -> None:
        """Leaves a channel open for a while: a connection costs more than a small hand-off."""

        def expire() -> None:
            if entry in peer.idle:  # not in use again, and not dropped meanwhile
                peer.idle.remove(entry)
                entry[1].close()

        peer.idle.append(entry)
        asyncio.get_running_loop().call_later(_IDLE_S, expire)

    async def _channel(self, peer: _Peer, address: LinkAddress) -> tuple[Backend, Channel]:
        while peer.idle:
            backend, channel = peer.idle.pop()
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
            return await self._in_thread(connect, lambda: None, self._threads)
        except asyncio.CancelledError:
            for channel in opened:
                channel.close()
            raise

    async def _in_thread(self, work: Callable[[], T], abort: Callable[[], None], threads: ThreadPoolExecutor) -> T:
        """Runs `work` in a thread. If we are cancelled it is told to stop and waited for: it reads our pages."""
        running = asyncio.get_running_loop().run_in_executor(threads, work)
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
        """Drops peers nobody uses whose channels have died: a peer that restarts never comes back under that boot."""
        for boot_id, peer in list(self._peers.items()):
            if peer.users:
                continue
            alive = [(backend, channel) for backend, channel in peer.idle if channel.is_idle()]
            for entry in peer.idle:
                if entry not in alive:
                    entry[1].close()
            peer.idle = alive
            if not alive:
                del self._peers[boot_id]
