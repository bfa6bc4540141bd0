"""A sidecar: the door, the backends and the outbox of one worker, behind its control socket.

It lives exactly as long as the control socket: its end, for whatever reason, ends the process. NATS is for reports
only; without it bytes move all the same.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable

from services.sidecar.settings import SidecarProcessSettings
from shared.protocol.reports import LinkAddress, WorkerReport
from shared.runtime.eager import begin
from shared.runtime.errors import BatonError
from shared.runtime.ids import new_boot_id
from shared.runtime.tasks import TaskOwner
from shared.transfer.backend import Backend
from shared.transfer.backends import Site, start_backends
from shared.transfer.classes import Standing
from shared.transfer.control import (
    POOL_BYTE,
    Ask,
    Attach,
    ControlError,
    Moving,
    Open,
    Ping,
    Ready,
    Reply,
    Send,
    counted,
    first_frame,
    frame,
    from_worker,
)
from shared.transfer.control_socket import ControlSocket
from shared.transfer.door import Door
from shared.transfer.formats.catalog import load_formats
from shared.transfer.kernels import load_kernels
from shared.transfer.link import TicketKey
from shared.transfer.outbox import Outbox
from shared.transfer.pool import Pool
from shared.transfer.warm import Warmer

_log = logging.getLogger(__name__)


async def run(settings: SidecarProcessSettings) -> None:
    """Serves the worker at the other end of `control_fd` until it closes."""
    control = socket.socket(fileno=settings.control_fd)
    control.setblocking(True)
    first, fds, _, _ = socket.recv_fds(control, len(POOL_BYTE), 1)
    if first != POOL_BYTE or not fds:
        raise ControlError("the worker's first byte carries the pool")
    body = first_frame(control)
    attach = from_worker(body) if body is not None else None
    if not isinstance(attach, Attach):
        raise ControlError("the worker says first what its pool looks like")
    sidecar = Sidecar(settings, fds[0], attach)
    try:
        await sidecar.serve(control)
    finally:
        await sidecar.close()


class Sidecar:
    """Owns the pool's descriptor."""

    def __init__(self, settings: SidecarProcessSettings, pool_fd: int, attach: Attach) -> None:
        self._settings = settings
        self._control: ControlSocket | None = None
        self._loop = asyncio.get_running_loop()
        self._boot_id, self._host = new_boot_id(), socket.gethostname()
        self._pool_fd, self._layout = pool_fd, attach.layout
        pool = self._pool = Pool.map(pool_fd, attach.layout, writable=True)
        self._warmer = Warmer(pool, settings.placement.step_back)
        self._door = Door(attach.layout, self._on_first_bytes)
        self._complete = threading.Event()
        self._complete.set()
        """A worker asks for a transfer only when its source is complete."""
        settings.directory.mkdir(parents=True, exist_ok=True)
        self._backends, self.address = settings.placement.call_stepped_back(lambda: self._start_backends(pool))
        self._outbox = Outbox(
            attach.layout, self._backends, self._on_moving, settings.gate(), settings.placement.step_back
        )

    async def serve(self, control: socket.socket) -> None:
        """Returns when the worker closed the control socket, which belongs to the sidecar from now on."""
        ended: asyncio.Future[Exception | None] = self._loop.create_future()
        async with TaskOwner() as tasks:
            if self._settings.nats_url:
                tasks.spawn(self._report(), "reports")
            tasks.spawn(self._compile(), "kernels")

            def on_frame(body: bytes) -> None:
                message = from_worker(body)
                if isinstance(message, Attach):
                    raise ControlError("a worker attaches once")
                if (rest := begin(self._answer(message))) is not None:
                    tasks.spawn(rest, message.kind)

            def on_end(error: Exception | None) -> None:
                if not ended.done():
                    ended.set_result(error)

            self._control = ControlSocket(control, on_frame, on_end)
            self._tell(Ready(address=self.address))
            error = await ended
            if error is not None:
                raise error

    async def close(self) -> None:
        """Ends every transfer, both ways."""
        if self._control is not None:
            self._control.close()
        await self._outbox.close()
        await asyncio.to_thread(self._warmer.close)
        for backend in self._backends:
            await asyncio.to_thread(backend.close)
        os.close(self._pool_fd)

    async def _compile(self) -> None:
        # Until then bytes move without.
        self._pool.kernels = await asyncio.to_thread(load_kernels)
        await asyncio.to_thread(load_formats, self._settings.formats)

    async def _report(self) -> None:
        # The NATS client takes longer to import than all the rest, and moving bytes does not wait for it.
        reports = await asyncio.to_thread(importlib.import_module, "services.sidecar.reports")
        await reports.send_reports(self._settings, self._boot_id, self.report)

    def report(self) -> WorkerReport:
        states, _ = self._door.snapshot()
        return WorkerReport(
            role="sidecar",
            id=self._settings.name,
            boot_id=self._boot_id,
            pid=os.getpid(),
            host=self._host,
            state="ready",
            link=self.address,
            tickets=states | {"sending": self._outbox.num_tickets},
            counters={name: float(count) for name, count in self._counters().items()},
            settings=self._settings.public(),
        )

    def _counters(self) -> dict[str, int]:
        compiled = {"compiled": int(self._pool.kernels is not None)}
        return self._door.snapshot()[1] | self._outbox.counters | self._outbox.traffic.as_counters() | compiled

    def _start_backends(self, pool: Pool) -> tuple[tuple[Backend, ...], LinkAddress]:
        settings = self._settings
        site = Site(
            pool=pool,
            pool_fd=self._pool_fd,
            door=self._door,
            boot_id=self._boot_id,
            directory=settings.directory,
            host=settings.tcp_host,
            listen_host=settings.listen_host or settings.tcp_host,
            ports={"tcp": settings.tcp_port, "nixl": settings.nixl_port},
            timing=settings.timing,
            faults=settings.injected,
            formats=settings.formats,
            tcp_streams=settings.tcp_streams,
        )
        return start_backends(site, settings.transfer)

    async def _answer(self, message: Open | Send | Ask | Ping) -> None:
        try:
            reply = await self._carry_out(message)
        except BatonError as error:
            reply = Reply(id=message.id, code=error.code, message=error.message)
        except Exception as error:
            _log.exception("%s failed", message.kind)
            reply = Reply(id=message.id, code=BatonError.code, message=f"{type(error).__name__}: {error}")
        self._tell(reply)

    async def _carry_out(self, message: Open | Send | Ask | Ping) -> Reply:
        done = Reply(id=message.id)
        if isinstance(message, Ping):
            return done.model_copy(update={"counters": self._counters(), "sent": self._outbox.traffic.sent()})
        if isinstance(message, Open):
            self._door.open(message.key, message.secret, message.units, message.held_len, message.formats)
            self._warmer.soon(message.units)
            return done
        if isinstance(message, Send):
            standing = Standing(message.traffic, message.priority)
            sent = await self._outbox.send(
                message.key,
                message.secret,
                message.peer,
                message.pieces,
                self._complete,
                message.wire_format,
                standing,
            )
            return done.model_copy(update={"on_wire": sent.on_wire, "bytes_per_s": sent.bytes_per_s})
        if message.kind == "received":
            return done.model_copy(update={"receipt": counted(self._door.received(message.key, message.rank))})
        if message.kind == "sent":
            return done.model_copy(update={"receipt": counted(self._outbox.sent(message.key, message.rank))})
        if message.kind == "fence":
            await self._fence(message.key)
        else:
            await self._outbox.forget(message.key)
        return done

    async def _fence(self, key: TicketKey) -> None:
        quiesced = asyncio.Event()
        self._door.fence(key, lambda: self._on_loop(quiesced.set))
        await quiesced.wait()

    def _on_first_bytes(self, key: TicketKey, backend: str) -> None:
        self._tell(Moving(room=key.room, generation=key.generation, backend=backend, receiving=True))

    def _on_moving(self, key: TicketKey, backend: str) -> None:
        self._tell(Moving(room=key.room, generation=key.generation, backend=backend, receiving=False))

    def _on_loop(self, call: Callable[[], None]) -> None:
        """From a transfer's thread. The loop may have ended before it: then nobody waits for the call."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _tell(self, message: Ready | Reply | Moving) -> None:
        """From any thread."""
        if self._control is not None:
            self._control.send(frame(message))
