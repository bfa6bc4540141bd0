"""What two sidecars say to each other around the bytes: length-prefixed JSON frames on one connection.

    receiver  Hello      its boot id, its layout and a random nonce for this connection
    sender    Greeting   its layout (over shm the frame carries its pool's read-only descriptor)
    receiver  Answer
    then for each transfer
    sender    Header     HMAC-SHA256(secret, nonce || sequence || header) before the header
    receiver  Answer     over tcp: go ahead, or why not; then the bytes follow in the header's order
    sender    a byte     over shm, before each burst, if the header says so (`permits.py`)
    receiver  Answer     everything landed, or why not

The order of bytes: piece after piece, layer after layer, logical unit after unit, only rows that carry state; in a wire
format other than raw piece after piece, blocks behind their lengths (`coded_rows.py`). Units are the sender's. Where
the receiver cuts its state otherwise, both know from the layouts what of it goes this way.
"""

import hmac
import struct
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.protocol.packing import PackedBytes, PackedUnits
from shared.protocol.wire import FormatName, Generation, Room, WireModel
from shared.runtime.errors import TransferRefused
from shared.state.layout import PoolLayout

MAX_FRAME_BYTES = 1024 * 1024
MAC_BYTES = 32
NONCE_BYTES = 32
_SEQUENCE = struct.Struct("!Q")


class Hello(WireModel):
    v: Literal[1] = 1
    boot_id: str
    layout: PoolLayout
    nonce: PackedBytes


class Greeting(WireModel):
    v: Literal[1] = 1
    layout: PoolLayout


class WirePiece(BaseModel):
    """A run of logical units in layers [first_layer, first_layer + num_layers). `units`: the sender's physical units,
    over shm and nixl only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    component: int
    first_layer: int = 0
    num_layers: int
    first_unit: int
    num_units: int
    rows_in_last: int
    units: PackedUnits = ()

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


class Header(WireModel):
    """burst_bytes, num_bursts: over shm the receiver waits for a byte before each burst (see `permits.py`); 0: not."""

    room: Room
    generation: Generation
    sequence: int
    burst_bytes: Annotated[int, Field(ge=0, lt=1 << 40)] = 0
    num_bursts: Annotated[int, Field(ge=0, lt=1 << 20)] = 0
    pieces: tuple[WirePiece, ...]
    wire_format: FormatName = "raw"
    """Over tcp only."""


class Answer(WireModel):
    ok: bool
    reason: str = ""
    message: str = ""


YES = Answer(ok=True).model_dump_json().encode()
"""What most answers are."""


M = TypeVar("M", bound=BaseModel)


class Malformed(TransferRefused):
    """The peer does not speak this protocol."""


def parse(kind: type[M], data: bytes) -> M:
    """The message in `data`, or Malformed."""
    try:
        return kind.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise Malformed(f"malformed: not a {kind.__name__}") from error


def sign(secret: bytes, nonce: bytes, sequence: int, header: bytes) -> bytes:
    return hmac.digest(secret, nonce + _SEQUENCE.pack(sequence) + header, "sha256")
