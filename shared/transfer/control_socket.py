"""One end of the socket between a worker and its sidecar: frames in on the event loop, frames out at once from any
thread. A stream of asyncio's would cost a small hand-off more than its bytes do."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from shared.transfer.control import ControlError, FrameBuffer

_READ_BYTES = 256 * 1024
_MOST_UNSENT_BYTES = 64 * 1024 * 1024
"""An other side that reads nothing any more is as good as gone."""


class ControlSocket:
    """Made on the loop; owns the socket. on_frame(body) and on_end(error) are called there, the second once and last:
    with None if the other side closed or we did, else with what went wrong."""

    def __init__(
        self, sock: socket.socket, on_frame: Callable[[bytes], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        self._sock, self._on_frame, self._on_end = sock, on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._frames, self._buffer = FrameBuffer(), memoryview(bytearray(_READ_BYTES))
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._ended = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, frame: bytes) -> None:
        """In the order of the calls. What the other side does not take at once follows; after the end nothing does."""
        with self._lock:
            if self._ended:
                return
            waiting = bool(self._unsent)
            sent = 0 if waiting else self._send(frame)
            if sent == len(frame):
                return
            self._unsent += frame[sent:]
            full = len(self._unsent) > _MOST_UNSENT_BYTES
        if full:
            self._soon(lambda: self._end(ControlError("the other side reads nothing")))
        elif not waiting:
            self._soon(self._start_writing)

    def close(self) -> None:
        """On the loop. Idempotent."""
        self._end(None)

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is gone, which the reader notices

    def _start_writing(self) -> None:
        if not self._ended:
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        with self._lock:
            del self._unsent[: self._send(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            num_bytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            return self._end(None)
        try:
            for body in self._frames.feed(self._buffer[:num_bytes]):
                self._on_frame(body)
                if self._ended:
                    return None
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        self._on_end(error)

    def _soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that has ended sends nothing
            self._loop.call_soon_threadsafe(call)
