"""A whole cluster in one process: the real flows, desks, machines, engine and door, on the in-memory bus and the fake
link, with the toy model computed on the loop. Everything but the wires is what runs in production."""

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.decode.desk import DecodeDesk
from services.gateway.admission import RoomQueue
from services.gateway.flow import GatewayFlow, GatewayFlowSettings
from services.gateway.generation import GenerationRequest, PathPolicy
from services.gateway.inbox import Inbox
from services.gateway.router import DefaultPolicy
from services.gateway.workers import WorkerRegistry
from services.prefill.desk import PrefillDesk
from shared.bus.listen import listen
from shared.bus.memory import Envelope, MemoryBus, MemoryHub
from shared.engine.api import StepOutput
from shared.engine.engine import BatchEngine
from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings, plan_layout
from shared.protocol import subjects
from shared.protocol.messages import Fail, Pages, SamplingSpec, Tokens, WorkerReport
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.ids import new_boot_id, peer_name
from shared.runtime.tasks import TaskOwner
from shared.transfer.fake import FakeLink, FakeNetwork
from shared.worker.gateway_watch import GatewayWatch

T = TypeVar("T")
STEP_S = 0.01


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

    async def boot(self) -> None:
        await self.tasks.__aenter__()
        await self.start()
        self.alive = True
        self.tasks.spawn_vital(self.heart.run(), "heartbeat")

    async def start(self) -> None: ...

    async def kill(self) -> None:
        """Nothing is said to anybody; what it would still do to the bus is lost."""
        self.alive = False
        await self.bus.close()
        await self.tasks.__aexit__(None, None, None)

    def report(self) -> WorkerReport:
        state = "ready" if self.alive else "starting"
        return WorkerReport(
            role=self.role, id=self.name, boot_id=self.boot_id, pid=os.getpid(), host="sim", state=state
        )  # type: ignore[arg-type]


class Worker(Process):
    """A prefill or decode worker."""

    async def start(self) -> None:
        settings = self.cluster.engine_settings(self.role)
        model = Toy()
        self.pool = StatePool(plan_layout(model, settings))
        self.engine = BatchEngine(model, self.pool, settings, InlineExecutor(STEP_S), self._on_step, self.clock)
        self.link = FakeLink(self.cluster.network, self.pool.layout, self.pool.buffer, self._on_sidecar_restart)
        self.desk: PrefillDesk | DecodeDesk
        if self.role == "prefill":
            self.desk = PrefillDesk(self.deps, self.engine, self.link)
        else:
            self.desk = DecodeDesk(self.deps, self.engine, self.link)
        self.tasks.spawn_vital(self.engine.run(), "engine")
        watch = GatewayWatch(self.bus, self.clock, self.desk.gateways, self.desk.end_all_of, 3.0)
        self.tasks.spawn_vital(watch.run(), "gateway-watch")
        await self.desk.start()

    async def kill(self) -> None:
        await self.link.close()
        await super().kill()

    def _on_step(self, output: StepOutput) -> None:
        if isinstance(self.desk, DecodeDesk):
            self.desk.outbox.on_step(output)

    def _on_sidecar_restart(self) -> None:
        self.desk.end_unstarted("the sidecar restarted")

    def report(self) -> WorkerReport:
        total, free, quarantined = self.engine.pages()
        slots = self.engine.slots()
        return (
            super()
            .report()
            .model_copy(
                update={
                    "identity": self.engine.identity,
                    "geometry": self.engine.geometry,
                    "pages": Pages(total=total, free=free, quarantined=quarantined),
                    "slots": Pages(total=slots[0], free=slots[1], quarantined=slots[2]),
                    "tickets": self.desk.tickets.states(),
                }
            )
        )

    @property
    def is_empty(self) -> bool:
        pages, slots = self.engine.pages(), self.engine.slots()
        return pages[0] == pages[1] and slots[0] == slots[1] and len(self.desk) == 0


class Gateway(Process):
    async def start(self) -> None:
        self.registry = WorkerRegistry(self.clock, self.counters, 2.0)
        self.inbox = Inbox(self.counters)
        self.rooms = RoomQueue(self.registry, DefaultPolicy(), self.clock, max_queued=64, queue_timeout_s=30.0)
        self.flow = GatewayFlow(self.deps, self.registry, self.inbox, self.rooms, GatewayFlowSettings())
        await listen(self.bus, "gateway", self.peer, subjects.TOKENS, Tokens, self.inbox.on_tokens, self.counters)
        await listen(self.bus, "gateway", self.peer, subjects.FAIL, Fail, self.inbox.on_fail, self.counters)
        await self.registry.start(self.bus)
        self.tasks.spawn_vital(self.registry.watch(self.bus, self.peer), "worker-watch")


@dataclass
class Answer:
    """What a client saw: tokens by choice, how it ended, and the path."""

    tokens: list[list[int]]
    finishes: list[str | None]
    path: str = "pending"
    timings: dict[str, Any] = field(default_factory=dict)
    error: BatonError | None = None


class Cluster:
    """Use as `async with Cluster(...)`: boots everything, and ends it."""

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        page_tokens: int = 4,
        num_pages: int = 64,
        prefill_chunk: int = 8,
        max_running: int = 16,
        growth_tokens: int = 8,
        policy: Callable[[Envelope], Iterable[float]] | None = None,
    ) -> None:
        self.hub = MemoryHub() if policy is None else MemoryHub(lambda envelope: tuple(policy(envelope)))
        self.network = FakeNetwork()
        self.task_failures: list[str] = []
        self._shape = EngineSettings(
            page_tokens=page_tokens,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
            max_step_tokens=4 * prefill_chunk,
            max_running=max_running,
            growth_tokens=growth_tokens,
        )
        self.gateway = Gateway(self, "gateway", "gateway-0")
        self.prefills = [Worker(self, "prefill", f"prefill-{i}") for i in range(prefills)]
        self.decodes = [Worker(self, "decode", f"decode-{i}") for i in range(decodes)]

    def engine_settings(self, role: str) -> EngineSettings:
        return self._shape

    @property
    def processes(self) -> list[Process]:
        return [*self.prefills, *self.decodes, self.gateway]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    async def __aenter__(self) -> "Cluster":
        for process in self.processes:
            await process.boot()
        async with asyncio.timeout(5):
            while len(self.gateway.registry.all()) < len(self.processes):
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process in self.processes:
            if process.alive:
                await process.kill()
        for worker in self.workers:
            worker.pool.close()

    async def ask(
        self,
        prompt: Iterable[int],
        *,
        path: PathPolicy = "auto",
        strict: bool = False,
        timeout_s: float = 60.0,
        stop_after: dict[int, int] | None = None,
        leave_after: int | None = None,
        **sampling: Any,
    ) -> Answer:
        """A client. stop_after: choice -> tokens after which the text side stops it. leave_after: batches after
        which the client goes away."""
        spec = SamplingSpec(**({"temperature": 0.0, "max_tokens": 8} | sampling))
        request = GenerationRequest("req-sim", tuple(prompt), spec, path, strict, timeout_s)
        generation = self.gateway.flow.generate(request)
        answer = Answer([[] for _ in range(spec.n)], [None] * spec.n)
        batches = 0
        try:
            async for batch in generation:
                batches += 1
                for event in batch:
                    assert event.index == len(answer.tokens[event.choice]), "each index once, in order"
                    assert answer.finishes[event.choice] is None, "nothing after the finish"
                    answer.tokens[event.choice].append(event.token)
                    answer.finishes[event.choice] = event.finish
                    if (stop_after or {}).get(event.choice) == len(answer.tokens[event.choice]):
                        generation.stop_choice(event.choice)
                if batches == leave_after:
                    break
        except BatonError as error:
            answer.error = error
        finally:
            await generation.aclose()
        answer.path, answer.timings = generation.path, generation.timings()
        return answer

    async def settle(self, within_s: float = 10.0) -> None:
        """Waits until nothing is held anywhere; fails with what is still held."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            held = [w.name for w in self.workers if w.alive and not w.is_empty]
            if not held and not len(self.gateway.inbox):
                break
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"still held: {held}, open letterboxes: {len(self.gateway.inbox)}")
            await asyncio.sleep(0.01)
        assert self.task_failures == []


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(200) for _ in range(length))


Scenario = Callable[[], Coroutine[Any, Any, None]]
