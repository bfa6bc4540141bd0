"""Hosts with RDMA, GPUDirect or whatever else NIXL's UCX finds: the receiver reads the sender's pages by NIXL.

Only the bytes go that way. Who may send what is settled as over TCP, on a connection of our own: the sender says there
which memory it has registered, and the receiver reads from it once the door has let the transfer in. So Baton never
writes into another process, and a fence needs nobody's help: no further read is posted, those under way are waited for,
and where one does not end the agent that posted it is destroyed.
"""

import socket
import threading
import time
from collections import deque
from dataclasses import replace

import numpy as np
from pydantic import Field

from shared.protocol.packing import PackedBytes
from shared.protocol.reports import LinkAddress
from shared.protocol.wire import WireModel
from shared.runtime.errors import PeerLost, TransferRefused, TransferTimeout
from shared.state.layout import PoolLayout
from shared.transfer.backend import Begun, Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.connection import Connection
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.listener import Listener, greeting
from shared.transfer.nixl_agent import ReadingAgent, ReadingAgents, Region, SourceAgent, load_nixl
from shared.transfer.parts import Part, in_order, merged, size_of
from shared.transfer.pool import Pool, Run
from shared.transfer.row_spans import part_of
from shared.transfer.sending import header_frame, introduce, runs_of, wait_for, wire_pieces
from shared.transfer.spans import Spans, Step, holds, spans_of
from shared.transfer.wire import Answer, Header

_BACKLOG = 64
_BATCH_BYTES = 4 << 20
_BATCH_SPANS = 512
_PART_BURSTS = 8
"""So many bursts are asked of the peer at once: asking costs a round trip."""
_DEPTH = 2
"""Batches under way: while one is digested the next one moves."""
_GRACE_S = 1.0
"""How long reads under way may take to end by themselves once their transfer has been stopped."""
_LONGEST_PAUSE_S = 0.0005
_MOVING = "moving"


class Source(WireModel):
    """What the sender says after its greeting: the metadata of its agent, and where its pool begins there."""

    agent: PackedBytes
    address: int = Field(ge=0, lt=1 << 63)


class NixlBackend:
    """Listens on `host` for transfers; port 0 takes a free one. UCX chooses its own ports, on the loopback if `host` is
    one, else on every interface (`UCX_NET_DEVICES`, `UCX_TCP_PORT_RANGE`)."""

    name = "nixl"

    def __init__(
        self, pool: Pool, door: Door, boot_id: str, host: str, port: int, timing: Timing, faults: Faults
    ) -> None:
        self._pool, self._timing, self._faults = pool, timing, faults
        region = Region(load_nixl(), pool, host)
        self._agents, self._source = ReadingAgents(region), SourceAgent(region)
        self._own = Source(agent=self._source.metadata, address=region.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self.name, boot_id, door, self._greet, timing)

    def reaches(self, peer: LinkAddress) -> bool:
        return self.name in peer.backends and _port_of(peer) > 0

    def connect(self, peer: LinkAddress) -> Channel:
        where = (peer.host, _port_of(peer))
        try:
            sock = socket.create_connection(where, self._timing.connect_s)
        except OSError as error:
            raise PeerLost(f"no sidecar answers at {where[0]}:{where[1]}: {error}") from error
        connection = Connection(sock, self._timing.stall_s)
        nonce, fit = introduce(connection, peer.boot_id, self._pool.layout, also=self._own)
        if fit is not None:
            connection.close()
            raise PeerLost("nixl moves state only between pools that are cut alike")
        return _NixlChannel(connection, nonce, self._pool, self._source)

    def close(self) -> None:
        self._listener.close()
        self._agents.close()
        self._source.close()

    def _greet(self, connection: Connection) -> "_NixlMover":
        theirs, fit = greeting(connection.receive_frame(), self._pool.layout)
        source, layout = connection.receive(Source), theirs.layout
        if fit is not None:
            raise PeerLost("the sender finds out that we do not suit it")
        if min(layout.num_pages, layout.num_slots) < 0 or source.address + layout.total_bytes >= 1 << 63:
            raise Refused("geometry", "no pool can lie there")
        return _NixlMover(connection, self._pool, self._agents, source, layout, self._timing, self._faults)


def _port_of(peer: LinkAddress) -> int:
    """0 if it does not say."""
    told = peer.endpoint(NixlBackend.name)
    return int(told) if told.isdecimal() and len(told) <= 5 and int(told) < 1 << 16 else 0


class _NixlMover:
    """Reads from one peer's pool. What the peer said of its agent goes to NIXL only with a transfer that the door let
    in."""

    fit = None

    def __init__(
        self,
        connection: Connection,
        pool: Pool,
        agents: ReadingAgents,
        source: Source,
        layout: PoolLayout,
        timing: Timing,
        faults: Faults,
    ) -> None:
        self._connection, self._pool, self._agents = connection, pool, agents
        self._source, self._layout = source, layout
        self._timing, self._faults = timing, faults

    def check(self, header: Header) -> None:
        for piece in header.pieces:
            run = Run(piece.component, piece.units, piece.rows_in_last, piece.layers)
            if len(piece.units) != piece.num_units or not holds(self._layout, run):
                raise Refused("bad_source", "the sender's pool has no such units")

    def stop(self) -> None:
        """`land` looks at `stopped` all the time."""

    def land(self, grant: Grant) -> Digests:
        theirs = [Run(one.component, one.units, one.rows_in_last, one.layers) for one in grant.pieces]
        pairs = list(zip(grant.runs, theirs, strict=True))
        spans = spans_of(self._pool.layout, self._layout, pairs, _BATCH_BYTES)
        agent = self._agents.take(self._source.agent)
        try:
            digests = self._read(agent, grant, spans)
        except BaseException:
            agent.destroy()
            raise
        self._agents.keep(agent)
        return digests

    def _read(self, agent: ReadingAgent, grant: Grant, spans: Spans) -> Digests:
        digests: Digests = [[] for _ in grant.pieces]
        steps, ends = deque(spans.steps), deque[int]()
        told = time.monotonic()
        for batch in spans.batches(_BATCH_BYTES, _BATCH_SPANS, by_step=self._faults.delay_s > 0):
            if grant.stopped.wait(self._faults.delay_s) if self._faults.delay_s else grant.stopped.is_set():
                break
            if not self._connection.is_idle():
                raise PeerLost("the sender has hung up")
            agent.post(spans.mine[batch], spans.theirs[batch] + self._source.address, spans.lengths[batch])
            ends.append(batch.stop)
            if len(ends) == _DEPTH:
                self._await(agent, grant, _DEPTH - 1)
                self._digest(grant, steps, ends.popleft(), digests)
            if time.monotonic() - told >= self._timing.stall_s / 4:
                self._connection.send(Answer(ok=True, reason=_MOVING))
                told = time.monotonic()
        self._await(agent, grant, 0)
        if ends:
            self._digest(grant, steps, ends[-1], digests)
        return digests

    def _digest(self, grant: Grant, steps: deque[Step], done: int, digests: Digests) -> None:
        """Of what has landed by now: the parts of a layer are put together with its last one."""
        while steps and steps[0].end <= done:
            step = steps.popleft()
            whole = grant.runs[step.piece]
            run = part_of(whole, step.first, step.last, self._pool.layout.components[whole.component].unit_tokens)
            if self._faults.corrupt and step.layer == step.first == 0:
                self._pool.flip_byte(run, step.layer)
            found, layers = self._pool.digests(run, step.layer), digests[step.piece]
            if step.first:
                layers[-1] = np.concatenate((layers[-1], found))
            else:
                layers.append(found)

    def _await(self, agent: ReadingAgent, grant: Grant, most: int) -> None:
        """Until no more than `most` reads are under way. Raises if they stand still, or do not end once nobody wants
        them any more."""
        began, pause = time.monotonic(), 0.0
        stopped_at: float | None = None
        while agent.settle() > most:
            now = time.monotonic()
            if stopped_at is None and (grant.stopped.is_set() or not self._connection.is_idle()):
                stopped_at = now
            if stopped_at is not None and now - stopped_at > _GRACE_S:
                raise PeerLost("stopped with reads under way")
            if now - began > self._timing.stall_s:
                raise TransferTimeout("the peer's memory does not answer")
            time.sleep(pause)
            pause = min(2 * pause + 0.00001, _LONGEST_PAUSE_S)


class _NixlChannel:
    fit = None

    def __init__(self, connection: Connection, nonce: bytes, pool: Pool, source: SourceAgent) -> None:
        self._connection, self._nonce, self._pool, self._source = connection, nonce, pool, source
        self._sequence = 0
        self._aborted = threading.Event()

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        runs_of(self._pool, manifest.pieces)
        wait_for(event, self._aborted.is_set)
        # It is the peer that fetches the bytes, and it cannot be held back within a transfer.
        components, limit = self._pool.layout.components, _PART_BURSTS * manifest.turn.burst_bytes
        parts, digests = list[Part](), list[Digests]()
        for part in in_order(manifest.pieces, components, limit):
            manifest.turn.wait(max(1, size_of(part, components)))
            digests.append(self._move(replace(manifest, pieces=tuple(piece for _, piece in part))))
            parts.append(part)
        return merged(len(manifest.pieces), parts, digests)

    def begin(self, manifest: Manifest) -> Begun | None:
        return None

    def _move(self, manifest: Manifest) -> Digests:
        runs = runs_of(self._pool, manifest.pieces)
        wire = wire_pieces(self._pool, manifest.pieces, with_units=True)
        frame = header_frame(manifest, wire, self._nonce, self._sequence)
        self._sequence += 1
        with self._source.serving():
            self._connection.send_frame(frame)
            # While the peer reads.
            digests = [[self._pool.digests(run, layer) for layer in run.layers] for run in runs]
            self._expect_landed()
        return digests

    def _expect_landed(self) -> None:
        """Each notice that something moved gives the peer as long again."""
        while (answer := self._connection.receive(Answer)).reason == _MOVING:
            pass
        if not answer.ok:
            raise TransferRefused(answer.message or answer.reason)

    def abort(self) -> None:
        self._aborted.set()
        self._connection.abort()

    def is_idle(self) -> bool:
        return self._connection.is_idle()

    def close(self) -> None:
        self._connection.close()
