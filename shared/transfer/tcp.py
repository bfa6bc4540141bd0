"""Any two hosts: raw bytes over TCP, gathered from the sender's pages and scattered into the receiver's without a copy
in between."""

import socket
import threading

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import PeerLost
from shared.transfer.backend import Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.bursts import cut
from shared.transfer.door import Door, Grant
from shared.transfer.listener import Listener, greeting
from shared.transfer.pool import Pool
from shared.transfer.sending import expect_ok, header_frame, introduce, runs_of, wait_for
from shared.transfer.wire import Answer, Connection, Header

_BACKLOG = 64


class TcpBackend:
    """Listens on `host`; port 0 takes a free one."""

    name = "tcp"

    def __init__(
        self, pool: Pool, door: Door, boot_id: str, host: str, port: int, timing: Timing, faults: Faults
    ) -> None:
        self._pool, self._timing, self._faults = pool, timing, faults
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self.name, boot_id, door, self._greet, timing)

    def reaches(self, peer: LinkAddress) -> bool:
        return self.name in peer.backends and peer.port > 0

    def connect(self, peer: LinkAddress) -> Channel:
        try:
            sock = socket.create_connection((peer.host, peer.port), self._timing.connect_s)
        except OSError as error:
            raise PeerLost(f"no sidecar answers at {peer.host}:{peer.port}: {error}") from error
        connection = Connection(sock, self._timing.stall_s)
        nonce = introduce(connection, peer.boot_id, self._pool.layout)
        return _TcpChannel(connection, nonce, self._pool, self._faults)

    def close(self) -> None:
        self._listener.close()

    def _greet(self, connection: Connection) -> "_TcpMover":
        greeting(connection.receive_frame(), self._pool.layout.components)
        return _TcpMover(connection, self._pool, self._faults)


class _TcpMover:
    """Receives straight into the pages of the grant."""

    def __init__(self, connection: Connection, pool: Pool, faults: Faults) -> None:
        self._connection, self._pool, self._faults = connection, pool, faults

    def check(self, header: Header) -> None:
        """The header names nothing of the sender's."""

    def stop(self) -> None:
        """A frozen sender would hold the ticket for ever: without its connection it can write nothing."""
        self._connection.abort()

    def land(self, grant: Grant) -> Digests:
        self._connection.send(Answer(ok=True))
        digests: Digests = []
        for piece, run in zip(grant.pieces, grant.runs, strict=True):
            layers = []
            for layer in range(piece.num_layers):
                if grant.stopped.is_set():
                    raise PeerLost("the ticket was fenced meanwhile")
                self._connection.receive_all(self._pool.views(run, layer))
                if self._faults.corrupt and layer == 0:
                    self._pool.flip_byte(run, layer)
                layers.append(self._pool.digests(run, layer))
            digests.append(layers)
        return digests


class _TcpChannel:
    def __init__(self, connection: Connection, nonce: bytes, pool: Pool, faults: Faults) -> None:
        self._connection, self._nonce, self._pool, self._faults = connection, nonce, pool, faults
        self._sequence = 0
        self._aborted = threading.Event()

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        runs = runs_of(self._pool, manifest)
        wait_for(event, self._aborted.is_set)
        frame = header_frame(manifest, self._pool, self._nonce, self._sequence, with_units=False)
        self._sequence += 1
        self._connection.send_frame(frame)
        expect_ok(self._connection)
        digests: Digests = []
        for run in runs:
            layers = []
            for layer in range(self._pool.num_layers(run.component)):
                if self._faults.delay_s and self._aborted.wait(self._faults.delay_s):
                    raise PeerLost("aborted")
                layers.append(self._pool.digests(run, layer))
                for burst, num_bytes in cut(self._pool.views(run, layer), manifest.turn.burst_bytes):
                    self._connection.drain(manifest.turn.window_bytes, self._aborted.is_set)
                    manifest.turn.wait(num_bytes)
                    self._connection.send_all(burst)
            digests.append(layers)
        expect_ok(self._connection)
        return digests

    def abort(self) -> None:
        self._aborted.set()
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()
