"""The root of a process: its task group, signals, bus connection, /health and /metrics, heartbeat, and an ordered end.

A role subclasses `Service` and says what it does in `start` and `stop`; what it is, in `report`. All that a process
runs hangs on the service's `TaskOwner`: a failing request never ends the process, a failing vital part always does.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeVar

from aiohttp import web

from shared.bus.base import Bus, BusError
from shared.protocol.messages import WorkerReport
from shared.runtime.clock import Clock, LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.ids import new_boot_id, peer_name
from shared.runtime.settings import CommonSettings, ConfigError, load_settings, parse_flags, unknown_variables
from shared.runtime.tasks import TaskOwner
from shared.runtime.telemetry import new_registry, render_metrics, setup_logging

log = logging.getLogger(__name__)

EXIT_CONFIG = 78
"""Exit status of a process whose settings are wrong: starting it again cannot help."""
WORKER_SWITCH_INTERVAL_S = 0.0002


class Service:
    """One process. Subclasses override start, stop, report and unhealthy.

    settings: already loaded. bus: a connected bus to use in place of NATS (it is closed at the end all the same).
    """

    role: ClassVar[Literal["gateway", "prefill", "decode", "sidecar", "kvstore"]]
    serves_http: ClassVar[bool] = True
    """False: the role has an HTTP server of its own, which calls `add_probes`, and sets `http_port`."""

    def __init__(self, settings: CommonSettings, *, bus: Bus | None = None, clock: Clock | None = None) -> None:
        self.base_settings = settings
        self.boot_id = new_boot_id()
        self.peer = peer_name(settings.name, self.boot_id)
        self.clock: Clock = clock or LoopClock()
        self.state: Literal["starting", "ready", "draining"] = "starting"
        self.http_port = 0
        self.registry = new_registry(self.report)
        self.counters = Counters()
        self.tasks = TaskOwner(lambda _name: self.counters.add("task_failures"))
        self._bus = bus
        self._heartbeat: Heartbeat | None = None
        self._stopping = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._public = settings.public()
        self._host = socket.gethostname()

    async def start(self) -> None:
        """Brings the role up; bus and tasks are there. The process is ready when it returns, and ends if it raises."""

    async def stop(self) -> None:
        """Ends the role in order: admit nothing, drain, let go. Bus and tasks are still there. Called once whenever
        `start` was called, even if that failed half-way. What is left in `tasks` is cancelled afterwards."""

    def report(self) -> WorkerReport:
        """What the process is and has; subclasses extend it by `model_copy(update=…)`. Cheap, and raises nothing."""
        return WorkerReport(
            role=self.role,
            id=self.base_settings.name,
            boot_id=self.boot_id,
            pid=os.getpid(),
            host=self._host,
            http_port=self.http_port,
            state=self.state,
            counters=self.counters.as_dict(),
            settings=self._public,
        )

    def unhealthy(self) -> str | None:
        """Why /health must say 503 though the process is ready; None: it is well."""
        return None

    @property
    def bus(self) -> Bus:
        """Connected from before `start` until after `stop`."""
        if self._bus is None:
            raise RuntimeError("the bus is not connected yet")
        return self._bus

    def deps(self) -> Deps:
        """What the flows of this process are given; valid from `start` on."""
        tasks = self.tasks
        return Deps(self.peer, self.bus, self.clock, tasks.spawn, tasks.spawn_vital, self.changed, self.counters)

    def changed(self) -> None:
        """Something in the report changed and should be known soon (within 50 ms)."""
        if self._heartbeat is not None:
            self._heartbeat.changed()

    def request_stop(self) -> None:
        """Begins the ordered end; idempotent."""
        self._stopping.set()
        if self._starting is not None and self.state == "starting":
            self._starting.cancel()

    async def run(self, *, signals: bool = True) -> None:
        """Lives until a signal or `request_stop`; raises if a vital part failed."""
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            log.info("%s: ending in order", number.name)
            loop.remove_signal_handler(number)
            self.request_stop()

        handled = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in handled:
            loop.add_signal_handler(number, on_signal, number)
        try:
            async with self.tasks:
                await self._live()
        finally:
            if self._bus is not None:
                await self._bus.close()
            if self._runner is not None:
                await self._runner.cleanup()
            for number in handled:
                loop.remove_signal_handler(number)

    def add_probes(self, app: web.Application) -> None:
        """/health and /metrics."""
        app.router.add_get("/health", self._on_health)
        app.router.add_get("/metrics", self._on_metrics)

    async def _live(self) -> None:
        if self.serves_http:
            await self._listen()
        if self._bus is None:
            self._bus = await self._connect()
        if self._bus is None:
            return
        self._heartbeat = Heartbeat(self._bus, self.clock, self.report, self.base_settings.heartbeat_s)
        self.tasks.spawn_vital(self._heartbeat.run(), "heartbeat")
        try:
            self._starting = self.tasks.spawn_vital(self.start(), "start")
            if self._stopping.is_set():
                self._starting.cancel()
            await asyncio.wait({self._starting})
            if self._starting.cancelled() or self._starting.exception() is not None:
                return
            self.state = "ready"
            self.changed()
            log.info("ready")
            await self._stopping.wait()
        finally:
            await self._drain(self._heartbeat)

    async def _drain(self, heartbeat: Heartbeat) -> None:
        self.state = "draining"
        try:
            async with asyncio.timeout(self.base_settings.shutdown_timeout_s):
                await heartbeat.publish()
                await self.stop()
        except TimeoutError:
            log.warning("the ordered end took longer than %.1f s; ending anyway", self.base_settings.shutdown_timeout_s)

    async def _connect(self) -> Bus | None:
        """The NATS bus; None if the end was asked for meanwhile."""
        from shared.bus.nats import connect

        settings = self.base_settings
        deadline = self.clock.now() + settings.connect_timeout_s
        while not self._stopping.is_set():
            try:
                return await connect(settings.nats_url, self.peer)
            except (BusError, OSError) as error:
                if self.clock.now() >= deadline:
                    raise BatonError(
                        f"no nats-server answers at {self._public['nats_url']} ({error}); start one, or set nats_url"
                    ) from error
            await self.clock.sleep(0.2)
        return None

    async def _listen(self) -> None:
        app = web.Application()
        self.add_probes(app)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        host, port = self.base_settings.http_host, self.base_settings.http_port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            why = f"cannot listen on {host}:{port} ({error.strerror}); set http_port, or 0 for a free one"
            raise BatonError(why) from error
        self.http_port = int(self._runner.addresses[0][1])

    async def _on_health(self, _request: web.Request) -> web.Response:
        why = self.unhealthy() if self.state == "ready" else f"the process is {self.state}"
        if why is None and not self.bus.connected:
            why = "nats-server is not connected"
        body = {"status": self.state if why is None or self.state != "ready" else "unhealthy", "id": self.peer}
        return web.json_response(body | ({} if why is None else {"reason": why}), status=200 if why is None else 503)

    async def _on_metrics(self, _request: web.Request) -> web.Response:
        body, kind = render_metrics(self.registry)
        return web.Response(body=body, headers={"Content-Type": kind})


C = TypeVar("C", bound=CommonSettings)


def main(settings_class: type[C], build: Callable[[C], Service], argv: Sequence[str] | None = None) -> None:
    """The whole of a `__main__.py`: settings from flags and environment, logging, the service, and the exit status:
    0 after an ordered end, 78 for wrong settings, 1 for a failure."""
    try:
        settings = load_settings(settings_class, parse_flags(settings_class, sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    if settings_class.role in ("prefill", "decode"):
        sys.setswitchinterval(WORKER_SWITCH_INTERVAL_S)
    sys.exit(asyncio.run(_run_to_status(build, settings)))


async def _run_to_status(build: Callable[[C], Service], settings: C) -> int:
    setup_logging(settings.name, settings.log_level, settings.log_format)
    try:
        service = build(settings)
        setup_logging(service.peer, settings.log_level, settings.log_format)
        for line in unknown_variables():
            log.warning("%s", line)
        log.debug("settings: %s", " ".join(f"{key}={value}" for key, value in settings.public().items()))
        await service.run()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except Exception as error:
        for leaf in _leaves(error):
            log.critical("%s", leaf, exc_info=None if isinstance(leaf, BatonError | ConfigError) else leaf)
        return EXIT_CONFIG if any(isinstance(leaf, ConfigError) for leaf in _leaves(error)) else 1
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
