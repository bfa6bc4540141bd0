"""What a worker and its own sidecar say over their private socket: length-prefixed JSON, requests with ids.

The worker's first byte carries its pool's descriptor; then `Attach`, answered by `Ready`. The end of the stream ends
the sidecar. Requests are carried out as they come and answered in any order.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shared.protocol.messages import ComponentDigest, OnWire
from shared.protocol.packing import PackedBytes, PackedUnits, as_json
from shared.protocol.reports import LinkAddress
from shared.protocol.wire import Generation, Room, WireModel
from shared.runtime.errors import TransferRefused
from shared.state.layout import PoolLayout
from shared.transfer.classes import TrafficClass
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.link import ComponentReceipt, Piece, Receipt, TicketKey
from shared.transfer.traffic import Sent

MAX_FRAME_BYTES = 16 * 1024 * 1024
POOL_BYTE = b"P"
_LENGTH = struct.Struct("!I")


class Attach(WireModel):
    kind: Literal["attach"] = "attach"
    layout: PoolLayout


class Ready(WireModel):
    kind: Literal["ready"] = "ready"
    address: LinkAddress


class Request(WireModel):
    id: int
    room: Room
    generation: Generation

    @property
    def key(self) -> TicketKey:
        return TicketKey(self.room, self.generation)


class Open(Request):
    kind: Literal["open"] = "open"
    secret: PackedBytes
    units: tuple[PackedUnits, ...]
    held_len: int = 0
    formats: tuple[str, ...] = EXACT_FORMATS


class Send(Request):
    kind: Literal["send"] = "send"
    secret: PackedBytes
    peer: LinkAddress
    pieces: tuple[Piece, ...]
    wire_format: str = "raw"
    traffic: TrafficClass = TrafficClass.HANDOFF
    priority: int = 0


class Ask(Request):
    kind: Literal["received", "fence", "sent", "forget"]
    rank: int | None = None
    """With received and sent: of the other side."""


class Ping(WireModel):
    kind: Literal["ping"] = "ping"
    id: int


class Counted(ComponentDigest):
    """unit_tokens: of the units that were counted."""

    unit_tokens: Annotated[int, Field(ge=1)]


class Reply(WireModel):
    kind: Literal["reply"] = "reply"
    id: int
    code: str = ""
    message: str = ""
    receipt: tuple[Counted, ...] = ()
    counters: dict[str, int] = Field(default_factory=dict)
    """In the answer to a ping, as is `sent`."""
    sent: tuple[Sent, ...] = ()
    on_wire: tuple[OnWire, ...] = ()
    bytes_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Of the link this time. Both in the answer to a send."""


class Moving(WireModel):
    """A ticket's first transfer starts: `receiving` it was let in, else it is sent."""

    kind: Literal["moving"] = "moving"
    room: Room
    generation: Generation
    backend: str
    receiving: bool


FromWorker = Annotated[Attach | Open | Send | Ask | Ping, Field(discriminator="kind")]
FromSidecar = Annotated[Ready | Reply | Moving, Field(discriminator="kind")]
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(FromWorker)
FROM_SIDECAR: TypeAdapter[FromSidecar] = TypeAdapter(FromSidecar)


class ControlError(Exception):
    """The other side of the control socket broke the protocol."""


def frame(message: WireModel) -> bytes:
    """Raises TransferRefused where it is longer than the other side reads, which would cost the sidecar its life."""
    body = as_json(message)
    if len(body) > MAX_FRAME_BYTES:
        raise TransferRefused(f"too_long: a control message of {len(body)} bytes: so many units cannot go at once")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """The bytes of a stream until they are whole messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ControlError at one that is too long."""
        self._held += data
        while len(self._held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._held)
            if size > MAX_FRAME_BYTES:
                raise ControlError(f"a control message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._held) < end:
                return
            body = bytes(self._held[_LENGTH.size : end])
            del self._held[:end]
            yield body


def first_frame(sock: socket.socket) -> bytes | None:
    """Blocks for the next message and reads no further; None at the end of the stream."""
    head = sock.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ControlError(f"a control message of {size} bytes")
    body = sock.recv(size, socket.MSG_WAITALL)
    return body if len(body) == size else None


def from_worker(body: bytes) -> FromWorker:
    try:
        return FROM_WORKER.validate_json(body)
    except ValidationError as error:
        raise ControlError(str(error)) from error


def from_sidecar(body: bytes) -> FromSidecar:
    try:
        return FROM_SIDECAR.validate_json(body)
    except ValidationError as error:
        raise ControlError(str(error)) from error


def counted(receipt: Receipt) -> tuple[Counted, ...]:
    return tuple(
        Counted(name=one.name, num_bytes=one.num_bytes, digest=one.digest, unit_tokens=one.unit_tokens)
        for one in receipt
    )


def receipt_of(found: tuple[Counted, ...]) -> Receipt:
    return tuple(ComponentReceipt(one.name, one.num_bytes, one.digest, one.unit_tokens) for one in found)
