"""One connection between two sidecars: frames behind their lengths, descriptors, and bytes straight out of memory."""

import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from shared.runtime.errors import PeerLost, TransferRefused, TransferTimeout
from shared.transfer.wire import MAX_FRAME_BYTES, Malformed, parse

_LENGTH = struct.Struct("!I")
_TIMEVAL = struct.Struct("ll")
_COUNT = struct.Struct("i")
_IOVECS = 1000
_DRAIN_POLL_S = 0.0002
M = TypeVar("M", bound=BaseModel)


class Connection:
    """A connected blocking socket, used by one thread; `abort` may be called by any. Raises PeerLost when the peer is
    gone and TransferTimeout when nothing moved for `stall_s`."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._stall_s = stall_s
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

    def fileno(self) -> int:
        return self._sock.fileno()

    def is_idle(self) -> bool:
        """Whether the peer is there and has sent nothing: a connection kept for later may have died meanwhile."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def wait_awake(self, wait_s: float) -> bool:
        """Whether a whole frame is there, or the peer is gone, within `wait_s`: for what comes sooner than a thread
        wakes. Then `receive_frame` does not block."""
        deadline = time.perf_counter() + wait_s
        while not self._has_frame():
            if time.perf_counter() > deadline:
                return False
            os.sched_yield()
        return True

    def _has_frame(self) -> bool:
        try:
            head = self._sock.recv(_LENGTH.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if 0 < len(head) < _LENGTH.size:
            return False
        size = _LENGTH.unpack(head)[0] if head else 0
        return not head or size > MAX_FRAME_BYTES or _queued(self._sock) >= len(head) + size

    def send(self, message: BaseModel, prefix: bytes = b"", fd: int | None = None) -> None:
        self.send_frame(prefix + message.model_dump_json().encode(), fd)

    def send_frame(self, body: bytes, fd: int | None = None) -> None:
        """Raises TransferRefused, and sends nothing, where it is longer than any peer reads."""
        if len(body) > MAX_FRAME_BYTES:
            raise TransferRefused(f"too_long: a message of {len(body)} bytes: so many pieces cannot go at once")
        data = _LENGTH.pack(len(body)) + body
        if fd is not None:
            try:
                sent = socket.send_fds(self._sock, [data], [fd])
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            data = data[sent:]
        if data:
            self.send_bytes(data)

    def send_bytes(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError as error:
            raise TransferTimeout("the peer stopped reading") from error
        except OSError as error:
            raise PeerLost(f"connection lost: {error}") from error
        if sent < len(data):
            self.send_all([memoryview(data)[sent:]])

    def receive(self, kind: type[M]) -> M:
        return parse(kind, self.receive_frame())

    def receive_within(self, limit: int, wait_s: float) -> bytes:
        """Of what comes within `wait_s` the first bytes, nothing where nothing comes."""
        try:
            data = self._sock.recv(limit, socket.MSG_DONTWAIT)
        except BlockingIOError:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll(1000 * wait_s)
            return b"" if self.is_idle() else self.receive_within(limit, 0)
        except OSError as error:
            raise PeerLost(f"connection lost: {error}") from error
        if not data:
            raise PeerLost("connection closed")
        return data

    def receive_frame(self, *, may_wait: bool = False) -> bytes:
        """The next frame; with `may_wait` the time before its first byte does not count as a stall."""
        return self._body(self._exactly(_LENGTH.size, may_wait=may_wait))

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

    def _body(self, head: bytes) -> bytes:
        (size,) = _LENGTH.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise Malformed(f"malformed: a frame of {size} bytes")
        return self._exactly(size) if size else b""

    def _exactly(self, size: int, *, may_wait: bool = False) -> bytes:
        found = self._some(size, may_wait=may_wait)
        while len(found) < size:
            found += self._some(size - len(found))
        return found

    def _some(self, limit: int, *, may_wait: bool = False) -> bytes:
        while True:
            try:
                data = self._sock.recv(limit, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if may_wait:
                    continue
                raise TransferTimeout("the peer stopped sending") from error
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            if not data:
                raise PeerLost("connection closed")
            return data

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

    def drain(self, window_bytes: int, is_aborted: Callable[[], bool]) -> None:
        """Returns when no more than `window_bytes` (0: any) of what was sent has not arrived at the other end yet."""
        deadline = time.monotonic() + self._stall_s
        while window_bytes and _unarrived(self._sock) > window_bytes:
            if is_aborted():
                raise PeerLost("aborted")
            if time.monotonic() > deadline:
                raise TransferTimeout("the peer stopped reading")
            time.sleep(_DRAIN_POLL_S)

    def receive_all(self, views: list[memoryview]) -> None:
        """Fills the views one after the other, straight from the socket."""
        at = 0
        while at < len(views):
            try:
                batch = views[at : at + _IOVECS]
                moved = self._sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise TransferTimeout("the peer stopped sending") from error
            except OSError as error:
                raise PeerLost(f"connection lost: {error}") from error
            if moved == 0:
                raise PeerLost("connection closed")
            at = _advance(views, at, moved)


def _queued(sock: socket.socket) -> int:
    """Bytes that have arrived and are not read yet."""
    (num_bytes,) = _COUNT.unpack(fcntl.ioctl(sock, termios.FIONREAD, _COUNT.pack(0)))
    return int(num_bytes)


def _unarrived(sock: socket.socket) -> int:
    """Bytes in a TCP socket's send queue, which holds them until the other end has acknowledged them."""
    (num_bytes,) = _COUNT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, _COUNT.pack(0)))
    return int(num_bytes)


def _advance(views: list[memoryview], at: int, moved: int) -> int:
    """The first view that is not done after `moved` more bytes; a view that is partly done is cut."""
    while at < len(views) and moved >= len(views[at]):
        moved -= len(views[at])
        at += 1
    if moved:
        views[at] = views[at][moved:]
    return at
