"""What of a ticket was on the wire, as what, and how fast each link was: the sender's side of formats."""

from collections import OrderedDict
from dataclasses import dataclass

from shared.protocol.messages import OnWire
from shared.protocol.reports import LinkAddress
from shared.state.components import StateComponent
from shared.transfer.backend import Wire
from shared.transfer.control import Reply
from shared.transfer.formats.agree import together
from shared.transfer.formats.catalog import EXACT
from shared.transfer.ledger import bytes_of
from shared.transfer.link import Piece, TicketKey

_NUM_RATES = 256


def on_wire_of(components: tuple[StateComponent, ...], pieces: tuple[Piece, ...], wire: Wire) -> tuple[OnWire, ...]:
    """How each component of a transfer travelled, once it has."""
    rows: dict[int, int] = {}
    for piece in pieces:
        moved = bytes_of(piece, components[piece.component])
        rows[piece.component] = rows.get(piece.component, 0) + moved
    used = {index: (EXACT, num_bytes) for index, num_bytes in rows.items()} | wire.used
    return tuple(
        OnWire(name=components[index].name, wire_format=name, num_bytes=num_bytes)
        for index, (name, num_bytes) in sorted(used.items())
    )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A transfer that was confirmed: how its components travelled, and how fast, where enough was sent to tell."""

    on_wire: tuple[OnWire, ...]
    bytes_per_s: float | None


class WireBook:
    """Kept by the worker, out of its sidecar's answers."""

    def __init__(self) -> None:
        self._tickets: dict[TicketKey, dict[str, OnWire]] = {}
        self._rates: OrderedDict[str, float] = OrderedDict()

    def sent(self, key: TicketKey, peer: LinkAddress, reply: Reply) -> None:
        known = self._tickets.setdefault(key, {})
        for one in reply.on_wire:
            known[one.name] = together(known[one.name], one) if one.name in known else one
        if reply.bytes_per_s is not None:
            before = self._rates.get(peer.boot_id, reply.bytes_per_s)
            self._rates[peer.boot_id] = (before + reply.bytes_per_s) / 2
            self._rates.move_to_end(peer.boot_id)
            if len(self._rates) > _NUM_RATES:
                self._rates.popitem(last=False)

    def of(self, key: TicketKey) -> tuple[OnWire, ...]:
        return tuple(self._tickets.get(key, {}).values())

    def rate(self, peer: LinkAddress) -> float | None:
        return self._rates.get(peer.boot_id)

    def forget(self, key: TicketKey) -> None:
        self._tickets.pop(key, None)
