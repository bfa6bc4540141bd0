"""The store of blocks: what workers have put is found by others, also after they are gone."""

import asyncio
import logging

from services.kvstore.beneath import Beneath
from services.kvstore.desk import StoreDesk
from services.kvstore.index import Index, Limits
from services.kvstore.namespace import MemorySettings, Namespace
from services.kvstore.namespaces import Namespaces
from services.kvstore.put_flow import StoreFlow
from shared.bus.base import Bus
from shared.machines.block import BlockState
from shared.protocol.reports import Pages, WorkerReport
from shared.runtime.service import Service
from shared.runtime.settings import ConfigError, KvstoreSettings, SidecarSettings, load_settings
from shared.store.driver import BlockDriver
from shared.store.open import make_driver
from shared.store.options import DriverOptions
from shared.transfer.link import TicketKey
from shared.transfer.sidecar_options import SidecarOptions

log = logging.getLogger(__name__)

_SWEEP_S = 0.25
_LAST_WORDS_S = 1.0
_IN_MEMORY = "blocks live in this process's memory only: they do not survive its end"


class KvstoreService(Service):
    """driver: beneath the memory, in place of the one that the settings name."""

    role = "kvstore"

    def __init__(self, settings: KvstoreSettings, *, bus: Bus | None = None, driver: BlockDriver | None = None) -> None:
        super().__init__(settings, bus=bus)
        self.settings = settings
        self.index = Index(self.counters, Limits(int(settings.tenant_bytes), settings.ttl_s), self._delete)
        self.namespaces: Namespaces | None = None
        self.desk: StoreDesk | None = None
        self.beneath: Beneath | None = None
        self._driver = driver

    async def start(self) -> None:
        load_settings(SidecarSettings)  # a mistake in them is better told now than by a sidecar that does not come up
        deps = self.deps()
        memory = MemorySettings(self.settings.memory_mib << 20, self._sidecar_options())
        self.namespaces = Namespaces(deps, self.index, memory, self._on_sidecar_lost)
        self._driver = self._driver or self._make_driver()
        if self._driver is not None:
            self.beneath = Beneath(deps, self._driver, self.index, self.namespaces.find)
            await self.beneath.open()
            log.info("%s: %d blocks are there", self._driver.name, len(self.index.entries))
        self.desk = StoreDesk(StoreFlow(deps, self.index, self.beneath), self.namespaces)
        self.tasks.spawn_vital(self._sweep(), "sweep")
        await self.desk.start()

    async def drain(self) -> None:
        """What is under way comes to its end, and what waits to be written is written."""
        if self.desk is not None:
            self.desk.draining = True
            self.changed()
            while len(self.desk) or (self.beneath is not None and self.beneath.num_waiting):
                await self.clock.sleep(0.02)

    async def stop(self) -> None:
        try:
            if self.desk is not None:
                self.desk.draining = True
                self.desk.end_all()
                await self.tasks.wait_spawned(_LAST_WORDS_S)
                await self.desk.stop()
        finally:
            try:
                if self.namespaces is not None:
                    await self.namespaces.close()
            finally:
                if self.beneath is not None:
                    await self.beneath.close()

    def report(self) -> WorkerReport:
        report = super().report()
        if self.desk is None or self.namespaces is None:
            return report
        queues = {"puts": len(self.desk.puts), "loads": len(self.desk.loads), "leases": len(self.index.leases)}
        states = self.index.states()
        counters = {
            "blocks_known": float(len(self.index.entries)),
            "blocks_beneath": float(self.index.entries.num_beneath),
            "bytes_known": float(self.index.entries.bytes_of.total()),
        }
        if self.beneath is not None:
            used, _ = self.beneath.driver.usage()
            queues["writes"] = self.beneath.num_waiting
            counters["bytes_beneath"] = float(used)
        first: Namespace | None = next(iter(self.namespaces), None)
        return report.model_copy(
            update={
                "link": None if first is None or first.link.pid is None else first.link.address,
                "pages": self._pages(states) if first is not None else None,
                "queues": queues,
                "tickets": states,
                "counters": report.counters | counters,
                "durability": _IN_MEMORY if self._driver is None else self._driver.durability,
            }
        )

    def unhealthy(self) -> str | None:
        down = [one for one in self.namespaces or () if one.link.pid is None]
        return "a sidecar is down" if down else None

    def _pages(self, states: dict[str, int]) -> Pages:
        total = sum(tier.num_units for tier in self.index.tiers.values())
        free = sum(tier.units.free for tier in self.index.tiers.values())
        quarantined = sum(states.get(state.value, 0) for state in (BlockState.EVICTING, BlockState.QUARANTINED))
        return Pages(
            total=total,
            free=free,
            quarantined=quarantined,
            in_tickets=total - free - quarantined,
            yieldable=sum(tier.num_idle for tier in self.index.tiers.values()),
        )

    def _make_driver(self) -> BlockDriver | None:
        settings = self.settings
        if settings.driver is None:
            return None
        where = settings.driver_where or (str(settings.state_dir / "blocks") if settings.driver == "disk" else "")
        limit = None if settings.driver_bytes is None else int(settings.driver_bytes)
        try:
            return make_driver(settings.driver, DriverOptions(where, limit, settings.driver_fsync))
        except (ValueError, ModuleNotFoundError) as error:
            raise ConfigError(f"kvstore: driver: {error}") from error

    def _sidecar_options(self) -> SidecarOptions:
        settings, chosen = self.settings, self.settings.model_fields_set
        return SidecarOptions(
            name=f"{settings.name[:32]}-sidecar",
            transfer=settings.transfer if "transfer" in chosen else None,
            ipc_dir=settings.ipc_dir or settings.state_dir / "ipc",
            tcp_host=settings.tcp_host if "tcp_host" in chosen else None,
            tcp_port=settings.tcp_port if "tcp_port" in chosen else None,
            nixl_port=settings.nixl_port if "nixl_port" in chosen else None,
            listen_host=settings.listen_host if "listen_host" in chosen else None,
            nats=settings.nats_variables("sidecar"),
            arguments=("--log-level", settings.log_level, "--log-format", settings.log_format),
        )

    def _delete(self, key: bytes) -> None:
        if self.beneath is not None:
            self.beneath.delete_soon(key)

    def _on_sidecar_lost(self, keys: tuple[TicketKey, ...]) -> None:
        self.counters.add("sidecar_restarts")
        if self.desk is not None:
            self.desk.end_lost(keys)
        self.changed()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.index.sweep(self.clock.now())
