"""The root of a process: its task group, signals, bus connection, /health and /metrics, heartbeat, and an ordered end.

A role subclasses `Service` and says what it does in `start` and `stop`; what it is, in `report`. All that a process
runs hangs on the service's `TaskOwner`: a failing request never ends the process, a failing vital part always does.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, ClassVar, Literal, TypeVar

from aiohttp import web

from shared.bus.base import Bus, BusError
from shared.protocol.reports import WorkerReport
from shared.runtime.clock import Clock, LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.ids import new_boot_id, peer_name
from shared.runtime.last_resort import exit_within
from shared.runtime.loop_watch import LoopWatch
from shared.runtime.settings import CommonSettings
from shared.runtime.tasks import TaskOwner
from shared.runtime.telemetry import new_registry, render_metrics

log = logging.getLogger(__name__)

STOP_S = 3.0
"""What `Service.stop` may take, beyond `shutdown_timeout_s`."""
BUS_AWAY_S = 2.0
_SLACK_S = 1.5

T = TypeVar("T")


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
        self._bus_seen_at = 0.0
        self._heartbeat: Heartbeat | None = None
        self._stopping = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._public = settings.public()
        self._host = socket.gethostname()

    async def start(self) -> None:
        """Brings the role up; bus and tasks are there. The process is ready when it returns, and ends if it raises."""

    async def drain(self) -> None:
        """Takes nothing on any more and waits for what is in hand. Called once the process was ready; cut off when
        `shutdown_timeout_s` is over."""

    async def stop(self) -> None:
        """Ends what is left, with a cause that its clients are told, and lets go, within STOP_S. Bus and tasks are
        still there. Called once whenever `start` was called, even if that failed half-way. What is then left in `tasks`
        is cancelled."""

    def report(self) -> WorkerReport:
        """What the process is and has; subclasses extend it by `model_copy(update=…)`. Cheap, and raises nothing."""
        if self._bus is not None:
            self.bus_trouble()  # it is called often enough to know since when there is no connection
        return WorkerReport(
            role=self.role,
            id=self.base_settings.name,
            boot_id=self.boot_id,
            pid=os.getpid(),
            host=self._host,
            http_port=self.http_port,
            state=self.state,
            counters=self.counters.as_dict() | self._bus_counters(),
            settings=self._public,
        )

    def _bus_counters(self) -> dict[str, float]:
        if self._bus is None:
            return {}
        return {f"bus_{name}": float(count) for name, count in asdict(self._bus.stats).items()}

    def unhealthy(self) -> str | None:
        """Why /health must say 503 though the process is ready; None: it is well."""
        return None

    def bus_trouble(self) -> str | None:
        """Why nobody can reach us; None also for a moment after the connection was lost: it mostly comes back, and what
        came in meanwhile waits for it."""
        if self.bus.connected:
            self._bus_seen_at = self.clock.now()
            return None
        away_s = self.clock.now() - self._bus_seen_at
        return f"nats-server has been away for {away_s:.0f} s" if away_s > BUS_AWAY_S else None

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
        """Lives until a signal or `request_stop`; raises if a vital part failed. A second signal ends it at once."""
        loop = asyncio.get_running_loop()
        longest_s = self.base_settings.shutdown_timeout_s + STOP_S + _SLACK_S
        guards: list[threading.Timer] = []

        def on_signal(number: signal.Signals) -> None:
            log.info("%s: ending in order", number.name)
            guards.append(exit_within(longest_s, 1, f"still here after {longest_s:g} s: ended without any order"))
            for each in handled:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)  # also where the loop stands still
            self.request_stop()

        handled = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in handled:
            loop.add_signal_handler(number, on_signal, number)
        watch = LoopWatch(lambda: self.counters.add("loop_stalls"))
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
            for guard in guards:
                guard.cancel()
            watch.close()

    def add_probes(self, app: web.Application) -> None:
        """/health and /metrics."""
        app.router.add_get("/health", self._on_health)
        app.router.add_get("/metrics", self._on_metrics)

    async def _live(self) -> None:
        if self.serves_http:
            await self._listen()
        if self._bus is None:
            self._bus = await self._unless_stopped(self._connect())
        if self._bus is None:
            return
        self._bus_seen_at = self.clock.now()
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
            await self._end(self._heartbeat)

    async def _end(self, heartbeat: Heartbeat) -> None:
        was_ready, timeout_s = self.state == "ready", self.base_settings.shutdown_timeout_s
        self.state = "draining"
        try:
            async with asyncio.timeout(timeout_s):
                await heartbeat.publish()
                if was_ready:
                    await self.drain()
        except TimeoutError:
            log.warning("not everything was done within %g s: what is left is ended", timeout_s)
        finally:
            try:
                async with asyncio.timeout(STOP_S):
                    await self.stop()
            except TimeoutError:
                log.warning("the parts did not end within %g s; going without them", STOP_S)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Its result; None where the end was asked for first, and then it is cancelled."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            stopping = group.create_task(self._stopping.wait())
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            stopping.cancel()
        return None if task.cancelled() else task.result()

    async def _connect(self) -> Bus:
        from shared.bus.nats import connect, options_from

        settings = self.base_settings
        options = options_from(settings)
        deadline = self.clock.now() + settings.connect_timeout_s
        while True:
            try:
                return await connect(settings.nats_url, self.peer, options)
            except (BusError, OSError) as error:
                if self.clock.now() >= deadline:
                    raise BatonError(
                        f"no nats-server answers at {self._public['nats_url']} ({error}); start one, or set nats_url"
                    ) from error
            await self.clock.sleep(0.2)

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
        if why is None:
            why = self.bus_trouble()
        body = {"status": self.state if why is None or self.state != "ready" else "unhealthy", "id": self.peer}
        return web.json_response(body | ({} if why is None else {"reason": why}), status=200 if why is None else 503)

    async def _on_metrics(self, _request: web.Request) -> web.Response:
        body, kind = render_metrics(self.registry)
        return web.Response(body=body, headers={"Content-Type": kind})
