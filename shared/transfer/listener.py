"""The receiving half that backends share: accept, greet, and let transfers in one after the other.

Each connection has a thread of its own and ends with it. A peer that breaks the protocol loses its connection; a
transfer that is refused does not cost it the connection. Either way it is counted at the door.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from shared.runtime.errors import Corrupt, GeometryMismatch, PeerLost, TransferError, TransferRefused
from shared.state.layout import PoolLayout
from shared.state.remap import Fit, fit_between
from shared.transfer.backend import Digests, Timing
from shared.transfer.connection import Connection
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.wire import MAC_BYTES, NONCE_BYTES, YES, Answer, Greeting, Header, Hello, Malformed, parse

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 256
_JOIN_S = 5.0


class Mover(Protocol):
    """How a backend lands the bytes of one peer's transfers. fit: where these go, if the peer cuts its state otherwise
    than we do; None if it does not."""

    @property
    def fit(self) -> Fit | None: ...

    def check(self, header: Header) -> None:
        """Raises Refused if the sender's side of the header makes no sense. Before anything is written."""

    def stop(self) -> None:
        """From another thread: makes `land` end soon. The grant is marked as stopped already."""

    def land(self, grant: Grant) -> Digests:
        """Writes the units of the grant and returns the digests of what was written. Gives up once it is stopped.
        Raises Corrupt where what came is damaged but the connection can go on."""


class Listener:
    """Owns a listening socket and the threads of its connections."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        boot_id: str,
        door: Door,
        greet: Callable[[Connection], Mover],
        timing: Timing,
    ) -> None:
        self._sock, self._name, self._boot_id, self._door = sock, name, boot_id, door
        self._greet, self._timing = greet, timing
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends every connection and returns when nothing is written through this listener any more."""
        self._closing.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("listener %s was not listening", self._name)
        self._thread.join(_JOIN_S)
        self._sock.close()
        with self._lock:
            serving = dict(self._connections)
        for thread, connection in serving.items():
            connection.abort()
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                # Out of descriptors, or a peer that left before it was accepted: the listener must survive both.
                if not self._closing.wait(0.05):
                    _log.warning("%s: accept failed: %s", self._name, error)
                continue
            try:
                self._welcome(sock)
            except Exception:
                # No further thread, no memory: this peer is turned away, and the next may fare better.
                sock.close()
                self._door.count("accept_errors")
                _log.exception("%s: a peer could not be let in", self._name)
                self._closing.wait(0.05)

    def _welcome(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= _MAX_CONNECTIONS:
                self._door.count("refused_too_many_connections")
                sock.close()
                return
            connection = Connection(sock, self._timing.stall_s)
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-receive", daemon=True)
            thread.start()  # it waits for the lock before it forgets itself
            self._connections[thread] = connection

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except PeerLost:
            self._door.count("connections_ended")
        except TransferRefused as error:
            reason = error.reason if isinstance(error, Refused) else error.message.split(":")[0]
            self._door.count(f"refused_{reason}")
            _tell(connection, Answer(ok=False, reason=reason, message=error.message))
        except TransferError as error:
            self._door.count(f"failed_{error.code}")
        except Exception:
            self._door.count("connection_errors")
            _log.exception("%s: a connection failed", self._name)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _serve(self, connection: Connection) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.send(Hello(boot_id=self._boot_id, layout=self._door.layout, nonce=nonce))
        mover = self._greet(connection)
        connection.send(Answer(ok=True))
        sequence, trusted = 0, False
        while True:
            frame = connection.receive_frame(may_wait=trusted)
            mac, raw = frame[:MAC_BYTES], frame[MAC_BYTES:]
            header = parse(Header, raw)
            if header.sequence != sequence:
                raise Malformed("malformed: the sequence is broken")
            sequence += 1
            try:
                mover.check(header)
                grant = self._door.admit(header, raw, mac, nonce, self._name, mover.stop, mover.fit)
            except Refused as error:
                self._door.count(f"refused_{error.reason}")
                connection.send(Answer(ok=False, reason=error.reason, message=str(error)))
                if header.num_bursts:
                    return  # permits may be under way, which are no headers
                continue
            trusted = True
            connection.send_frame(self._transfer(mover, grant))

    def _transfer(self, mover: Mover, grant: Grant) -> bytes:
        try:
            digests = mover.land(grant)
            done = self._door.landed(grant, digests)
        except Corrupt as error:
            self._door.count(f"failed_{error.code}")
            return Answer(ok=False, reason=error.code, message=error.message).model_dump_json().encode()
        finally:
            self._door.leave(grant)
        if not done:
            refused = Answer(ok=False, reason="fenced", message="the ticket was fenced meanwhile")
            return refused.model_dump_json().encode()
        return YES


def greeting(body: bytes, own: PoolLayout) -> tuple[Greeting, Fit | None]:
    """The peer's greeting, and where its state goes in ours; None where both are cut alike. Refused, naming the first
    difference, where it does not go."""
    theirs = parse(Greeting, body)
    try:
        return theirs, fit_between(theirs.layout, own)
    except GeometryMismatch as error:
        raise Refused("geometry", error.message) from error


def _tell(connection: Connection, answer: Answer) -> None:
    """A last word to a peer that is about to be cut off; it may be gone already."""
    try:
        connection.send(answer)
    except TransferError:
        return
