"""The worker's side of its sidecar: `Link` over the control socket, and the sidecar's supervision.

A sidecar that dies fails everything pending with PeerLost at once; the tickets it was receiving are quiesced by its
death, which is waited for; a new one is started under a new boot id. Imports no torch and neither does the sidecar.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from shared.protocol.messages import OnWire
from shared.protocol.reports import LinkAddress
from shared.runtime.errors import PeerLost, TransferError
from shared.state.layout import PoolLayout
from shared.transfer.classes import HANDOFF, Standing
from shared.transfer.control import Ask, Moving, Open, Reply, Send, receipt_of
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import OwnSidecarLost, Piece, Receipt, TicketKey
from shared.transfer.sidecar_options import SidecarOptions
from shared.transfer.sidecar_process import SidecarProcess
from shared.transfer.sidecar_watch import until_done, watch
from shared.transfer.traffic import Sent
from shared.transfer.wire_book import WireBook

_log = logging.getLogger(__name__)
_LONGEST_BACKOFF_S = 5.0


class SidecarLink:
    """Made by `start`; `close` ends the sidecar. The pool's descriptor stays the caller's and must outlive the link.

    on_lost(keys): a sidecar died and is proven dead; these receiving tickets are quiesced and will never fill.
    on_restart(): a new one is up, `address` is new. Both are called on the loop.
    """

    def __init__(
        self,
        options: SidecarOptions,
        pool_fd: int,
        layout: PoolLayout,
        on_restart: Callable[[], None] | None = None,
        on_lost: Callable[[tuple[TicketKey, ...]], None] | None = None,
    ) -> None:
        self._options, self._pool_fd, self._layout = options, pool_fd, layout
        self._on_restart, self._on_lost = on_restart, on_lost
        self._child: SidecarProcess | None = None
        self._address: LinkAddress | None = None
        self._receiving: dict[TicketKey, tuple[SidecarProcess, Callable[[TicketKey], None]]] = {}
        self._sending: dict[TicketKey, SidecarProcess] = {}
        self._backends: dict[TicketKey, str] = {}
        self._wires = WireBook()
        self._supervisor: asyncio.Task[None] | None = None
        self.restarts = 0

    @classmethod
    async def start(
        cls,
        options: SidecarOptions,
        pool_fd: int,
        layout: PoolLayout,
        on_restart: Callable[[], None] | None = None,
        on_lost: Callable[[tuple[TicketKey, ...]], None] | None = None,
    ) -> Self:
        """Returns when the sidecar is up. Raises PeerLost if it does not come up."""
        link = cls(options, pool_fd, layout, on_restart, on_lost)
        await link._spawn()
        supervisor = asyncio.create_task(link._supervise(), name="sidecar-supervisor")  # noqa: TID251 - `close` ends it
        link._supervisor = supervisor
        return link

    @property
    def address(self) -> LinkAddress:
        if self._address is None:
            raise OwnSidecarLost("the sidecar was never up")
        return self._address

    @property
    def pid(self) -> int | None:
        """The sidecar's process, None while it is down."""
        return self._child.pid if self._child else None

    @property
    def silent_s(self) -> float:
        """Since the sidecar last said anything; 0 while there is none."""
        return self._child.silent_s if self._child else 0.0

    async def open(
        self,
        key: TicketKey,
        secret: bytes,
        units: tuple[tuple[int, ...], ...],
        on_first_bytes: Callable[[TicketKey], None],
        held_len: int = 0,
        formats: tuple[str, ...] = EXACT_FORMATS,
    ) -> None:
        child = self._alive()
        if key in self._receiving:
            raise TransferError("the ticket is open")
        self._receiving[key] = (child, on_first_bytes)
        id = child.next_id()
        ticket = {"room": key.room, "generation": key.generation}
        request = Open(id=id, **ticket, secret=secret, units=units, held_len=held_len, formats=formats)
        try:
            await child.request(request, id)
        except TransferError:
            raise
        except Exception:
            # Refused by the door: nothing was opened, so there is nothing to fence.
            del self._receiving[key]
            raise

    async def received(self, key: TicketKey, rank: int | None = None) -> Receipt:
        entry = self._receiving.get(key)
        reply = await self._ask("received", key, entry[0] if entry else self._alive(), rank)
        return receipt_of(reply.receipt)

    async def fence(self, key: TicketKey) -> None:
        entry = self._receiving.get(key)
        if entry is None:
            return
        await self._ask_or_kill("fence", key, entry[0])
        if self._receiving.get(key) is entry:
            del self._receiving[key]
            self._backends.pop(key, None)

    async def send(
        self,
        key: TicketKey,
        secret: bytes,
        peer: LinkAddress,
        pieces: tuple[Piece, ...],
        wire_format: str = EXACT,
        standing: Standing = HANDOFF,
    ) -> None:
        child = self._alive()
        if self._sending.setdefault(key, child) is not child:
            raise OwnSidecarLost("the sidecar restarted under the ticket")
        id = child.next_id()
        request = Send(
            id=id,
            room=key.room,
            generation=key.generation,
            secret=secret,
            peer=peer,
            pieces=pieces,
            wire_format=wire_format,
            traffic=standing.traffic,
            priority=standing.priority,
        )
        reply = await child.request(request, id)
        self._wires.sent(key, peer, reply)

    async def sent(self, key: TicketKey, rank: int | None = None) -> Receipt:
        reply = await self._ask("sent", key, self._sending.get(key) or self._alive(), rank)
        return receipt_of(reply.receipt)

    async def forget(self, key: TicketKey) -> None:
        child = self._sending.get(key)
        if child is None:
            return
        await self._ask_or_kill("forget", key, child)
        if self._sending.get(key) is child:
            del self._sending[key]
            self._backends.pop(key, None)
            self._wires.forget(key)

    def actual_backend(self, key: TicketKey) -> str | None:
        return self._backends.get(key)

    def on_wire(self, key: TicketKey) -> tuple[OnWire, ...]:
        return self._wires.of(key)

    def rate(self, peer: LinkAddress) -> float | None:
        return self._wires.rate(peer)

    async def counters(self) -> dict[str, int]:
        """What the sidecar counted since its start: admitted, landed, refused by reason, sent by backend."""
        return await self._alive().ping()

    @property
    def traffic(self) -> tuple[Sent, ...]:
        """What the sidecar has sent since its start, by class and backend, as of about a second ago."""
        return self._child.sent if self._child else ()

    async def close(self) -> None:
        """Ends the sidecar; when it returns nothing of the pool is read or written by it. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        child, self._child = self._child, None
        if child is not None:
            await child.close()
            child.unlink_socket(self._options.ipc_dir)
        self._receiving.clear()
        self._sending.clear()
        self._backends.clear()

    def _alive(self) -> SidecarProcess:
        if self._child is None:
            raise OwnSidecarLost("the worker's own sidecar is down")
        return self._child

    async def _ask(self, what: str, key: TicketKey, child: SidecarProcess, rank: int | None = None) -> Reply:
        id = child.next_id()
        ticket = {"room": key.room, "generation": key.generation, "rank": rank}
        request = Ask.model_validate({"id": id, "kind": what, **ticket})
        return await child.request(request, id)

    async def _ask_or_kill(self, what: str, key: TicketKey, child: SidecarProcess) -> None:
        """Returns when the sidecar says it is done, or is dead."""
        await until_done(child, what, lambda: self._ask(what, key, child), self._options.fence_timeout_s)

    def _moving(self, event: Moving) -> None:
        key = TicketKey(event.room, event.generation)
        entry = self._receiving.get(key) if event.receiving else None
        if entry is None and (event.receiving or key not in self._sending):
            return
        self._backends[key] = event.backend
        if entry is not None:
            entry[1](key)

    async def _spawn(self) -> None:
        options = self._options
        self._child = await SidecarProcess.start(
            options.flags(),
            options.environment(),
            self._pool_fd,
            self._layout,
            self._moving,
            options.start_timeout_s,
        )
        self._address = self._child.address

    async def _supervise(self) -> None:
        while True:
            child = self._alive()
            await watch(child, self._options.ping_interval_s, self._options.hang_timeout_s)
            _log.error("the sidecar %d is gone", child.pid)
            self._child = None
            child.unlink_socket(self._options.ipc_dir)
            self._declare_lost(child)
            await self._restart()
            self.restarts += 1
            if self._on_restart is not None:
                self._on_restart()

    async def run(self) -> None:
        """Returns when the link is closed, raises what ended the supervision. A vital task of the worker: without
        supervision a lost sidecar would never come back."""
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})
            if not self._supervisor.cancelled():
                self._supervisor.result()

    def _declare_lost(self, child: SidecarProcess) -> None:
        lost = tuple(key for key, entry in self._receiving.items() if entry[0] is child)
        for key in lost:
            del self._receiving[key]
            self._backends.pop(key, None)
        if self._on_lost is not None:
            self._on_lost(lost)

    async def _restart(self) -> None:
        delay_s = 0.05
        while True:
            try:
                return await self._spawn()
            except (PeerLost, OSError) as error:
                _log.error("the sidecar does not start: %s", error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_BACKOFF_S)
