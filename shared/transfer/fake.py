"""Links inside one process, on one event loop, without threads or sockets: for simulation and for tests of flows.

They go through the same door, signatures, copies and digests as the real ones, so that only the wire is fake. All
waiting is on the loop, which may run on virtual time. A policy injects delays and failures.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.protocol.messages import OnWire
from shared.protocol.reports import LinkAddress
from shared.runtime.errors import GeometryMismatch, PeerLost, TransferRefused
from shared.state.layout import PoolLayout
from shared.state.remap import Fit, fit_between
from shared.transfer.backend import Digests
from shared.transfer.classes import HANDOFF, Standing
from shared.transfer.door import Door
from shared.transfer.fake_copy import LayerCopy
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import EXACT
from shared.transfer.grant import Grant, Refused
from shared.transfer.ledger import Ledger
from shared.transfer.link import Piece, Receipt, TicketKey
from shared.transfer.mishap import Mishap as Mishap
from shared.transfer.mishap import Policy, no_mishap
from shared.transfer.pool import Pool, Run
from shared.transfer.sending import runs_of, travelling, wire_pieces
from shared.transfer.touches import Touch as Touch
from shared.transfer.touches import touches
from shared.transfer.wire import Header, sign

_NAME = "fake"
_NONCE = b"no wire, no replay"


class FakeNetwork:
    """Knows the links by boot id. `policy` is asked once for each transfer."""

    def __init__(self, policy: Policy = no_mishap) -> None:
        self.policy = policy
        self.links: dict[str, FakeLink] = {}
        self._numbers = itertools.count(1)

    def new_boot_id(self) -> str:
        return f"fake{next(self._numbers):04d}"


@dataclass(slots=True)
class _Outgoing:
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end what is under way."""
    still: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: list[tuple[Piece, ...]] = field(default_factory=list)
    moved: bool = False


class FakeLink:
    """A Link over `buffer`, a writable pool of `layout`. `restart` is what the death of a real sidecar looks like."""

    def __init__(
        self,
        network: FakeNetwork,
        layout: PoolLayout,
        buffer: memoryview,
        on_restart: Callable[[], None] | None = None,
    ) -> None:
        self._network, self._layout, self._pool = network, layout, Pool(layout, buffer)
        self._on_restart = on_restart
        self._first_bytes: dict[TicketKey, Callable[[TicketKey], None]] = {}
        self._open_units: dict[TicketKey, tuple[tuple[int, ...], ...]] = {}
        self._sending: dict[TicketKey, _Outgoing] = {}
        self._received_backend: dict[TicketKey, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.restarts = 0
        self._boot()

    @property
    def address(self) -> LinkAddress:
        return LinkAddress(boot_id=self._boot_id, host=_NAME, port=0, socket="", backends=(_NAME,))

    @property
    def counters(self) -> dict[str, int]:
        """Of the door."""
        return self.door.snapshot()[1]

    async def open(
        self,
        key: TicketKey,
        secret: bytes,
        units: tuple[tuple[int, ...], ...],
        on_first_bytes: Callable[[TicketKey], None],
        held_len: int = 0,
        formats: tuple[str, ...] = EXACT_FORMATS,
    ) -> None:
        self.door.open(key, secret, units, held_len, formats)
        self._first_bytes[key] = on_first_bytes
        self._open_units[key] = units

    async def received(self, key: TicketKey, rank: int | None = None) -> Receipt:
        return self.door.received(key, rank)

    async def fence(self, key: TicketKey) -> None:
        if key not in self._first_bytes:
            return
        quiesced = asyncio.Event()
        self.door.fence(key, quiesced.set)
        await quiesced.wait()
        self._first_bytes.pop(key, None)
        self._open_units.pop(key, None)
        self._received_backend.pop(key, None)

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        wire_format: str = EXACT,
        standing: Standing = HANDOFF,
    ) -> None:
        ticket = self._sending.setdefault(key, _Outgoing())
        ticket.under_way.append(pieces)
        task = asyncio.get_running_loop().create_task(self._send(ticket, key, secret, peer, pieces))
        self._tasks.add(task)
        task.add_done_callback(self._sent)
        await asyncio.shield(task)  # who sends may be cancelled: only `forget` stops the sidecar

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever sent may not be there any more to hear it

    async def _send(
        self, ticket: _Outgoing, key: TicketKey, secret: bytes, peer: LinkAddress, pieces: tuple[Piece, ...]
    ) -> None:
        try:
            async with ticket.turn:
                digests, fit = await self._transfer(ticket, key, secret, peer, pieces)
                rank = self._layout.rank if fit is None else fit.target_rank
                if rank not in ticket.ledgers:
                    ticket.ledgers[rank] = Ledger(self._layout.components if fit is None else fit.components)
                for piece, layers in zip(travelling(fit, pieces), digests, strict=True):
                    ticket.ledgers[rank].record(
                        piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer
                    )
        finally:
            ticket.under_way.remove(pieces)
            if not ticket.under_way:
                ticket.still.set()

    async def sent(self, key: TicketKey, rank: int | None = None) -> Receipt:
        ticket = self._sending.get(key)
        ledger = ticket.ledgers.get(self._layout.rank if rank is None else rank) if ticket else None
        return (ledger or Ledger(self._layout.components)).receipt()

    async def forget(self, key: TicketKey) -> None:
        ticket = self._sending.get(key)
        if ticket is None:
            return
        ticket.stop.set()
        while ticket.under_way:
            ticket.still.clear()
            await ticket.still.wait()
        if self._sending.get(key) is ticket:
            del self._sending[key]

    def actual_backend(self, key: TicketKey) -> str | None:
        ticket = self._sending.get(key)
        return _NAME if ticket is not None and ticket.moved else self._received_backend.get(key)

    def on_wire(self, key: TicketKey) -> tuple[OnWire, ...]:
        """Nothing is ever coded here."""
        ticket = self._sending.get(key)
        sent = [c for ledger in ticket.ledgers.values() for c in ledger.receipt() if c.num_bytes] if ticket else []
        return tuple(OnWire(name=c.name, wire_format=EXACT, num_bytes=c.num_bytes) for c in sent)

    def rate(self, peer: LinkAddress) -> float | None:
        return None

    def touched(self) -> list[Touch]:
        """Every unit that is not quiet, as far as this link is concerned."""
        reads = [(key, pieces) for key, ticket in self._sending.items() for pieces in ticket.under_way]
        return touches(self._open_units, reads)

    @property
    def num_tickets(self) -> int:
        """Tickets it still knows, as receiver or as sender."""
        return len(self._open_units) + len(self._sending)

    def die(self) -> None:
        """kill -9 of worker and sidecar, as the others see it: at once nothing more is read or written."""
        self._network.links.pop(self._boot_id, None)
        for ticket in self._sending.values():
            ticket.stop.set()
        for key in list(self._open_units):
            self.door.fence(key, lambda: None)

    async def restart(self) -> None:
        """Everything pending fails, every receiving ticket is quiesced, and the link comes back under a new boot id."""
        await self.close()
        self._boot()
        self.restarts += 1
        if self._on_restart is not None:
            self._on_restart()

    async def close(self) -> None:
        self._network.links.pop(self._boot_id, None)
        for key in list(self._sending):
            await self.forget(key)
        for key in list(self._first_bytes):
            await self.fence(key)

    def _boot(self) -> None:
        self._boot_id = self._network.new_boot_id()
        self.door = Door(self._layout, self._announce)
        self._network.links[self._boot_id] = self

    def _announce(self, key: TicketKey, backend: str) -> None:
        self._received_backend[key] = backend
        asyncio.get_running_loop().call_soon(self._first_bytes[key], key)

    async def _transfer(
        self, ticket: _Outgoing, key: TicketKey, secret: bytes, peer: LinkAddress, pieces: tuple[Piece, ...]
    ) -> tuple[Digests, Fit | None]:
        mishap = self._network.policy(key, pieces)
        await _pause(ticket.stop, mishap.delay_s)
        other = self._network.links.get(peer.boot_id)
        if other is None:
            raise PeerLost("the peer's sidecar is gone")
        try:
            fit = fit_between(self._layout, other._layout)
        except GeometryMismatch as error:
            raise TransferRefused(f"geometry: {error.message}") from error
        pieces = travelling(fit, pieces)
        runs = runs_of(self._pool, pieces)
        wire = wire_pieces(self._pool, pieces, with_units=False)
        header = Header(room=key.room, generation=key.generation, sequence=0, pieces=wire)
        grant = other._admit(header, secret, ticket.stop.set, fit)
        ticket.moved = True
        try:
            copy = LayerCopy(self._pool, other._pool, grant, runs)
            written, digests = await self._write(ticket, other, copy, runs, mishap)
            if not other.door.landed(grant, written):
                raise PeerLost("the ticket was fenced meanwhile")
            return digests, fit
        finally:
            other.door.leave(grant)

    def _admit(self, header: Header, secret: bytes, stop: Callable[[], None], fit: Fit | None) -> Grant:
        raw = header.model_dump_json().encode()
        try:
            return self.door.admit(header, raw, sign(secret, _NONCE, 0, raw), _NONCE, _NAME, stop, fit)
        except Refused as error:
            self.door.count(f"refused_{error.reason}")
            raise

    async def _write(
        self, ticket: _Outgoing, other: "FakeLink", copy: LayerCopy, runs: list[Run], mishap: Mishap
    ) -> tuple[Digests, Digests]:
        """(digests of what was written, digests of the source). Stopped, it leaves."""
        written: Digests = []
        digests: Digests = []
        await _pause(ticket.stop, None if mishap.lost else 0.0)
        if mishap.error is not None:
            raise mishap.error
        for number, run in enumerate(runs):
            written.append([])
            digests.append([])
            for layer in run.layers:
                if mishap.layer_delay_s:
                    await self._pause_in_layer(ticket.stop, mishap, other, copy, number, layer)
                found = copy.copy(number, layer, spoil=mishap.corrupt and layer == 0)
                written[-1].append(found[0])
                digests[-1].append(found[1])
        return written, digests

    async def _pause_in_layer(
        self, stop: asyncio.Event, mishap: Mishap, other: "FakeLink", copy: LayerCopy, number: int, layer: int
    ) -> None:
        """A slow copier notices late that it was stopped: what it still writes shows whose pages those are by then."""
        try:
            await _pause(stop, mishap.layer_delay_s)
        except PeerLost:
            await asyncio.sleep(mishap.linger_s)
            if mishap.linger_s and self._boot_id in self._network.links and other._boot_id in self._network.links:
                copy.copy(number, layer)
            raise


async def _pause(stop: asyncio.Event, delay_s: float | None) -> None:
    """Waits (for ever if None); PeerLost as soon as the transfer is stopped."""
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return
    raise PeerLost("the transfer was stopped")
