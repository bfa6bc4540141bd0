"""How a worker moves state: the link to its own sidecar. Flows get one by argument and never see sockets.

The sender names only *logical* units (the k-th page of the ticket) and its own physical ones; which physical units they
land in is decided by the receiver's own table, opened with the ticket. So no peer can name a page of another worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.protocol.messages import ComponentDigest, OnWire
from shared.protocol.packing import PackedUnits
from shared.protocol.reports import LinkAddress
from shared.runtime.errors import PeerLost
from shared.transfer.classes import HANDOFF, Standing
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import EXACT


@dataclass(frozen=True, slots=True)
class TicketKey:
    """The right to write: a room and the generation of the attempt."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive logical units of one component, in some or all of its layers.

    component: index in the layout. first_unit: logical index of the first unit in the ticket's table.
    units: the sender's physical unit ids. rows_in_last: rows of the last unit that carry state; the rest are not sent.
    first_layer, num_layers: which of the component's layers, counted as they lie in the pool; None: all from there on.
    """

    component: int
    first_unit: int
    units: PackedUnits
    rows_in_last: int
    first_layer: int = 0
    num_layers: int | None = None

    def layers(self, component_layers: int) -> range:
        """The layers it has of a component that has `component_layers`."""
        after = component_layers if self.num_layers is None else self.first_layer + self.num_layers
        return range(self.first_layer, after)


@dataclass(frozen=True, slots=True)
class ComponentReceipt:
    """What was moved of one component: payload bytes, and the digest: xxh3-128 (hex) over the xxh3-128 digests of every
    (layer, logical unit) in that order, each over the raw bytes of the rows that carry state. Units are the sender's,
    and of its heads only those count that went to this receiver. Of what came in a lossy wire format each is that of
    the block, as it travelled, that the unit was in. unit_tokens: of those units."""

    name: str
    num_bytes: int
    digest: str
    unit_tokens: int


Receipt = tuple[ComponentReceipt, ...]
"""One entry for each component of the layout, in its order; a component nothing was moved of has 0 bytes."""


def digests_of(receipt: Receipt) -> tuple[ComponentDigest, ...]:
    """As it goes over the wire."""
    return tuple(ComponentDigest(name=one.name, num_bytes=one.num_bytes, digest=one.digest) for one in receipt)


class OwnSidecarLost(PeerLost):
    """It is this worker's own sidecar that is gone, so its peers are not to blame. On the wire a PeerLost."""


class Link(Protocol):
    """Methods raise TransferError subclasses: OwnSidecarLost for our own end, PeerLost for the other. Every ticket
    opened is fenced, every ticket sent is forgotten."""

    @property
    def address(self) -> LinkAddress:
        """Where peers reach this worker's sidecar; goes into the destination. Changes when the sidecar restarts."""

    async def open(
        self,
        key: TicketKey,
        secret: bytes,
        units: tuple[tuple[int, ...], ...],
        on_first_bytes: Callable[[TicketKey], None],
        held_len: int = 0,
        formats: tuple[str, ...] = EXACT_FORMATS,
    ) -> None:
        """Receiver: from now on peers that know `secret` may fill these physical units (per component, in logical
        order), but for the rows of the first `held_len` positions, in no wire format but these. `on_first_bytes` is
        called once on the loop when the first transfer is accepted."""

    async def received(self, key: TicketKey, rank: int | None = None) -> Receipt:
        """Receiver: what has landed so far, counted in the sender's units. Raises UnknownRoom for a key that is not
        open. rank: of the senders, where several share the state; None: the one of our own number."""

    async def fence(self, key: TicketKey) -> None:
        """Receiver: closes the ticket; when it returns no byte of it will be written any more. Idempotent; an unknown
        key is already quiesced. If the sidecar died, its death is the proof and this returns."""

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        wire_format: str = EXACT,
        standing: Standing = HANDOFF,
    ) -> None:
        """Sender: returns when the receiver's sidecar has confirmed that all rows landed, raises if it did not happen.
        The source units must hold still until then. Several sends of one ticket may be under way; they are carried
        out in the order of the calls. wire_format: what both sides have and the ticket accepts; where the way gains
        nothing by it rows travel as they are. standing: which of all tickets' sends go first (`classes.py`)."""

    async def sent(self, key: TicketKey, rank: int | None = None) -> Receipt:
        """Sender: bytes and digests of everything sent so far under `key`, made from the source bytes. rank: of the
        receivers, as in `received`."""

    async def forget(self, key: TicketKey) -> None:
        """Sender: drops what is known of `key` and stops what is under way; when it returns this side reads no source
        unit of it any more. Idempotent."""

    def actual_backend(self, key: TicketKey) -> str | None:
        """The backend that moved (or moves) the ticket's bytes: `shm`, `tcp` …, None before the first byte."""

    def on_wire(self, key: TicketKey) -> tuple[OnWire, ...]:
        """Sender: how each component of which something was sent so far under `key` travelled."""

    def rate(self, peer: LinkAddress) -> float | None:
        """Sender: bytes a second that the link to that boot of a peer took lately; None where it was not measured."""

    async def close(self) -> None: ...
