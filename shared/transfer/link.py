"""How a worker moves state: the link to its own sidecar. Flows get one by argument and never see sockets.

The sender names only *logical* units (the k-th page of the ticket) and its own physical ones; which physical units they
land in is decided by the receiver's own table, opened with the ticket. So no peer can name a page of another worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import PeerLost
from shared.transfer.classes import HANDOFF, Standing


@dataclass(frozen=True, slots=True)
class TicketKey:
    """The right to write: a room and the generation of the attempt."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive logical units of one component, all its layers.

    component: index in the layout. first_unit: logical index of the first unit in the ticket's table.
    units: the sender's physical unit ids. rows_in_last: rows of the last unit that carry state; the rest are not sent.
    """

    component: int
    first_unit: int
    units: tuple[int, ...]
    rows_in_last: int


@dataclass(frozen=True, slots=True)
class ComponentReceipt:
    """What was moved of one component: payload bytes, and the digest: xxh3-128 (hex) over the xxh3-128 digests of every
    (layer, logical unit) in that order, each over the raw bytes of the rows that carry state."""

    name: str
    num_bytes: int
    digest: str


Receipt = tuple[ComponentReceipt, ...]
"""One entry for each component of the layout, in its order; a component nothing was moved of has 0 bytes."""


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
    ) -> None:
        """Receiver: from now on a peer that knows `secret` may fill these physical units (per component, in logical
        order). `on_first_bytes` is called once on the loop when the first transfer is accepted."""

    async def received(self, key: TicketKey) -> Receipt:
        """Receiver: what has landed so far. Raises UnknownRoom for a key that is not open."""

    async def fence(self, key: TicketKey) -> None:
        """Receiver: closes the ticket; when it returns no byte of it will be written any more. Idempotent; an unknown
        key is already quiesced. If the sidecar died, its death is the proof and this returns."""

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        standing: Standing = HANDOFF,
    ) -> None:
        """Sender: returns when the receiver's sidecar has confirmed that all rows landed, raises if it did not happen.
        The source units must hold still until then. Several sends of one ticket may be under way; they are carried
        out in the order of the calls. standing: which of all tickets' sends go first (`classes.py`)."""

    async def sent(self, key: TicketKey) -> Receipt:
        """Sender: bytes and digests of everything sent so far under `key`, made from the source bytes."""

    async def forget(self, key: TicketKey) -> None:
        """Sender: drops what is known of `key` and stops what is under way; when it returns this side reads no source
        unit of it any more. Idempotent."""

    def actual_backend(self, key: TicketKey) -> str | None:
        """The backend that moved (or moves) the ticket's bytes: `shm`, `tcp` …, None before the first byte."""

    async def close(self) -> None: ...
