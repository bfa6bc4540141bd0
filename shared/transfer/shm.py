"""Same host: the receiver's sidecar maps the sender's pool read-only and copies out of it.

The descriptor the sender gives away is opened read-only, so the receiver cannot write it; the sender never has the
receiver's pool at all. Only the header and the answer travel over the unix socket.
"""

import os
import socket
from pathlib import Path

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import PeerLost
from shared.transfer.backend import Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.bursts import in_parts
from shared.transfer.door import Door, Grant, Refused
from shared.transfer.listener import Listener, greeting
from shared.transfer.pool import Pool, Run
from shared.transfer.sending import expect_ok, header_frame, introduce, runs_of, wait_for
from shared.transfer.wire import Connection, Header

_BACKLOG = 64
_PART_BURSTS = 8
"""So many bursts are asked of the peer at once: copying is fast, and asking costs what copying a tenth of it does."""


class ShmBackend:
    """Serves on `directory`/`socket_name`. `pool_fd` stays the caller's."""

    name = "shm"

    def __init__(
        self,
        pool: Pool,
        pool_fd: int,
        door: Door,
        boot_id: str,
        directory: Path,
        socket_name: str,
        timing: Timing,
        faults: Faults,
    ) -> None:
        self._pool, self._timing, self._faults = pool, timing, faults
        self._readable = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
        # Through the directory's descriptor, because the address of a unix socket holds 108 bytes at most.
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = directory / socket_name
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self._path(socket_name))
        sock.listen(_BACKLOG)
        self._listener = Listener(sock, self.name, boot_id, door, self._greet, timing)

    def reaches(self, peer: LinkAddress) -> bool:
        return bool(peer.socket) and self.name in peer.backends and os.path.exists(self._path(peer.socket))

    def connect(self, peer: LinkAddress) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._timing.connect_s)
        try:
            sock.connect(self._path(peer.socket))
        except OSError as error:
            sock.close()
            raise PeerLost(f"no sidecar answers at {peer.socket}: {error}") from error
        connection = Connection(sock, self._timing.stall_s)
        nonce = introduce(connection, peer.boot_id, self._pool.layout, self._readable)
        return _ShmChannel(connection, nonce, self._pool)

    def close(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._listener.close()
        os.close(self._readable)
        os.close(self._directory)

    def _path(self, socket_name: str) -> str:
        return f"/proc/self/fd/{self._directory}/{Path(socket_name).name}"

    def _greet(self, connection: Connection) -> "_ShmMover":
        body, fd = connection.receive_frame_and_fd()
        if fd is None:
            raise Refused("no_pool", "the greeting carried no descriptor")
        try:
            layout = greeting(body, self._pool.layout.components).layout
            source = Pool.map(fd, layout, writable=False)
        finally:
            os.close(fd)
        return _ShmMover(self._pool, source, self._faults)


class _ShmMover:
    """Copies from one peer's mapped pool."""

    def __init__(self, pool: Pool, source: Pool, faults: Faults) -> None:
        self._pool, self._source, self._faults = pool, source, faults

    def check(self, header: Header) -> None:
        for piece in header.pieces:
            run = Run(piece.component, piece.units, piece.rows_in_last)
            if len(piece.units) != piece.num_units or not self._source.holds(run):
                raise Refused("bad_source", "the sender's pool has no such units")

    def stop(self) -> None:
        """The copy looks at `stopped` before each layer, and a copy never blocks."""

    def land(self, grant: Grant) -> Digests:
        digests: Digests = []
        for piece, run in zip(grant.pieces, grant.runs, strict=True):
            theirs = Run(piece.component, piece.units, piece.rows_in_last)
            layers = []
            for layer in range(piece.num_layers):
                if grant.stopped.wait(self._faults.delay_s) if self._faults.delay_s else grant.stopped.is_set():
                    return digests
                found = self._pool.copy_from(self._source, theirs, run, layer)
                if self._faults.corrupt and layer == 0:
                    self._pool.flip_byte(run, layer)
                    found = self._pool.digests(run, layer)
                layers.append(found)
            digests.append(layers)
        return digests


class _ShmChannel:
    def __init__(self, connection: Connection, nonce: bytes, pool: Pool) -> None:
        self._connection, self._nonce, self._pool = connection, nonce, pool
        self._sequence = 0
        self._aborted = False

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        runs_of(self._pool, manifest)
        wait_for(event, lambda: self._aborted)
        return in_parts(manifest, self._pool.layout.components, _PART_BURSTS * manifest.turn.burst_bytes, self._move)

    def _move(self, manifest: Manifest) -> Digests:
        runs = runs_of(self._pool, manifest)
        frame = header_frame(manifest, self._pool, self._nonce, self._sequence, with_units=True)
        self._sequence += 1
        self._connection.send_frame(frame)
        # While the peer copies.
        digests = [
            [self._pool.digests(run, layer) for layer in range(self._pool.num_layers(run.component))] for run in runs
        ]
        expect_ok(self._connection)
        return digests

    def abort(self) -> None:
        self._aborted = True
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()
