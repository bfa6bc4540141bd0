"""The door of a receiving sidecar: the table of open tickets, and the only place where a transfer is let in.

A transfer enters with `admit` and always leaves with `leave`; between the two it may write the units of its grant and
nothing else. `fence` closes a ticket and reports once no transfer of it is inside. Called from many threads.
"""

import hmac
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.machines.transfer import (
    AnnounceFirstBytes,
    FenceRequested,
    ReceivingTicket,
    ReportQuiesced,
    WriterEntered,
    WriterLeft,
    may_write,
    step,
)
from shared.runtime.errors import InvalidRequest, TransferRefused, UnknownRoom
from shared.state.layout import PoolLayout
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Receipt, TicketKey
from shared.transfer.pool import Run
from shared.transfer.wire import Header, WirePiece, sign

_NUM_TOMBSTONES = 4096


class Refused(TransferRefused):
    """Turned away at the door. `reason` is one word, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Grant:
    """A transfer that was let in. It must look at `stopped` between writes and end soon after it is set."""

    key: TicketKey
    backend: str
    pieces: tuple[WirePiece, ...]
    runs: tuple[Run, ...]
    stopped: threading.Event
    stop: Callable[[], None]
    wire_format: str = "raw"


@dataclass(slots=True)
class _Entry:
    ticket: ReceivingTicket
    secret: bytes
    units: tuple[tuple[int, ...], ...]
    ledger: Ledger
    formats: tuple[str, ...]
    grants: list[Grant] = field(default_factory=list)
    on_quiesced: list[Callable[[], None]] = field(default_factory=list)


class Door:
    """on_first_bytes(key, backend) is called from the thread of the transfer, before it writes."""

    def __init__(self, layout: PoolLayout, on_first_bytes: Callable[[TicketKey, str], None]) -> None:
        self._layout = layout
        self._on_first_bytes = on_first_bytes
        self._lock = threading.Lock()
        self._entries: dict[TicketKey, _Entry] = {}
        self._live: Counter[int] = Counter()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._counters: Counter[str] = Counter()

    def open(
        self,
        key: TicketKey,
        secret: bytes,
        units: tuple[tuple[int, ...], ...],
        formats: tuple[str, ...] = EXACT_FORMATS,
    ) -> None:
        """formats: what its bytes may come as. Raises InvalidRequest for units outside the pool or named twice, and for
        a key that is open."""
        components = self._layout.components
        if len(units) != len(components) or not secret:
            raise InvalidRequest("a ticket needs a secret and one table for each component")
        for component, table in zip(components, units, strict=True):
            limit = self._layout.units_of(component)
            if len(set(table)) != len(table) or not all(0 <= unit < limit for unit in table):
                raise InvalidRequest(f"component {component.name}: units repeat or lie outside the pool")
        with self._lock:
            if key in self._entries:
                raise InvalidRequest("the ticket is open")
            self._entries[key] = _Entry(ReceivingTicket(key.generation), secret, units, Ledger(components), formats)
            self._live[key.room] += 1

    def admit(
        self, header: Header, raw: bytes, mac: bytes, nonce: bytes, backend: str, stop: Callable[[], None]
    ) -> Grant:
        """Lets a transfer in, or raises Refused. `raw` is the header as it came, `mac` what came before it; `stop` ends
        its writing when the ticket is fenced and is called from another thread."""
        key = TicketKey(header.room, header.generation)
        with self._lock:
            entry = self._find(key)
            if not hmac.compare_digest(sign(entry.secret, nonce, header.sequence, raw), mac):
                raise Refused("bad_mac")
            if header.wire_format not in entry.formats:
                raise Refused("bad_format", f"the ticket does not accept {header.wire_format}")
            runs = tuple(self._run(entry, piece) for piece in header.pieces)
            _check_overlap(header.pieces)
            for other in entry.grants:
                _check_overlap((*header.pieces, *other.pieces))
            moved = step(entry.ticket, WriterEntered(key.generation))
            entry.ticket = moved.ticket
            for piece in header.pieces:
                entry.ledger.drop(piece.component, piece.first_unit, piece.num_units)
            grant = Grant(key, backend, header.pieces, runs, threading.Event(), stop, header.wire_format)
            entry.grants.append(grant)
            self._counters["admitted"] += 1
        if AnnounceFirstBytes() in moved.effects:
            try:
                self._on_first_bytes(key, backend)
            except BaseException:
                self.leave(grant)
                raise
        return grant

    def landed(self, grant: Grant, digests: list[list[np.ndarray]]) -> bool:
        """Enters what a transfer wrote (by piece, layer and unit); False if it was stopped before."""
        with self._lock:
            entry = self._entries[grant.key]
            if grant.stopped.is_set():
                return False
            for piece, layers in zip(grant.pieces, digests, strict=True):
                entry.ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers)
                component = self._layout.components[piece.component]
                moved = payload_bytes(component, piece.num_units, piece.rows_in_last)
                self._counters[f"received_{grant.backend}_bytes"] += moved
            self._counters["landed"] += 1
            return True

    def leave(self, grant: Grant) -> None:
        """The transfer writes no more. Called exactly once for each grant."""
        with self._lock:
            entry = self._entries[grant.key]
            entry.grants.remove(grant)
            moved = step(entry.ticket, WriterLeft(grant.key.generation))
            entry.ticket = moved.ticket
            quiesced = ReportQuiesced() in moved.effects
            if quiesced:
                self._bury(grant.key)
        for report in entry.on_quiesced if quiesced else ():
            report()

    def fence(self, key: TicketKey, on_quiesced: Callable[[], None]) -> None:
        """Closes the ticket and makes its transfers end. `on_quiesced` is called once, maybe before this returns, when
        none is inside any more; at once for a key that is not open."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._counters["late_fence"] += 1
                stopping: list[Grant] = []
                quiesced = True
            else:
                moved = step(entry.ticket, FenceRequested(key.generation))
                entry.ticket = moved.ticket
                stopping = list(entry.grants)
                quiesced = ReportQuiesced() in moved.effects
                for grant in stopping:
                    grant.stopped.set()
                if quiesced:
                    self._bury(key)
                else:
                    entry.on_quiesced.append(on_quiesced)
        for grant in stopping:
            grant.stop()
        if quiesced:
            on_quiesced()

    def received(self, key: TicketKey) -> Receipt:
        """Raises UnknownRoom for a key that is not open."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise UnknownRoom("the ticket is not open here")
            return entry.ledger.receipt()

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._counters[what] += amount

    def snapshot(self) -> tuple[dict[str, int], dict[str, int]]:
        """(tickets by state, counters)."""
        with self._lock:
            return dict(Counter(entry.ticket.state.value for entry in self._entries.values())), dict(self._counters)

    def _find(self, key: TicketKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None and key.room in self._live:
            raise Refused("stale_generation")
        if entry is None:
            raise Refused("dead_room" if key.room in self._ended else "unknown_room")
        if not may_write(entry.ticket):
            raise Refused("dead_room", "the ticket is fenced")
        return entry

    def _run(self, entry: _Entry, piece: WirePiece) -> Run:
        if not 0 <= piece.component < len(entry.units):
            raise Refused("bad_component", str(piece.component))
        component, table = self._layout.components[piece.component], entry.units[piece.component]
        if piece.num_layers != component.num_layers:
            raise Refused("bad_layers", f"component {component.name} has {component.num_layers}")
        end = piece.first_unit + piece.num_units
        if piece.first_unit < 0 or piece.num_units < 1 or end > len(table):
            raise Refused("bad_range", f"component {component.name} has {len(table)} units, not {end}")
        if not 1 <= piece.rows_in_last <= component.unit_tokens:
            raise Refused("bad_rows", f"component {component.name} has {component.unit_tokens} rows a unit")
        return Run(piece.component, table[piece.first_unit : end], piece.rows_in_last)

    def _bury(self, key: TicketKey) -> None:
        del self._entries[key]
        self._live[key.room] -= 1
        if not self._live[key.room]:
            del self._live[key.room]
        self._ended[key.room] = None
        if len(self._ended) > _NUM_TOMBSTONES:
            self._ended.popitem(last=False)


def _check_overlap(pieces: tuple[WirePiece, ...]) -> None:
    """Raises Refused if two transfers, or two pieces of one, would write the same unit."""
    ends: dict[int, int] = {}
    for piece in sorted(pieces, key=lambda one: (one.component, one.first_unit)):
        if piece.first_unit < ends.get(piece.component, 0):
            raise Refused("overlap", "a unit is being written already")
        ends[piece.component] = piece.first_unit + piece.num_units
