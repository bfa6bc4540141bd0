"""One incarnation of a worker's sidecar: a child process, its control socket, and the proof of its death.

`gone` is set only once the process has been waited for: then its mapping of the pool is gone too, and nothing it was
told to write can be written any more.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from shared.protocol.reports import LinkAddress
from shared.protocol.wire import WireModel
from shared.runtime.config_file import EXIT_CONFIG, ConfigError
from shared.runtime.errors import PeerLost, error_from_code
from shared.state.layout import PoolLayout
from shared.transfer.control import (
    POOL_BYTE,
    Attach,
    Moving,
    Ping,
    Ready,
    Reply,
    frame,
    from_sidecar,
)
from shared.transfer.control_socket import ControlSocket
from shared.transfer.link import OwnSidecarLost
from shared.transfer.traffic import Sent

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0


class SidecarProcess:
    """Made by `start`. on_moving is called on the loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        sock: socket.socket,
        on_moving: Callable[[Moving], None],
    ) -> None:
        self.gone = asyncio.Event()
        self.pid = process.pid
        self._process, self._on_moving = process, on_moving
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._ids: Iterator[int] = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._ready: asyncio.Future[LinkAddress] = self._loop.create_future()
        self._lost: OwnSidecarLost | None = None
        self.sent: tuple[Sent, ...] = ()
        """As of its last answer to a ping."""
        self._hung_up = asyncio.Event()
        self._control = ControlSocket(sock, self._deliver, self._on_end)
        self._task = asyncio.create_task(self._bury(), name="sidecar-control")  # noqa: TID251 - ends with the process

    @classmethod
    async def start(
        cls,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        pool_fd: int,
        layout: PoolLayout,
        on_moving: Callable[[Moving], None],
        timeout_s: float,
    ) -> Self:
        """Starts the process, with `environment` on top of our own, and waits until peers can reach it. Raises PeerLost
        if it does not come up, ConfigError if it never will with these settings."""
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "services.sidecar", "--control-fd", str(theirs.fileno()), *arguments)
        with theirs:
            try:
                socket.send_fds(ours, [POOL_BYTE], [pool_fd])
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=(theirs.fileno(),),
                    env=os.environ | environment,
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        child = cls(process, ours, on_moving)
        child._control.send(frame(Attach(layout=layout)))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(child._ready)
        except BaseException as error:
            if not isinstance(error, OwnSidecarLost):  # then it ends by itself, and its status says why
                child.kill()
            await child.gone.wait()
            if process.returncode == EXIT_CONFIG:
                raise ConfigError("the sidecar cannot start with its settings; it says why in its log") from error
            if isinstance(error, TimeoutError):
                raise PeerLost(f"the sidecar did not come up within {timeout_s} s") from error
            raise
        return child

    @property
    def address(self) -> LinkAddress:
        return self._ready.result()

    @property
    def silent_s(self) -> float:
        """Since it last said anything; it is asked often enough."""
        return self._loop.time() - self._heard_at

    async def request(self, message: WireModel, id: int) -> Reply:
        """The answer; raises the error it carries, or OwnSidecarLost as soon as the process is gone."""
        if self._lost is not None:
            raise self._lost
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[id] = future
        try:
            self._control.send(frame(message))
            reply = await future
        finally:
            self._waiting.pop(id, None)
        if reply.code:
            raise error_from_code(reply.code, reply.message)
        return reply

    def next_id(self) -> int:
        return next(self._ids)

    async def ping(self) -> dict[str, int]:
        """The sidecar's counters."""
        id = self.next_id()
        reply = await self.request(Ping(id=id), id)
        self.sent = reply.sent
        return reply.counters

    def kill(self) -> None:
        """Ends the process at once; `gone` follows."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Lets the process end by itself, and kills it if it does not. Returns when it is gone."""
        self._control.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.gone.wait()
        except TimeoutError:
            self.kill()
            await self.gone.wait()
        except asyncio.CancelledError:
            self.kill()
            raise
        await self._task

    def unlink_socket(self, ipc_dir: Path) -> None:
        """Removes what a killed sidecar left behind."""
        if self._ready.done() and self._ready.exception() is None and self.address.socket:
            (ipc_dir / self.address.socket).unlink(missing_ok=True)

    def _on_end(self, error: Exception | None) -> None:
        if error is not None:
            _log.error("the sidecar %d does not speak our protocol", self.pid, exc_info=error)
        self._fail(OwnSidecarLost("the worker's own sidecar is gone"))
        self._hung_up.set()

    async def _bury(self) -> None:
        try:
            await self._hung_up.wait()
        finally:
            self._control.close()
            # Closing the control socket ends a healthy sidecar; one that hangs must not outlive this.
            kill = self._loop.call_later(_CLOSE_S, self.kill)
            await self._process.wait()
            kill.cancel()
            self.gone.set()

    def _deliver(self, body: bytes) -> None:
        self._heard_at = self._loop.time()
        message = from_sidecar(body)
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.address)
        elif isinstance(message, Moving):
            self._on_moving(message)
        else:
            future = self._waiting.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)

    def _fail(self, error: OwnSidecarLost) -> None:
        self._lost = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
