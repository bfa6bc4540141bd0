"""What prefill and decode workers have in common: a model, an engine with its pool, a sidecar, and a front desk."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from kernels.cpu.ops import warm_up, warm_up_sampling
from shared.engine.api import Engine, StepOutput
from shared.engine.device import place
from shared.engine.engine import BatchEngine
from shared.engine.executor import ThreadExecutor
from shared.engine.models.base import Model
from shared.engine.models.registry import check_device, load_model
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings
from shared.engine.weights.catalog import prepare
from shared.engine.weights.formats import check_weights
from shared.protocol.reports import Pages, WorkerReport
from shared.runtime.cores import host_cores
from shared.runtime.deps import Deps
from shared.runtime.service import Service
from shared.runtime.settings import SidecarSettings, WorkerSettings, load_settings
from shared.store.client import StoreClientSettings
from shared.store.roster import Roster
from shared.transfer.link import Link
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions
from shared.worker.desk import WorkerDesk
from shared.worker.gateway_watch import GatewayWatch
from shared.worker.link_metrics import LinkCollector
from shared.worker.stores import Stores

log = logging.getLogger(__name__)

_GATEWAY_TIMEOUT_S = 3.0
_STUCK_S = 30.0
_SILENT_S = 4.0
_LAST_WORDS_S = 1.0
"""What ended tickets get to tell their peers and to let go."""


class WorkerService(Service):
    """Brings the parts up in order and down in reverse. A role says what its desk is, and who hears the engine."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self.model_name: str | None = None
        self.engine: BatchEngine | None = None
        self.link: SidecarLink | None = None
        self.desk: WorkerDesk[Any] | None = None
        self._pool: StatePool | None = None
        self._roster: Roster | None = None

    def make_desk(self, deps: Deps, engine: Engine, link: Link, stores: Stores | None) -> WorkerDesk[Any]:
        raise NotImplementedError

    def on_step(self, output: StepOutput) -> None:
        """Tokens of groups that decode here."""

    async def start(self) -> None:
        settings = self.settings
        load_settings(SidecarSettings)  # a mistake in them is better told now than by a sidecar that does not come up
        threads = settings.threads or host_cores()
        executor = ThreadExecutor(threads)
        model = await asyncio.wrap_future(executor.submit(self._load))  # not waited for by who is told to end meanwhile
        engine_settings = EngineSettings(
            page_tokens=settings.page_tokens,
            num_pages=settings.num_pages,
            kv_bytes=None if settings.num_pages is not None else int(settings.kv_bytes),
            max_running=settings.max_running,
            prefill_chunk=settings.prefill_chunk,
            max_step_tokens=settings.max_step_tokens,
            mode=settings.mode,
            step_tokens=settings.step_tokens,
            growth_tokens=settings.growth_tokens,
            max_model_len=settings.max_model_len,
            stash_bytes=int(settings.stash_bytes),
            block_tokens=settings.block_tokens if settings.prefix_cache else None,
        )
        loaded = model
        place_it = lambda: place(loaded, engine_settings, settings.device, graphs=settings.cuda_graphs)  # noqa: E731
        model, pool = await asyncio.wrap_future(executor.submit(place_it))
        self._pool = pool
        self.engine = BatchEngine(model, pool, engine_settings, executor, self.on_step, self.clock)
        chosen = settings.model_fields_set  # a sidecar has settings of its own: what nobody set here is left to them
        options = SidecarOptions(
            name=f"{settings.name}-sidecar",
            transfer=settings.transfer if "transfer" in chosen else None,
            ipc_dir=settings.ipc_dir or settings.state_dir / "ipc",
            tcp_host=settings.tcp_host if "tcp_host" in chosen else None,
            tcp_port=settings.tcp_port if "tcp_port" in chosen else None,
            nixl_port=settings.nixl_port if "nixl_port" in chosen else None,
            listen_host=settings.listen_host if "listen_host" in chosen else None,
            nats=settings.nats_variables("sidecar"),
            arguments=("--log-level", settings.log_level, "--log-format", settings.log_format),
        )
        link = self.link = await SidecarLink.start(options, pool.fd, pool.layout, self._on_sidecar_restart)
        self.registry.register(LinkCollector(lambda: link.traffic))
        self.tasks.spawn_vital(self.link.run(), "sidecar-link")
        self.tasks.spawn_vital(self.engine.run(), "engine")
        deps = self.deps()
        self.desk = self.make_desk(deps, self.engine, self.link, await self._find_stores(deps, self.engine, self.link))
        watch = GatewayWatch(
            self.bus, self.clock, self.desk.gateways, self.desk.end_all_of, _GATEWAY_TIMEOUT_S, self.counters
        )
        self.tasks.spawn_vital(watch.run(), "gateway-watch")
        await self.desk.start()
        pages = pool.layout.num_pages
        log.info(
            "%s: mode %s, %d pages of %d tokens, %d compute threads",
            self.model_name,
            settings.mode,
            pages,
            settings.page_tokens,
            threads,
        )

    async def _find_stores(self, deps: Deps, engine: Engine, link: Link) -> Stores | None:
        settings = self.settings
        if not settings.store:
            return None
        client = StoreClientSettings(block_tokens=settings.block_tokens, copies=settings.store_copies)
        roster = self._roster = Roster(deps)
        # On a GPU only what a prefill worker computes is copied to where its sidecar reads.
        writes = settings.device == "cpu" or self.role == "prefill"
        stores = Stores.find(deps, engine, link, roster, client, writes=writes)
        if stores is not None:
            await roster.start()
        return stores

    async def drain(self) -> None:
        """Tickets come to their end: P's when D has taken over or refused, D's with their last token."""
        if self.desk is not None:
            self.desk.draining = True
            self.changed()
            while len(self.desk):
                await self.clock.sleep(0.02)

    async def stop(self) -> None:
        try:
            if self.desk is not None:
                self.desk.draining = True
                for ticket in self.desk.tickets:
                    ticket.end("peer_lost", f"the {self.role} worker is shutting down", by=self.role)
                await self.tasks.wait_spawned(_LAST_WORDS_S)
                await self.desk.stop()
            if self._roster is not None:
                await self._roster.stop()
        finally:
            try:
                if self.link is not None:
                    await self.link.close()
            finally:
                if self.engine is not None:
                    await self.engine.close()

    def report(self) -> WorkerReport:
        report = super().report()
        if self.engine is None or self.desk is None or self.link is None:
            return report.model_copy(update={"model": self.model_name})
        state = report.state if self.unhealthy() is None or report.state != "ready" else "starting"
        stats = self.engine.stats
        counters = {
            "steps": float(stats.steps),
            "prompt_tokens_computed": float(stats.prompt_tokens_computed),
            "prompt_tokens_held": float(stats.prompt_tokens_held),
            "tokens_generated": float(stats.tokens_generated),
            "preemptions": float(stats.preemptions),
            "preemptions_stashed": float(stats.preemptions_stashed),
            "preemptions_recomputed": float(stats.preemptions_recomputed),
            "tokens_dropped": float(stats.tokens_dropped),
            "busy_seconds": stats.busy_s,
        }
        in_tickets = len(self.desk)
        return report.model_copy(
            update={
                "state": state,
                "model": self.model_name,
                "identity": self.engine.identity,
                "geometry": self.engine.geometry,
                "link": self.link.address,
                "max_model_len": self.engine.max_model_len,
                "pages": _pages(self.engine.pages(), self.engine.left()[0]),
                "slots": _pages(self.engine.slots(), self.engine.left()[1]),
                "block_tokens": self.engine.block_tokens,
                "stashed_bytes": self.engine.stashed_bytes,
                "queues": self.engine.queues() | {"tickets": in_tickets},
                "tickets": self.desk.tickets.states(),
                "counters": report.counters | counters,
            }
        )

    def unhealthy(self) -> str | None:
        if self.link is not None and self.link.pid is None:
            return "the sidecar is down"
        if self.link is not None and self.link.silent_s > _SILENT_S:
            return f"the sidecar has not answered for {self.link.silent_s:.0f} s"
        if self.engine is not None and self.engine.last_progress_age_s > _STUCK_S:
            return f"no step has finished for {self.engine.last_progress_age_s:.0f} s though work is waiting"
        return None

    def _load(self) -> Model:
        check_device(self.settings.device)
        check_weights(self.settings.device, self.settings.dtype, self.settings.weights)
        if self.settings.model == "toy":
            self.model_name = "toy"
            return load_model(Path("toy"), self.settings.device)
        if self.settings.device == "cpu":
            log.info("preparing the kernels (compiled once on a machine, in about half a minute)")
            warm_up(self.settings.kv_dtype)
        else:
            warm_up_sampling()
        settings = self.settings
        prepared = prepare(settings.model, settings.cache_dir)
        self.model_name = prepared.name
        return load_model(prepared.directory, settings.device, settings.dtype, settings.weights, settings.kv_dtype)

    def _on_sidecar_restart(self) -> None:
        self.counters.add("sidecar_restarts")
        if self.desk is not None:
            self.desk.end_unstarted("the sidecar restarted")
        self.changed()


def _pages(counts: tuple[int, int, int], left: int) -> Pages:
    total, free, quarantined = counts
    yieldable = max(0, left - free)
    return Pages(
        total=total,
        free=free,
        quarantined=quarantined,
        in_tickets=total - free - quarantined,
        yieldable=yieldable,
    )
