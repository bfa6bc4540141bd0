"""What two sidecars say to each other around the bytes: length-prefixed JSON frames on one connection.

    receiver  Hello      its boot id and a random nonce for this connection
    sender    Greeting   its layout (over shm the frame carries its pool's read-only descriptor)
    receiver  Answer
    then for each transfer
    sender    Header     HMAC-SHA256(secret, nonce || sequence || header) before the header
    receiver  Answer     over tcp: go ahead, or why not; then the bytes follow in the header's order
    receiver  Answer     everything landed, or why not

The order of bytes: piece after piece, layer after layer, logical unit after unit, only rows that carry state.
"""

import hmac
import socket
import struct
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.protocol.messages import Generation, Room, WireModel
from shared.protocol.packing import PackedBytes
from shared.runtime.errors import PeerLost, TransferRefused, TransferTimeout
from shared.state.layout import PoolLayout

MAX_FRAME_BYTES = 1024 * 1024
MAC_BYTES = 32
NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")
_TIMEVAL = struct.Struct("ll")
_IOVECS = 1000


class Hello(WireModel):
    v: Literal[1] = 1
    boot_id: str
    nonce: PackedBytes


class Greeting(WireModel):
    v: Literal[1] = 1
    layout: PoolLayout


class WirePiece(BaseModel):
    """`units`: the sender's physical units, over shm and nixl only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    component: int
    num_layers: int
    first_unit: int
    num_units: int
    rows_in_last: int
    units: tuple[int, ...] = ()


class Header(WireModel):
    room: Room
    generation: Generation
    sequence: int
    pieces: tuple[WirePiece, ...]


class Answer(WireModel):
    ok: bool
    reason: str = ""
    message: str = ""


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


class Connection:
    """A connected blocking socket, used by one thread; `abort` may be called by any. Raises PeerLost when the peer is
    gone and TransferTimeout when nothing moved for `stall_s`."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        whole = int(stall_s)
        limit = _TIMEVAL.pack(whole, int((stall_s - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sock = sock

    def abort(self) -> None:
        """Ends whatever blocks on this connection; its thread then closes it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self.abort()
        self._sock.close()

    def is_idle(self) -> bool:
        """Whether the peer is there and has sent nothing: a connection kept for later may have died meanwhile."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, message: BaseModel, prefix: bytes = b"", fd: int | None = None) -> None:
        self.send_frame(prefix + message.model_dump_json().encode(), fd)

    def send_frame(self, body: bytes, fd: int | None = None) -> None:
        data = _LENGTH.pack(len(body)) + body
        if fd is not None:
            try:
                sent = socket.send_fds(self._sock, [data], [fd])
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            data = data[sent:]
        if data:
            self.send_all([memoryview(data)])

    def receive(self, kind: type[M]) -> M:
        return parse(kind, self.receive_frame())

    def receive_frame(self, *, may_wait: bool = False) -> bytes:
        """The next frame; with `may_wait` the time before its first byte does not count as a stall."""
        head = bytearray(_LENGTH.size)
        self.receive_all([memoryview(head)], may_wait=may_wait)
        return self._body(head)

    def receive_frame_and_fd(self) -> tuple[bytes, int | None]:
        """The next frame and the descriptor that came with it, which the caller owns."""
        try:
            head, fds, _, _ = socket.recv_fds(self._sock, _LENGTH.size, 1)
        except BlockingIOError as error:
            raise TransferTimeout("the peer is silent") from error
        except OSError as error:
            raise PeerLost(f"connection lost: {error}") from error
        fd = fds[0] if fds else None
        try:
            if len(head) < _LENGTH.size:
                raise PeerLost("connection closed")
            return self._body(head), fd
        except BaseException:
            if fd is not None:
                socket.close(fd)
            raise

    def _body(self, head: bytes | bytearray) -> bytes:
        (size,) = _LENGTH.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise Malformed(f"malformed: a frame of {size} bytes")
        body = bytearray(size)
        if size:
            self.receive_all([memoryview(body)])
        return bytes(body)

    def send_all(self, views: list[memoryview]) -> None:
        """Sends the views one after the other, straight from where they lie."""
        at = 0
        while at < len(views):
            try:
                moved = self._sock.sendmsg(views[at : at + _IOVECS])
            except BlockingIOError as error:
                raise TransferTimeout("the peer stopped reading") from error
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            at = _advance(views, at, moved)

    def receive_all(self, views: list[memoryview], *, may_wait: bool = False) -> None:
        """Fills the views one after the other, straight from the socket."""
        at = 0
        while at < len(views):
            try:
                batch = views[at : at + _IOVECS]
                moved = self._sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                if may_wait:
                    continue
                raise TransferTimeout("the peer stopped sending") from error
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            if moved == 0:
                raise PeerLost("connection closed")
            may_wait = False
            at = _advance(views, at, moved)


def _advance(views: list[memoryview], at: int, moved: int) -> int:
    """The first view that is not done after `moved` more bytes; a view that is partly done is cut."""
    while at < len(views) and moved >= len(views[at]):
        moved -= len(views[at])
        at += 1
    if moved:
        views[at] = views[at][moved:]
    return at
