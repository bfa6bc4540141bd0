"""The simulated processes: the real flows, desks, machines, engine and door, on the in-memory bus and the fake link,
with the toy model computed on the loop. Everything but the wires is what runs in production."""

import asyncio
from typing import TYPE_CHECKING

from services.decode.desk import DecodeDesk
from services.gateway.admission import RoomQueue
from services.gateway.flow import GatewayFlow
from services.gateway.inbox import Inbox
from services.gateway.router import DefaultPolicy
from services.gateway.workers import WorkerRegistry
from services.prefill.desk import PrefillDesk
from shared.bus.listen import listen
from shared.bus.memory import MemoryBus
from shared.engine.api import StepOutput
from shared.engine.engine import BatchEngine
from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.settings import plan_layout
from shared.protocol import subjects
from shared.protocol.messages import Fail, Tokens
from shared.protocol.reports import Pages, WorkerReport
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.ids import new_boot_id, peer_name
from shared.runtime.tasks import TaskOwner
from shared.transfer.fake import FakeLink
from shared.worker.gateway_watch import GatewayWatch

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

WORKER_TIMEOUT_S = 2.0
GATEWAY_TIMEOUT_S = 3.0


class Process:
    """What every simulated process has: a connection, tasks, a heartbeat. `kill` is kill -9."""

    role: str

    def __init__(self, cluster: "Cluster", role: str, name: str) -> None:
        self.cluster, self.role, self.name = cluster, role, name
        self.boot_id = new_boot_id()
        self.peer = peer_name(name, self.boot_id)
        self.clock = LoopClock()
        self.counters = Counters()
        self.bus: MemoryBus = cluster.hub.client(name)
        self.tasks = TaskOwner(lambda task: cluster.task_failures.append(f"{name}/{task}"))
        self.heart = Heartbeat(self.bus, self.clock, self.report, 0.5)
        self.deps = Deps(
            self.peer,
            self.bus,
            self.clock,
            self.tasks.spawn,
            self.tasks.spawn_vital,
            self.heart.changed,
            self.counters,
        )
        self.alive = False
        self.idle_tasks = 0
        """How many tasks it has when it has nothing to do."""
        self._ready, self._killed = asyncio.Event(), asyncio.Event()

    async def boot(self) -> None:
        """Returns when it serves."""
        self._life = asyncio.get_running_loop().create_task(self._live())
        await self._ready.wait()
        if not self.idle_tasks:
            raise RuntimeError(f"{self.name} did not start: {self.cluster.task_failures}")

    async def start(self) -> None: ...

    async def clean_up(self) -> None:
        """What the operating system does after its end."""

    def kill_now(self) -> None:
        """Nothing is said to anybody, and from now on nothing reaches anybody or is reached."""
        self.alive = False
        self.bus.sever()
        self._killed.set()

    async def kill(self) -> None:
        self.kill_now()
        await self._life

    async def _live(self) -> None:
        try:
            async with self.tasks:
                await self.start()
                self.alive = True
                self.tasks.spawn_vital(self.heart.run(), "heartbeat")
                self.idle_tasks = self.tasks.num_tasks
                self._ready.set()
                await self._killed.wait()
        except Exception as error:
            if not self._killed.is_set():  # what still fails after kill -9 nobody sees
                self.cluster.task_failures.append(f"{self.name}: {error!r}")
        finally:
            self._ready.set()
            self.kill_now()
            await self.bus.close()
            await self.clean_up()

    def report(self) -> WorkerReport:
        state = "ready" if self.alive else "starting"
        return WorkerReport(role=self.role, id=self.name, boot_id=self.boot_id, pid=1, host="sim", state=state)


class Worker(Process):
    """A prefill or decode worker."""

    desk: PrefillDesk | DecodeDesk
    is_leaving = False

    async def start(self) -> None:
        settings = self.cluster.engine_settings(self.role)
        model = Toy(by_position=self.cluster.reuse)
        self.pool = StatePool(plan_layout(model, settings))
        executor = InlineExecutor(self.cluster.step_s)
        self.engine = BatchEngine(model, self.pool, settings, executor, self._on_step, self.clock)
        self.link = FakeLink(self.cluster.network, self.pool.layout, self.pool.buffer, self._on_sidecar_restart)
        if self.role == "prefill":
            self.desk = PrefillDesk(self.deps, self.engine, self.link, self.cluster.prefill_flow)
        else:
            self.desk = DecodeDesk(self.deps, self.engine, self.link)
        self.cluster.on_built(self)
        self.tasks.spawn_vital(self.engine.run(), "engine")
        watch = GatewayWatch(self.bus, self.clock, self.desk.gateways, self.desk.end_all_of, GATEWAY_TIMEOUT_S)
        self.tasks.spawn_vital(watch.run(), "gateway-watch")
        await self.desk.start()

    def kill_now(self) -> None:
        super().kill_now()
        self.link.die()

    async def clean_up(self) -> None:
        await self.link.close()
        self.pool.close()

    def drain(self) -> None:
        """It is told to end: nobody is let in any more, and all hear of it."""
        self.is_leaving = self.desk.draining = True
        self.heart.changed()

    def _on_step(self, output: StepOutput) -> None:
        if isinstance(self.desk, DecodeDesk):
            self.desk.outbox.on_step(output)
        else:
            self.desk.on_step(output)

    def _on_sidecar_restart(self) -> None:
        self.desk.end_unstarted("the sidecar restarted")

    def report(self) -> WorkerReport:
        total, free, quarantined = self.engine.pages()
        slots, left = self.engine.slots(), self.engine.left()
        settings = self.cluster.engine_settings(self.role)
        parts = {
            "state": "draining" if self.is_leaving else super().report().state,
            "identity": self.engine.identity,
            "geometry": self.engine.geometry,
            "pages": Pages(total=total, free=free, quarantined=quarantined, yieldable=max(0, left[0] - free)),
            "slots": Pages(total=slots[0], free=slots[1], quarantined=slots[2], yieldable=max(0, left[1] - slots[1])),
            "queues": self.engine.queues(),
            "tickets": self.desk.tickets.states(),
            "block_tokens": self.engine.block_tokens,
            "settings": {"growth_tokens": settings.growth_tokens},
        }
        return super().report().model_copy(update=parts)

    @property
    def is_empty(self) -> bool:
        pages, slots = self.engine.pages(), self.engine.slots()
        is_free = pages[0] == pages[1] and slots[0] == slots[1] and not self.engine.stashed_bytes
        return is_free and len(self.desk) == 0


class Gateway(Process):
    async def start(self) -> None:
        self.registry = WorkerRegistry(self.clock, self.counters, WORKER_TIMEOUT_S)
        self.inbox = Inbox(self.counters, self.clock)
        self.rooms = RoomQueue(self.registry, DefaultPolicy(), self.clock, max_queued=64, queue_timeout_s=30.0)
        self.flow = GatewayFlow(self.deps, self.registry, self.inbox, self.rooms, self.cluster.gateway_flow)
        self.cluster.on_built(self)
        await listen(self.bus, "gateway", self.peer, subjects.TOKENS, Tokens, self.inbox.on_tokens, self.counters)
        await listen(self.bus, "gateway", self.peer, subjects.FAIL, Fail, self.inbox.on_fail, self.counters)
        await self.flow.start()
        await self.registry.start(self.bus)
        self.tasks.spawn_vital(self.registry.watch(self.bus, self.peer), "worker-watch")

    @property
    def is_empty(self) -> bool:
        return not len(self.inbox)
