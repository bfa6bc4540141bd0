"""Any two hosts, over TCP. Raw rows are gathered from the sender's pages and scattered into the receiver's without a
copy in between; coded rows pass through the format that the header names."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import Corrupt, PeerLost
from shared.state.remap import Fit
from shared.transfer.backend import Begun, Channel, Digests, Event, Faults, Manifest, Timing, Turn
from shared.transfer.coded_rows import CodedRows, WireCost
from shared.transfer.connection import Connection
from shared.transfer.door import Door
from shared.transfer.formats.catalog import EXACT, available, travels_as
from shared.transfer.grant import Grant, Refused
from shared.transfer.listener import Listener, Mover, greeting
from shared.transfer.pool import Pool, Run
from shared.transfer.raw_rows import STEP_BYTES, RawRows
from shared.transfer.regroup import RegroupingMover, source_of
from shared.transfer.row_spans import Step
from shared.transfer.sending import expect_ok, header_frame, introduce, runs_of, travelling, wait_for, wire_pieces
from shared.transfer.streams import Streams
from shared.transfer.wire import Answer, Header

_BACKLOG = 64
_LEAST_MEASURED_BYTES = 256 << 10
"""Of less than this the time is mostly a round trip's."""


class TcpBackend:
    """Listens on `host`; port 0 takes a free one. formats: what it reads. streams: connections that a large transfer
    may take side by side."""

    name = "tcp"

    def __init__(
        self,
        pool: Pool,
        door: Door,
        boot_id: str,
        host: str,
        port: int,
        timing: Timing,
        faults: Faults,
        formats: tuple[str, ...] | None = None,
        streams: int = 1,
    ) -> None:
        self._streams = streams
        self._pool, self._timing, self._faults = pool, timing, faults
        self._formats = available() if formats is None else formats
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self.name, boot_id, door, self._greet, timing)

    def reaches(self, peer: LinkAddress) -> bool:
        return self.name in peer.backends and peer.port > 0

    def connect(self, peer: LinkAddress) -> Channel:
        first = self._connect(peer)
        if self._streams == 1:
            return first
        return Streams(first, partial(self._connect, peer), self._streams, self._pool.layout.components)

    def _connect(self, peer: LinkAddress, on_open: Callable[[Connection], None] = lambda connection: None) -> Channel:
        try:
            sock = socket.create_connection((peer.host, peer.port), self._timing.connect_s)
        except OSError as error:
            raise PeerLost(f"no sidecar answers at {peer.host}:{peer.port}: {error}") from error
        connection = Connection(sock, self._timing.stall_s)
        on_open(connection)
        nonce, fit = introduce(connection, peer.boot_id, self._pool.layout)
        return _TcpChannel(connection, nonce, self._pool, fit, self._faults)

    def close(self) -> None:
        self._listener.close()

    def _greet(self, connection: Connection) -> Mover:
        _, fit = greeting(connection.receive_frame(), self._pool.layout)
        mover = _TcpMover(connection, self._pool, self._faults, self._formats)
        return mover if fit is None else RegroupingMover(fit, self._pool, mover)


class _TcpMover:
    """Receives straight into the pages of the grant."""

    fit = None

    def __init__(self, connection: Connection, pool: Pool, faults: Faults, formats: tuple[str, ...]) -> None:
        self._connection, self._pool, self._faults, self._formats = connection, pool, faults, formats
        self._landing: Grant | None = None

    def check(self, header: Header) -> None:
        """The header names nothing of the sender's but the format."""
        if header.wire_format not in self._formats:
            raise Refused("bad_format", f"{header.wire_format} is not read here")

    def stop(self) -> None:
        """A frozen sender would hold the ticket for ever: without its connection it can write nothing. But the transfer
        that was to stop may be over, and the next one under way."""
        landing = self._landing
        if landing is not None and landing.stopped.is_set():
            self._connection.abort()

    def land(self, grant: Grant) -> Digests:
        return self.land_in(self._pool, grant)

    def land_in(self, pool: Pool, grant: Grant) -> Digests:
        self._landing = grant
        _check(grant)
        self._connection.send(Answer(ok=True))
        if grant.wire_format != EXACT:
            return self._land_coded(pool, grant)
        rows = RawRows(self._connection.fileno(), pool)
        spoil = self._faults.corrupt

        def after(step: Step) -> None:
            if spoil and step.layers.start == step.first_unit == 0:
                pool.flip_byte(step.run, 0)

        return [
            rows.receive(run, piece.layers, lambda: _check(grant), after)
            for piece, run in zip(grant.pieces, grant.runs, strict=True)
        ]

    def _land_coded(self, pool: Pool, grant: Grant) -> Digests:
        digests: Digests = []
        rows = CodedRows(self._connection, pool, grant.wire_format)
        broken: Corrupt | None = None
        for piece, run in zip(grant.pieces, grant.runs, strict=True):
            found, damaged = rows.receive(run, piece.layers, lambda: _check(grant), self._faults.corrupt)
            digests.append(found)
            if damaged is not None and broken is None:
                broken = Corrupt(f"component {pool.layout.components[run.component].name!r}: {damaged}")
        if broken is not None:
            raise broken
        return digests


def _check(grant: Grant) -> None:
    if grant.stopped.is_set():
        raise PeerLost("the ticket was fenced meanwhile")


class _TcpChannel:
    def __init__(self, connection: Connection, nonce: bytes, pool: Pool, fit: Fit | None, faults: Faults) -> None:
        self.fit = fit
        self._connection, self._nonce, self._pool, self._faults = connection, nonce, pool, faults
        self._sequence = 0
        self._aborted = threading.Event()

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        pieces = travelling(self.fit, manifest.pieces)
        runs = runs_of(self._pool, pieces)
        wait_for(event, self._aborted.is_set)
        wire, wire_format = wire_pieces(self._pool, pieces, with_units=False), manifest.wire.wanted
        self._connection.send_frame(header_frame(manifest, wire, self._nonce, self._sequence, wire_format=wire_format))
        self._sequence += 1
        expect_ok(self._connection)
        pool, read = source_of(self.fit, self._pool, runs, wire, self._aborted.is_set)
        send = self._send_raw if wire_format == EXACT else self._send_coded
        digests, sent = send(pool, read, manifest)
        began = time.monotonic()
        expect_ok(self._connection)  # the turn is ours until then: what was sent may still be in the kernel's queue
        spent_s = sent.spent_s + time.monotonic() - began
        held_back = manifest.turn.window_bytes > 0
        if sent.num_bytes >= _LEAST_MEASURED_BYTES and spent_s > 0 and not held_back:
            manifest.wire.bytes_per_s = sent.num_bytes / spent_s
        return digests

    def begin(self, manifest: Manifest) -> Begun | None:
        return None

    def _send_raw(self, pool: Pool, runs: Sequence[Run], manifest: Manifest) -> tuple[Digests, WireCost]:
        digests: Digests = []
        step_bytes, apart = min(STEP_BYTES, manifest.turn.burst_bytes), self._faults.delay_s > 0
        rows, total = RawRows(self._connection.fileno(), pool, step_bytes, apart), WireCost()
        for run in runs:
            found, sent = rows.send(run, run.layers, self._pause(manifest))
            digests.append(found)
            total += sent
        return digests, total

    def _send_coded(self, pool: Pool, runs: Sequence[Run], manifest: Manifest) -> tuple[Digests, WireCost]:
        digests: Digests = []
        rows, total = CodedRows(self._connection, pool, manifest.wire.wanted, manifest.turn.burst_bytes), WireCost()
        for run in runs:
            found, sent = rows.send(run, run.layers, self._pause(manifest))
            digests.append(found)
            total += sent
            component = pool.layout.components[run.component]
            manifest.wire.add(run.component, travels_as(rows.name, component), sent.num_bytes)
        return digests, total

    def _pause(self, manifest: Manifest) -> "_Pause":
        return _Pause(self._connection, manifest.turn, self._aborted, self._faults.delay_s)

    def abort(self) -> None:
        self._aborted.set()
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()


class _Pause:
    """Before each burst: waits until it may be sent, and until not too much is on its way."""

    def __init__(self, connection: Connection, turn: Turn, aborted: threading.Event, delay_s: float) -> None:
        self._connection, self._turn, self._aborted, self._delay_s = connection, turn, aborted, delay_s

    def __call__(self, num_bytes: int) -> None:
        self._connection.drain(self._turn.window_bytes, self._aborted.is_set)
        self._turn.wait(num_bytes)
        if self._delay_s and self._aborted.wait(self._delay_s):
            raise PeerLost("aborted")
