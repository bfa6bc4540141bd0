"""The wire between two sidecars, in user space, so that it can be broken everywhere: a TCP proxy whose fault is chosen
while bytes pass."""

import contextlib
import select
import socket
import struct
import threading
import time
from enum import Enum
from types import TracebackType
from typing import Self

_CHUNK, _SLOW_CHUNK, _SLOW_PAUSE_S = 1 << 16, 512, 0.01
_POLL_S = 0.02
_RESET = struct.pack("ii", 1, 0)


class Break(Enum):
    """HOLE: nothing passes any more, and nobody is told. HALF: what is answered is lost. RESET and END: both sides hear
    of it, by RST or FIN. SLOW: everything passes, slowly."""

    HOLE = "hole"
    HALF = "half"
    RESET = "reset"
    END = "end"
    SLOW = "slow"


class Wire:
    """Listens on `address` and forwards to `target`, read anew for each connection. passed: bytes that went
    towards the target, of all connections."""

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self._listener = socket.create_server(listen)
        self._listener.settimeout(_POLL_S)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.passed = self.connections = 0
        self._fault: Break | None = None
        self._after = self._era = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(5.0)
        self._listener.close()

    def break_after(self, fault: Break, num_bytes: int = 0) -> None:
        """Once so many more bytes went towards the target, `fault` holds for all connections, also new ones."""
        with self._lock:
            self._fault, self._after = fault, self.passed + num_bytes

    def heal(self) -> None:
        """New connections are served again; the old ones have ended: what they lost does not come back."""
        with self._lock:
            self._fault = None
            self._era += 1
        for thread in self._threads[1:]:
            thread.join(10.0)
        del self._threads[1:]

    @property
    def is_broken(self) -> bool:
        return self._fault is not None and self._fault is not Break.SLOW and self.passed >= self._after

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(near, self._era), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket, era: int) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self.target, 5.0) as far:
            near.settimeout(5.0)
            while not self._closing.is_set() and era == self._era:
                if self.is_broken and self._fault in (Break.RESET, Break.END):
                    if self._fault is Break.RESET:
                        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return
                if not self._turn(near, far):
                    return

    def _turn(self, near: socket.socket, far: socket.socket) -> bool:
        """Passes on what is there, at most up to the moment when the wire breaks; False at the end of either side."""
        if self.is_broken and self._fault is Break.HOLE:
            time.sleep(_POLL_S)
            return True
        before = (self._era, self.is_broken)
        ready, _, _ = select.select([near] if self.is_broken else [near, far], [], [], _POLL_S)
        if (self._era, self.is_broken) != before:
            return True
        for source in ready:
            data = source.recv(self._most(source is near))
            if not data:
                return False
            (far if source is near else near).sendall(data)
            if source is near:
                with self._lock:
                    self.passed += len(data)
                if self.is_broken:
                    break
        return True

    def _most(self, onward: bool) -> int:
        fault = self._fault
        if fault is Break.SLOW:
            time.sleep(_SLOW_PAUSE_S)
            return _SLOW_CHUNK
        return min(_CHUNK, self._after - self.passed) if onward and fault is not None and not self.is_broken else _CHUNK
