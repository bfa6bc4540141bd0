"""The door of a receiving sidecar: the table of open tickets, and the only place where a transfer is let in.

A transfer enters with `admit` and always leaves with `leave`; between the two it may write the units of its grant and
nothing else. `fence` closes a ticket and reports once no transfer of it is inside. Called from many threads.
"""

import hmac
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
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
from shared.runtime.errors import InvalidRequest, UnknownRoom
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.state.remap import Fit
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.grant import Grant, Refused, Stop
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Receipt, TicketKey
from shared.transfer.pool import Run, units_array
from shared.transfer.wire import Header, WirePiece, sign

_NUM_TOMBSTONES = 4096


@dataclass(slots=True)
class _Entry:
    ticket: ReceivingTicket
    secret: bytes
    units: tuple[np.ndarray, ...]
    held_len: int
    formats: tuple[str, ...]
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """By the sender's rank."""
    grants: list[Grant] = field(default_factory=list)
    on_quiesced: list[Callable[[], None]] = field(default_factory=list)


class Door:
    """on_first_bytes(key, backend) is called from the thread of the transfer, before it writes."""

    def __init__(self, layout: PoolLayout, on_first_bytes: Callable[[TicketKey, str], None]) -> None:
        self.layout = layout
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
        units: Sequence[Sequence[int]],
        held_len: int = 0,
        formats: tuple[str, ...] = EXACT_FORMATS,
    ) -> None:
        """The rows of the first `held_len` positions stay as they are. formats: what the bytes of the others may come
        as. Raises InvalidRequest for units outside the pool or named twice, and for a key that is open."""
        components = self.layout.components
        if len(units) != len(components) or not secret:
            raise InvalidRequest("a ticket needs a secret and one table for each component")
        tables = tuple(
            _table(units[k], self.layout.units_of(component), component.name) for k, component in enumerate(components)
        )
        with self._lock:
            if key in self._entries:
                raise InvalidRequest("the ticket is open")
            self._entries[key] = _Entry(ReceivingTicket(key.generation), secret, tables, held_len, formats)
            self._live[key.room] += 1

    def admit(
        self,
        header: Header,
        raw: bytes,
        mac: bytes,
        nonce: bytes,
        backend: str,
        stop: Callable[[], None],
        fit: Fit | None = None,
    ) -> Grant:
        """Lets a transfer in, or raises Refused. `raw` is the header as it came, `mac` what came before it; `stop` ends
        its writing when the ticket is fenced and is called from another thread. fit: of a sender that cuts its state
        otherwise."""
        key = TicketKey(header.room, header.generation)
        with self._lock:
            entry = self._find(key)
            if not hmac.compare_digest(sign(entry.secret, nonce, header.sequence, raw), mac):
                raise Refused("bad_mac")
            if header.wire_format not in entry.formats:
                raise Refused("bad_format", f"the ticket does not accept {header.wire_format}")
            runs = tuple(self._run(entry, piece, fit) for piece in header.pieces)
            if len(header.pieces) > 1:
                _check_overlap(header.pieces)
            rank = self._rank(fit)
            for other in entry.grants:
                if self._rank(other.fit) == rank:  # other ranks bring other heads
                    _check_overlap((*header.pieces, *other.pieces))
            ledger = self._ledger(entry, fit)
            moved = step(entry.ticket, WriterEntered(key.generation))
            entry.ticket = moved.ticket
            for piece in header.pieces:
                ledger.drop(piece.component, piece.first_unit, piece.num_units, piece.layers)
            held_len = entry.held_len
            grant = Grant(key, backend, header.pieces, runs, Stop(), stop, fit, header.wire_format, held_len)
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
            ledger = self._ledger(entry, grant.fit)
            for piece, layers in zip(grant.pieces, digests, strict=True):
                ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer)
                component = ledger.components[piece.component]
                moved = payload_bytes(component, piece.num_units, piece.rows_in_last, piece.num_layers)
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

    def received(self, key: TicketKey, rank: int | None = None) -> Receipt:
        """What came from a rank of the sender's, the one of our own number if none is named. Raises UnknownRoom for a
        key that is not open."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise UnknownRoom("the ticket is not open here")
            ledger = entry.ledgers.get(self.layout.rank if rank is None else rank)
            return (ledger or Ledger(self.layout.components)).receipt()

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

    def _rank(self, fit: Fit | None) -> int:
        return self.layout.rank if fit is None else fit.source_rank

    def _ledger(self, entry: _Entry, fit: Fit | None) -> Ledger:
        """The one of the sender's rank. Refused if it counts what somebody brought who cuts his state otherwise."""
        components, rank = self.layout.components if fit is None else fit.components, self._rank(fit)
        if rank not in entry.ledgers:
            entry.ledgers[rank] = Ledger(components)
        if entry.ledgers[rank].components != components:
            raise Refused("geometry", "the ticket is being filled by somebody else")
        return entry.ledgers[rank]

    def _run(self, entry: _Entry, piece: WirePiece, fit: Fit | None) -> Run:
        """Where a piece goes: our units that those of its rows lie in which we lack."""
        components = self.layout.components if fit is None else fit.components
        if not 0 <= piece.component < len(components) or (fit is not None and not fit.travels(piece.component)):
            raise Refused("bad_component", str(piece.component))
        component = components[piece.component]
        if piece.first_layer < 0 or piece.num_layers < 1 or piece.layers.stop > component.num_layers:
            raise Refused("bad_layers", f"component {component.name} has {component.num_layers}")
        if not 1 <= piece.rows_in_last <= component.unit_tokens:
            raise Refused("bad_rows", f"component {component.name} has {component.unit_tokens} rows a unit")
        held = entry.held_len if component.index is IndexKind.PAGE else 0
        if piece.first_unit < 0 or piece.num_units < 1 or _is_held(piece, component.unit_tokens, held, fit):
            raise Refused("bad_range", f"component {component.name} has no such units")
        index, first, end = piece.component, piece.first_unit, piece.first_unit + piece.num_units
        if fit is not None:
            first, end = fit.target_units(index, first, piece.num_units, piece.rows_in_last, held)
            index = fit.target_index(index)
        table = entry.units[index]
        if end > len(table):
            raise Refused("bad_range", f"component {component.name} has {len(table)} units, not {end}")
        return Run(index, table[first:end], piece.rows_in_last, piece.layers)

    def _bury(self, key: TicketKey) -> None:
        del self._entries[key]
        self._live[key.room] -= 1
        if not self._live[key.room]:
            del self._live[key.room]
        self._ended[key.room] = None
        if len(self._ended) > _NUM_TOMBSTONES:
            self._ended.popitem(last=False)


def _table(units: Sequence[int], limit: int, name: str) -> np.ndarray:
    """The units as an array, or InvalidRequest unless each is one of `limit` and named once."""
    table, seen = units_array(units), np.zeros(limit, dtype=bool)
    if len(table) and int(table.min()) >= 0 and int(table.max()) < limit:
        seen[table] = True
    if np.count_nonzero(seen) != len(table):
        raise InvalidRequest(f"component {name}: units repeat or lie outside the pool")
    return table


def _is_held(piece: WirePiece, unit_tokens: int, held_len: int, fit: Fit | None) -> bool:
    """Whether its first unit has rows that stay as they are. In the units of a sender who cuts pages otherwise the rest
    of them may be wanted, and such a unit is let in."""
    first_row = piece.first_unit * unit_tokens
    if fit is None:
        return first_row < held_len
    return first_row + (piece.rows_in_last if piece.num_units == 1 else unit_tokens) <= held_len


def _check_overlap(pieces: tuple[WirePiece, ...]) -> None:
    """Raises Refused if two transfers, or two pieces of one, would write the same layer of a unit."""
    reaching: list[WirePiece] = []
    for piece in sorted(pieces, key=lambda one: (one.component, one.first_unit)):
        # They share a unit, so no two share a layer: there are never more than the component has layers.
        reaching = [one for one in reaching if _reaches(one, piece)]
        layers = piece.layers
        if any(one.first_layer < layers.stop and layers.start < one.layers.stop for one in reaching):
            raise Refused("overlap", "a unit is being written already")
        reaching.append(piece)


def _reaches(one: WirePiece, later: WirePiece) -> bool:
    """Whether a piece has units at or after the first one of a later piece."""
    return one.component == later.component and one.first_unit + one.num_units > later.first_unit
