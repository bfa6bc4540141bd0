"""A local cluster while it runs: nats-server first, then every process, watched by heartbeats; ended in reverse."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from services.launcher.child import Child, OnLine, OnPhase
from services.launcher.errors import LaunchError
from services.launcher.plan import ProcessSpec
from services.launcher.state_dir import StateDir
from shared.bus.base import Bus, BusError, Message
from shared.bus.nats import connect
from shared.bus.server import NatsServer, NatsServerError
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import MalformedMessage, decode
from shared.runtime.tasks import TaskOwner

START_TIMEOUT_S = 900.0
_WATCH_S = 0.1
_HEALTH_TIMEOUT_S = 5.0
_END_ORDER = (("gateway",), ("prefill", "decode"), ("kvstore",))


class Cluster:
    """Owns every process of a local cluster. Entering starts nats-server; leaving ends all, whatever happened."""

    def __init__(self, state_dir: StateDir, on_line: OnLine, on_phase: OnPhase, *, restart: bool) -> None:
        self._state_dir = state_dir
        self._on_line = on_line
        self._on_phase = on_phase
        self._restart = restart
        self._tasks = TaskOwner()
        # Whoever can talk to it can read every prompt and end every request, so other users of the host cannot.
        self._nats = NatsServer(state_dir.path / "nats", user="baton", password=secrets.token_urlsafe(24))
        self._bus: Bus | None = None
        self._ending = False
        self._heard = asyncio.Event()
        self.children: list[Child] = []

    @property
    def nats_url(self) -> str:
        """With its password; it is also in the file `nats.url` of the state directory."""
        return self._nats.url

    async def __aenter__(self) -> Self:
        try:
            await self._nats.start()
            self._state_dir.write_private("nats.url", f"{self._nats.url}\n")
            self._bus = await connect(self._nats.url, "launcher")
            await self._bus.subscribe(subjects.all_heartbeats(), self._on_heartbeat)
        except (NatsServerError, BusError) as error:
            await self._end_nats()
            raise LaunchError(f"nats-server: {error}") from error
        await self._tasks.__aenter__()
        self._tasks.spawn_vital(self._watch_nats(), "nats-server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end_children()
        finally:
            try:
                await self._tasks.__aexit__(kind, error, trace)
            finally:
                await self._end_nats()

    def start(self, specs: Sequence[ProcessSpec], health_urls: Sequence[str], on_ready: Callable[[], None]) -> None:
        """Starts all at once. on_ready is called when each has said that it is ready, and each gateway at `health_urls`
        that requests can be served. Where that cannot come about, the context is left with a LaunchError."""
        for spec in specs:
            child = Child(spec, self._state_dir.log_file(spec.name), self._on_line, self._on_phase, self._restart)
            self.children.append(child)
            self._tasks.spawn_vital(child.run(), spec.name)
        self._tasks.spawn_vital(self._watch_start(health_urls, on_ready), "start")

    def kill(self) -> None:
        """Ends all processes at once; leaving the context then takes no time."""
        for child in self.children:
            child.kill()

    async def _watch_start(self, health_urls: Sequence[str], on_ready: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (self._all_ready() and all([await _is_healthy(url) for url in health_urls])):
                    self._check_none_ended()
                    self._heard.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_WATCH_S):
                            await self._heard.wait()
        except TimeoutError as error:
            late = ", ".join(child.spec.name for child in self.children if child.phase != "ready")
            raise LaunchError(f"not ready after {START_TIMEOUT_S:g} s: {late or ', '.join(health_urls)}") from error
        on_ready()

    def _all_ready(self) -> bool:
        return all(child.phase == "ready" for child in self.children)

    def _check_none_ended(self) -> None:
        """What has ended by now stays dead, and is waited for in vain."""
        if ended := [child.spec.name for child in self.children if child.phase == "ended"]:
            raise LaunchError(f"{', '.join(ended)} ended before all were ready")

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            report = decode(WorkerReport, message.data)
        except MalformedMessage:
            return  # the processes count them
        for child in self.children:
            if child.spec.name == report.id and child.spec.role == report.role:
                child.seen(report.state, report.pid)
                self._heard.set()

    async def _watch_nats(self) -> None:
        """Starts the server again, on its port, when it died; every process connects again by itself."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._nats.returncode is None or self._ending:
                continue
            status = self._nats.returncode
            if not self._restart:
                self._on_line("nats-server", f"ended with status {status}; it stays dead")
                return
            self._on_line("nats-server", f"ended with status {status}; starting it again")
            try:
                await self._nats.start()
            except NatsServerError as error:
                self._on_line("nats-server", str(error))

    async def _end_children(self) -> None:
        """In the order of who needs whom; each kind together."""
        self._ending = True
        for roles in _END_ORDER:
            group = [child.stop() for child in self.children if child.spec.role in roles]
            await asyncio.gather(*group)

    async def _end_nats(self) -> None:
        if self._bus is not None:
            await self._bus.close()
        await self._nats.stop()


class StopSignals:
    """`requested` is set by the first SIGINT, SIGTERM or SIGHUP; another one calls `on_second`."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self._on_second = on_second

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            self._on_second()
        self.requested.set()


async def _is_healthy(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)) as session,
            session.get(url) as answer,
        ):
            return answer.status == 200
    return False
