"""The gateway process: the registry of workers, the inbox of tokens, and the HTTP surface in front of the flow."""

import asyncio
import contextlib
import logging
import sys
from typing import Any

from aiohttp import web

from services.gateway.admission import RoomQueue
from services.gateway.api.guests import Guests
from services.gateway.api.limits import HttpLimits
from services.gateway.app import GatewayDeps, create_app, create_runner
from services.gateway.flow import GatewayFlow
from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.inbox import Inbox
from services.gateway.keys import Keyring
from services.gateway.line import LineSettings
from services.gateway.router import DefaultPolicy
from services.gateway.streams.desk import Streams
from services.gateway.streams.journal import Journal
from services.gateway.workers import WorkerRegistry
from shared.bus.listen import listen
from shared.engine.weights.catalog import PreparedModel, prepare
from shared.protocol import subjects
from shared.protocol.messages import Fail, Tokens
from shared.protocol.reports import WorkerReport
from shared.runtime.errors import BatonError
from shared.runtime.service import Service
from shared.runtime.settings import GatewaySettings
from shared.text.tokenizer import TextModel

log = logging.getLogger(__name__)

_GOODBYE_S = 1.0
"""What those who are shown out get for a last word."""
_CLEANUP_S = 0.5
_KEYS_EVERY_S = 2.0


class GatewayService(Service):
    role = "gateway"
    serves_http = False

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self.workers = WorkerRegistry(self.clock, self.counters, settings.worker_timeout_s)
        self.inbox = Inbox(self.counters, self.clock)
        self.rooms = RoomQueue(
            self.workers,
            DefaultPolicy(),
            self.clock,
            max_queued=settings.max_queued,
            queue_timeout_s=settings.queue_timeout_s,
            line=LineSettings(passes=settings.bypass_limit, patience_s=settings.bypass_s),
        )
        self.guests = Guests()
        self.keys = Keyring.from_settings(settings)
        self._model: PreparedModel | None = None
        self._streams: Streams | None = None
        self._runner_http: web.AppRunner | None = None

    async def start(self) -> None:
        settings = self.settings
        self._model = await asyncio.to_thread(prepare, settings.model, settings.cache_dir)
        text = await asyncio.to_thread(TextModel.load, self._model.directory)
        await listen(self.bus, "gateway", self.peer, subjects.TOKENS, Tokens, self.inbox.on_tokens, self.counters)
        await listen(self.bus, "gateway", self.peer, subjects.FAIL, Fail, self.inbox.on_fail, self.counters)
        limits = GatewayFlowSettings(
            max_recoveries=settings.max_recoveries,
            migrate_on_drain=settings.migrate_on_drain,
            block_tokens=settings.block_tokens,
            near_tokens=settings.near_tokens,
        )
        flow = GatewayFlow(self.deps(), self.workers, self.inbox, self.rooms, limits)
        await flow.start()
        journal = Journal(self.bus, self.clock, settings.orphan_grace_s, settings.request_timeout_s)
        self._streams = Streams(self.deps(), journal, flow, text, settings.orphan_grace_s, settings.max_active)
        await self._streams.start()
        await self.workers.start(self.bus)
        self.tasks.spawn_vital(self.workers.watch(self.bus, self.peer), "worker-watch")
        if self.keys is not None:
            self.tasks.spawn_vital(self._watch_keys(self.keys), "api-keys")
            log.info("%d API keys may ask", len(self.keys))
        deps = GatewayDeps(
            generator=flow,
            text=text,
            model_names=(self._model.name,),
            max_model_len=min(self._model.config.max_model_len, settings.max_model_len or sys.maxsize),
            registry=self.registry,
            health=self.unhealthy,
            cluster=self.cluster,
            limits=HttpLimits.from_settings(settings),
            guests=self.guests,
            keys=self.keys,
            streams=self._streams,
        )
        self._runner_http = create_runner(create_app(deps), shutdown_timeout_s=_CLEANUP_S)
        await self._runner_http.setup()
        try:
            await web.TCPSite(self._runner_http, settings.host, settings.port).start()
        except OSError as error:
            why = f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); set port, or 0 for a free one"
            raise BatonError(why) from error
        self.http_port = int(self._runner_http.addresses[0][1])
        log.info("serving %s on http://%s:%d", self._model.name, settings.host, self.http_port)

    async def drain(self) -> None:
        """Lets nobody in any more, and waits for the answers under way."""
        self.guests.close()
        await self.guests.gone()

    async def stop(self) -> None:
        self.guests.evict()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.guests.gone()
        if self._streams is not None:
            await self._streams.stop()
        await self.tasks.wait_spawned(_GOODBYE_S)  # the legs hear that it is over
        if self._runner_http is not None:
            await self._runner_http.cleanup()
        await self.workers.stop()

    async def _watch_keys(self, keys: Keyring) -> None:
        while True:
            await self.clock.sleep(_KEYS_EVERY_S)
            await asyncio.to_thread(keys.refresh)

    def report(self) -> WorkerReport:
        report, breakers = super().report(), self.rooms.breakers
        return report.model_copy(
            update={
                "model": self._model.name if self._model else None,
                "queues": {
                    "waiting": self.rooms.num_waiting,
                    "active": len(self.inbox),
                    "detached": 0 if self._streams is None else self._streams.num_detached,
                    "breakers_open": len(breakers.report(self.clock.now())),
                },
                "counters": report.counters | {"breakers_opened": float(breakers.num_opened)},
            }
        )

    def unhealthy(self) -> str | None:
        if self.state != "ready":
            return f"the gateway is {self.state}"
        if (trouble := self.bus_trouble()) is not None:
            return trouble
        if not self.workers.ready("decode"):
            return "no decode worker is ready"
        if self.settings.path == "remote" and not self.workers.ready("prefill"):
            return "no prefill worker is ready, and path is remote"
        return self.workers.of_another_mode(self.settings.mode)

    def cluster(self) -> dict[str, Any]:
        """The body of GET /cluster: every process's newest report, how old it is, and which of its legs this gateway
        leaves alone."""
        now = self.clock.now()
        breakers: dict[str, dict[str, str]] = {}
        for (peer, leg), health in self.rooms.breakers.report(now).items():
            breakers.setdefault(peer, {})[leg] = health.value
        return {
            "mode": self.settings.mode,
            "workers": [
                worker.report.model_dump(mode="json")
                | {"age_s": round(now - worker.seen_at, 3), "breakers": breakers.get(worker.peer, {})}
                for worker in self.workers.all()
            ],
        }
