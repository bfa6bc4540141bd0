"""Same host: the receiver's sidecar maps the sender's pool read-only and copies out of it.

The descriptor the sender gives away is opened read-only, so the receiver cannot write it; the sender never has the
receiver's pool at all. Only the header and the answer travel over the unix socket.
"""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import PeerLost, TransferError, TransferRefused
from shared.state.layout import PoolLayout
from shared.state.remap import Fit
from shared.transfer.backend import Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.connection import Connection
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.ledger import bytes_of
from shared.transfer.link import Piece
from shared.transfer.listener import Listener, Mover, greeting
from shared.transfer.permits import PERMIT, Permits
from shared.transfer.pool import BURST_BYTES, Pool, Run, room_for_digests
from shared.transfer.regroup import GatheringMover, RegroupingMover, source_of
from shared.transfer.sending import expect_ok, header_frame, introduce, runs_of, travelling, wait_for, wire_pieces
from shared.transfer.wire import Header

_BACKLOG = 64
_AT_ONCE_BYTES, _FEW = 2 << 20, 256
"""What a turn of the loop copes with; of units without a kernel so many."""
_PART_BURSTS = 8
"""So many bursts are let through at once: the peer copies fast, and asking costs what copying a tenth of one does."""


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
        self._lock = threading.Lock()
        self._sources: WeakValueDictionary[tuple[int, int, PoolLayout], Pool] = WeakValueDictionary()
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
        nonce, fit = introduce(connection, peer.boot_id, self._pool.layout, self._readable)
        return _ShmChannel(connection, nonce, self._pool, fit, self._faults)

    def close(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._listener.close()
        os.close(self._readable)
        os.close(self._directory)

    def _path(self, socket_name: str) -> str:
        return f"/proc/self/fd/{self._directory}/{Path(socket_name).name}"

    def _greet(self, connection: Connection) -> Mover:
        body, fd = connection.receive_frame_and_fd()
        if fd is None:
            raise Refused("no_pool", "the greeting carried no descriptor")
        try:
            theirs, fit = greeting(body, self._pool.layout)
            source = self._mapped(fd, theirs.layout)
        finally:
            os.close(fd)
        mover = _ShmMover(connection, self._pool, source, self._timing, self._faults)
        if fit is None:
            return mover
        if fit.cuts_heads:
            return GatheringMover(fit, self._pool, mover, source, self._faults)
        return RegroupingMover(fit, self._pool, mover)

    def _mapped(self, fd: int, layout: PoolLayout) -> Pool:
        """The same mapping for all connections of a peer: what one has touched costs the others nothing."""
        file = os.fstat(fd)
        key = file.st_dev, file.st_ino, layout
        with self._lock:
            source = self._sources.get(key)
            if source is None:
                source = self._sources[key] = Pool.map(fd, layout, writable=False)
            return source


class _ShmMover:
    """Copies from one peer's mapped pool."""

    fit = None

    def __init__(self, connection: Connection, pool: Pool, source: Pool, timing: Timing, faults: Faults) -> None:
        self._connection, self._pool, self._source = connection, pool, source
        self._timing, self._faults = timing, faults
        self._bursts = (0, 0)
        self._theirs: list[Run] = []

    def check(self, header: Header) -> None:
        self._bursts = header.burst_bytes, header.num_bursts
        self._theirs = [Run(one.component, one.units, one.rows_in_last, one.layers) for one in header.pieces]
        for piece, run in zip(header.pieces, self._theirs, strict=True):
            if len(piece.units) != piece.num_units or not self._source.holds(run):
                raise Refused("bad_source", "the sender's pool has no such units")

    def stop(self) -> None:
        """The copy looks at `stopped` before each burst, and while it waits for one."""

    def land(self, grant: Grant) -> Digests:
        return self.land_in(self._pool, grant)

    def land_in(self, pool: Pool, grant: Grant) -> Digests:
        permits = Permits(self._connection, *self._bursts, self._timing.stall_s)
        burst_bytes = min(BURST_BYTES, self._bursts[0] or BURST_BYTES)
        digests: Digests = []
        for piece, theirs, run in zip(grant.pieces, self._theirs, grant.runs, strict=True):
            found = room_for_digests(run, piece.layers)
            for layers in self._parts(piece.layers):
                if self._faults.delay_s:
                    grant.stopped.wait(self._faults.delay_s)
                first = layers.start - piece.first_layer
                into = None if self._faults.undigested else found[first : first + len(layers)]
                steps = pool.copying(self._source, theirs, run, layers, into, burst_bytes)
                while (going := permits.wait(grant)) and (moved := next(steps, None)) is not None:
                    permits.spend(moved)
                if not going:
                    return digests
                if self._faults.corrupt and layers.start == 0:
                    pool.flip_byte(run, 0)
                    found[0] = pool.digests(run, 0)
            digests.append(list(found))
        permits.settle(grant)
        return digests

    def _parts(self, layers: range) -> list[range]:
        """All layers in one go, unless there is a pause between them."""
        if self._faults.delay_s:
            return [range(layer, layer + 1) for layer in layers]
        return [layers]


class _ShmChannel:
    def __init__(self, connection: Connection, nonce: bytes, pool: Pool, fit: Fit | None, faults: Faults) -> None:
        self.fit = fit
        self._connection, self._nonce, self._pool, self._faults = connection, nonce, pool, faults
        self._sequence = 0
        self._aborted = False

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        pieces, turn = travelling(self.fit, manifest.pieces), manifest.turn
        runs_of(self._pool, pieces)
        wait_for(event, lambda: self._aborted)
        left, limit = self._num_bytes(pieces), _PART_BURSTS * turn.burst_bytes
        if left <= limit:
            turn.wait(max(1, left))
            return self._begin(manifest, pieces).finish()
        num_bursts = -(-left // limit)
        gathered = self.fit is not None and self.fit.cuts_heads  # by the peer, all of it before the first is copied
        begun = None if gathered else self._begin(manifest, pieces, (limit, num_bursts))
        for _ in range(num_bursts):
            turn.wait(min(left, limit))
            if begun is not None:
                if not self._may_go_on():
                    return begun.refused()
                begun.digest(limit)
            left -= limit
        return (begun or self._begin(manifest, pieces)).finish()

    def _may_go_on(self) -> bool:
        """Lets the peer go on; False where it has answered already."""
        try:
            idle = self._connection.is_idle()
            if idle:
                self._connection.send_bytes(PERMIT)
            return idle
        except PeerLost:
            return False

    def begin(self, manifest: Manifest) -> "_Begun | None":
        pieces, components = manifest.pieces, self._pool.layout.components
        if self.fit is not None or not all(0 <= piece.component < len(components) for piece in pieces):
            return None
        num_bytes = self._num_bytes(pieces)
        if num_bytes > min(_AT_ONCE_BYTES, _PART_BURSTS * manifest.turn.burst_bytes):
            return None
        if self._num_plain(pieces) > _FEW or not manifest.turn.at_once(max(1, num_bytes)):
            return None
        return self._begin(manifest, pieces)

    def _begin(self, manifest: Manifest, pieces: tuple[Piece, ...], bursts: tuple[int, int] = (0, 0)) -> "_Begun":
        wire = wire_pieces(self._pool, pieces, with_units=True)
        frame = header_frame(manifest, wire, self._nonce, self._sequence, bursts=bursts)
        self._sequence += 1
        self._connection.send_frame(frame)
        runs = runs_of(self._pool, pieces)  # the peer, which is at work already, checks it too
        pool, read = source_of(self.fit, self._pool, runs, wire, lambda: self._aborted)
        found = [room_for_digests(run, run.layers) for run in read]
        burst_bytes = min(BURST_BYTES, bursts[0] or BURST_BYTES)
        return _Begun(self._connection, found, self._digesting(pool, read, found, burst_bytes))

    def _digesting(self, pool: Pool, runs: Sequence[Run], found: list[np.ndarray], burst_bytes: int) -> Iterator[int]:
        for run, into in zip(runs, found, strict=True):
            for done in () if self._faults.undigested else pool.digesting(run, run.layers, into, burst_bytes):
                if self._aborted:
                    raise TransferError("aborted")
                yield done

    def _num_plain(self, pieces: tuple[Piece, ...]) -> int:
        """Units and layers that no kernel digests: each takes a turn of Python."""
        planes = [(self._pool.plane(piece.component), piece) for piece in pieces]
        kernels = self._pool.kernels
        plain = [(plane, piece) for plane, piece in planes if not kernels or not kernels.can_digest(plane.unit_bytes)]
        return sum(len(piece.units) * len(piece.layers(plane.num_layers)) for plane, piece in plain)

    def _num_bytes(self, pieces: tuple[Piece, ...]) -> int:
        components = self._pool.layout.components if self.fit is None else self.fit.components
        return sum(bytes_of(piece, components[piece.component]) for piece in pieces)

    def abort(self) -> None:
        self._aborted = True
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()


class _Begun:
    """The peer copies; meanwhile the source is digested here, as far as `work` is asked to go on."""

    def __init__(self, connection: Connection, found: list[np.ndarray], work: Iterator[int]) -> None:
        self._connection, self._found, self._work = connection, found, work

    def digest(self, num_bytes: int | None = None) -> None:
        """About so much more; None: all that is left."""
        left = num_bytes
        for done in self._work:
            if left is not None and (left := left - done) <= 0:
                return

    def poll(self, wait_s: float) -> Digests | None:
        self.digest()
        return self.finish() if self._connection.wait_awake(wait_s) else None

    def refused(self) -> Digests:
        """The peer has answered before all could be there: raises why."""
        expect_ok(self._connection)
        raise TransferRefused("malformed: the peer has all of it, and was not let go on")

    def finish(self) -> Digests:
        self.digest()
        expect_ok(self._connection)
        return [list(layers) for layers in self._found]
