"""Several connections to one peer as one channel: a large transfer is cut by units, and its parts travel side by side.

A single connection is as fast as one core copies, codes and digests, and over a lossy network slower than the network.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shared.runtime.errors import TransferError
from shared.state.components import StateComponent
from shared.state.remap import Fit
from shared.transfer.backend import Begun, Channel, Digests, Event, Manifest, Turn, Wire
from shared.transfer.connection import Connection
from shared.transfer.parts import alike, merged
from shared.transfer.sending import travelling

_log = logging.getLogger(__name__)
_LEAST_BYTES = 4 << 20
"""What a stream of its own is worth: less is over before the second one has begun."""


Connect = Callable[[Callable[[Connection], None]], Channel]
"""Is given what is told of the connection before it greets, so that it can be aborted then."""


class Streams:
    """Implements `Channel`. first: open already, used for what is small. connect: makes a further one; called when
    there is something large to send, so that small hand-offs cost one connection. most: of them."""

    def __init__(self, first: Channel, connect: Connect, most: int, components: Sequence[StateComponent]) -> None:
        self._channels, self._connect = [first], connect
        self._most, self._components = most, components
        self._opening: Connection | None = None
        self._aborted = False

    @property
    def fit(self) -> Fit | None:
        return self._channels[0].fit

    def begin(self, manifest: Manifest) -> Begun | None:
        return None

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        pieces = travelling(self.fit, manifest.pieces)
        if not all(0 <= piece.component < len(self._components) for piece in pieces):
            return self._channels[0].transfer(manifest, event)  # which says what is wrong
        parts = alike(pieces, self._components, self._most, _LEAST_BYTES)
        if len(parts) > len(self._channels):
            self._open(len(parts))
            parts = alike(pieces, self._components, len(self._channels), _LEAST_BYTES)
        if len(parts) == 1:
            return self._channels[0].transfer(manifest, event)
        turn = _InTurn(manifest.turn, len(parts))
        manifests = [
            replace(manifest, pieces=tuple(piece for _, piece in part), wire=Wire(manifest.wire.wanted), turn=turn)
            for part in parts
        ]
        digests = self._side_by_side(manifests, event)
        rates = [one.wire.bytes_per_s for one in manifests]
        manifest.wire.bytes_per_s = sum(rate for rate in rates if rate is not None) or None
        for one in manifests:
            for component, (name, num_bytes) in one.wire.used.items():
                manifest.wire.add(component, name, num_bytes)
        return merged(len(pieces), parts, digests)

    def abort(self) -> None:
        self._aborted = True
        if (opening := self._opening) is not None:
            opening.abort()
        for channel in list(self._channels):
            channel.abort()

    def is_idle(self) -> bool:
        return all(channel.is_idle() for channel in self._channels)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _on_open(self, connection: Connection) -> None:
        self._opening = connection
        if self._aborted:
            connection.abort()

    def _open(self, count: int) -> None:
        """More channels, as many as the peer lets us have."""
        while len(self._channels) < count:
            try:
                self._channels.append(self._connect(self._on_open))
            except TransferError as error:
                _log.warning("%d of %d streams: %s", len(self._channels), count, error.message)
                self._most = len(self._channels)
                return
            if self._aborted:
                self.abort()  # whoever aborted may have looked before this one was there

    def _side_by_side(self, manifests: list[Manifest], event: Event) -> list[Digests]:
        """Returns when all have ended. The first that fails ends the others, and its error is what is raised."""
        failed: list[BaseException] = []

        def send(channel: Channel, manifest: Manifest) -> Digests:
            try:
                return channel.transfer(manifest, event)
            except BaseException as error:
                failed.append(error)
                self.abort()
                manifest.turn.abort()
                raise

        pairs = list(zip(self._channels, manifests, strict=False))
        with ThreadPoolExecutor(len(pairs) - 1, thread_name_prefix="stream") as threads:
            others = [threads.submit(send, *pair) for pair in pairs[1:]]
            try:
                return [send(*pairs[0]), *(other.result() for other in others)]
            except BaseException:
                raise failed[0] from None


class _InTurn:
    """One transfer's turn, for several threads that send it: they ask one after the other, and each has a part of the
    window. To others their bursts are one at a time, though several may be on the wire."""

    def __init__(self, turn: Turn, num_parts: int) -> None:
        self._turn, self._num_parts, self._lock = turn, num_parts, threading.Lock()

    @property
    def burst_bytes(self) -> int:
        return self._turn.burst_bytes

    @property
    def window_bytes(self) -> int:
        return -(-self._turn.window_bytes // self._num_parts)

    def wait(self, num_bytes: int) -> None:
        with self._lock:
            self._turn.wait(num_bytes)

    def at_once(self, num_bytes: int) -> bool:
        with self._lock:
            return self._turn.at_once(num_bytes)

    def abort(self) -> None:
        self._turn.abort()
