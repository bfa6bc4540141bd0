"""Any two hosts, over TCP. Raw rows are gathered from the sender's pages and scattered into the receiver's without a
copy in between; coded rows pass through the format that the header names."""

import socket
import threading
import time

from shared.protocol.messages import LinkAddress
from shared.runtime.errors import Corrupt, PeerLost
from shared.transfer.backend import Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.coded_rows import CodedRows, Sent
from shared.transfer.door import Door, Grant, Refused
from shared.transfer.formats.catalog import EXACT, available, travels_as
from shared.transfer.ledger import payload_bytes
from shared.transfer.listener import Listener, greeting
from shared.transfer.pool import Pool, Run
from shared.transfer.raw_rows import RawRows
from shared.transfer.row_spans import Step
from shared.transfer.sending import expect_ok, header_frame, introduce, runs_of, wait_for
from shared.transfer.streams import Streams
from shared.transfer.wire import Answer, Connection, Header

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
        return Streams(first, lambda: self._connect(peer), self._streams, self._pool.layout.components)

    def _connect(self, peer: LinkAddress) -> Channel:
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
        return _TcpMover(connection, self._pool, self._faults, self._formats)


class _TcpMover:
    """Receives straight into the pages of the grant."""

    def __init__(self, connection: Connection, pool: Pool, faults: Faults, formats: tuple[str, ...]) -> None:
        self._connection, self._pool, self._faults, self._formats = connection, pool, faults, formats

    def check(self, header: Header) -> None:
        """The header names nothing of the sender's but the format."""
        if header.wire_format not in self._formats:
            raise Refused("bad_format", f"{header.wire_format} is not read here")

    def stop(self) -> None:
        """A frozen sender would hold the ticket for ever: without its connection it can write nothing."""
        self._connection.abort()

    def land(self, grant: Grant) -> Digests:
        self._connection.send(Answer(ok=True))
        if grant.wire_format != EXACT:
            return self._land_coded(grant)
        rows = RawRows(self._connection.fileno(), self._pool)
        spoil = self._faults.corrupt

        def after(step: Step) -> None:
            if spoil and step.layers.start == step.first_unit == 0:
                self._pool.flip_byte(step.run, 0)

        return [
            rows.receive(run, range(piece.num_layers), lambda: _check(grant), after)
            for piece, run in zip(grant.pieces, grant.runs, strict=True)
        ]

    def _land_coded(self, grant: Grant) -> Digests:
        rows, digests = CodedRows(self._connection, self._pool, grant.wire_format), []
        broken: Corrupt | None = None
        for piece, run in zip(grant.pieces, grant.runs, strict=True):
            layers = range(piece.num_layers)
            found, damaged = rows.receive(run, layers, lambda: _check(grant), self._faults.corrupt)
            digests.append(found)
            if damaged is not None and broken is None:
                broken = Corrupt(f"component {self._pool.layout.components[run.component].name!r}: {damaged}")
        if broken is not None:
            raise broken
        return digests


def _check(grant: Grant) -> None:
    if grant.stopped.is_set():
        raise PeerLost("the ticket was fenced meanwhile")


class _TcpChannel:
    def __init__(self, connection: Connection, nonce: bytes, pool: Pool, faults: Faults) -> None:
        self._connection, self._nonce, self._pool, self._faults = connection, nonce, pool, faults
        self._sequence = 0
        self._aborted = threading.Event()

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        runs = runs_of(self._pool, manifest)
        wait_for(event, self._aborted.is_set)
        wire_format = manifest.wire.wanted
        frame = header_frame(
            manifest, self._pool, self._nonce, self._sequence, with_units=False, wire_format=wire_format
        )
        self._sequence += 1
        self._connection.send_frame(frame)
        expect_ok(self._connection)
        digests, sent = self._send_raw(runs) if wire_format == EXACT else self._send_coded(runs, manifest)
        began = time.monotonic()
        expect_ok(self._connection)
        spent_s = sent.spent_s + time.monotonic() - began
        if sent.num_bytes >= _LEAST_MEASURED_BYTES and spent_s > 0:
            manifest.wire.bytes_per_s = sent.num_bytes / spent_s
        return digests

    def _send_raw(self, runs: list[Run]) -> tuple[Digests, Sent]:
        rows, began = RawRows(self._connection.fileno(), self._pool, apart=self._faults.delay_s > 0), time.monotonic()
        digests = [rows.send(run, self._layers(run), self._pause) for run in runs]
        components = self._pool.layout.components
        num_bytes = sum(payload_bytes(components[run.component], len(run.units), run.rows_in_last) for run in runs)
        return digests, Sent(num_bytes, time.monotonic() - began)

    def _send_coded(self, runs: list[Run], manifest: Manifest) -> tuple[Digests, Sent]:
        rows, digests, total = CodedRows(self._connection, self._pool, manifest.wire.wanted), [], Sent()
        for run in runs:
            found, sent = rows.send(run, self._layers(run), self._pause)
            digests.append(found)
            total += sent
            component = self._pool.layout.components[run.component]
            manifest.wire.add(run.component, travels_as(rows.name, component), sent.num_bytes)
        return digests, total

    def _layers(self, run: Run) -> range:
        return range(self._pool.num_layers(run.component))

    def _pause(self, _num_bytes: int) -> None:
        if self._faults.delay_s and self._aborted.wait(self._faults.delay_s):
            raise PeerLost("aborted")

    def abort(self) -> None:
        self._aborted.set()
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()
