"""Connections to Redis: lent to one call each, ended with it where it must end, and opened anew after a loss."""

import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.redis_options import RedisOptions
from shared.store.resp import RespConnection

_FIRST_WAIT_S, _MOST_WAIT_S = 0.05, 2.0
T = TypeVar("T")


class Call:
    """What ends a call's connection while it is the call's, and not a moment longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: RespConnection | None = None
        self._aborted = False

    def hold(self, connection: RespConnection) -> None:
        with self._lock:
            self._connection = connection
            if self._aborted:
                connection.abort()

    def let_go(self) -> None:
        with self._lock:
            self._connection = None

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._connection is not None:
                self._connection.abort()


class Connections:
    """Those that are open, lent to one call each. While the server cannot be reached, calls fail at once, and it is
    tried again after a time that doubles up to a limit."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._tls: ssl.SSLContext | None = options.tls_context()
        self._idle: list[RespConnection] = []
        self._lent: set[Call] = set()
        self._wait_s, self._again_at = _FIRST_WAIT_S, 0.0
        self._why = ""
        self._closed = False

    def lend(self, call: Call, work: Callable[[RespConnection], T]) -> T:
        connection = self._kept() or self._new()
        self._lent.add(call)
        keep = False
        try:
            call.hold(connection)
            if self._closed:
                raise StoreUnavailable("the driver is closed")
            try:
                result = work(connection)
            except StoreFull:
                keep = True
                raise
            keep = True
            return result
        finally:
            call.let_go()
            self._lent.discard(call)
            if keep and connection.in_step and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Whatever is under way fails. Idempotent."""
        self._closed = True
        for call in list(self._lent):
            call.abort()
        while (connection := self._popped()) is not None:
            connection.close()

    def _kept(self) -> RespConnection | None:
        while (connection := self._popped()) is not None:
            if connection.is_idle():
                return connection
            connection.close()
        return None

    def _popped(self) -> RespConnection | None:
        try:
            return self._idle.pop()
        except IndexError:  # asking first would not do: several threads take
            return None

    def _new(self) -> RespConnection:
        if (left_s := self._again_at - time.monotonic()) > 0:
            raise StoreUnavailable(f"{self._why} (tried again in {left_s:.1f} s)")
        options = self._options
        try:
            connection = RespConnection.connect(options.address, options.connect_s, self._tls)
        except StoreUnavailable as error:
            self._why = error.message
            self._again_at = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)
            raise
        self._wait_s = _FIRST_WAIT_S
        return connection
