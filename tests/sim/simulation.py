"""One seed: a cluster, its clients, its faults; then quiet, and the question whether anything is left behind."""

import asyncio
import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch

from services.gateway.attempt import Attempt
from shared.machines.stepping import Event
from shared.runtime.mode import Mode
from tests.sim import determinism, rest
from tests.sim.chaos import Chaos
from tests.sim.client import Client, Outcome
from tests.sim.cluster import Cluster
from tests.sim.explain import check_error
from tests.sim.plan import PAGE_TOKENS, Plan, Visit, draw
from tests.sim.virtual_time import VirtualLoop
from tests.sim.watch import LogWatch, Violation, Watch

_MAX_TURNS = 400_000
_END_SLACK_S = 0.5
_SWEEP_S = 0.2
_RECOVERY_S = 5.0
"""After the last fault: how long heartbeats, sweeps and breakers may take until everybody is served again."""


@dataclass
class SeedResult:
    """What a seed did and found. violation: None if all invariants held."""

    seed: int
    mode: Mode = "separated"
    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)
    num_events: int = 0
    trace: str = ""
    violation: tuple[str, str] | None = None
    last_events: list[str] = field(default_factory=list)


def mode_of(seed: int) -> Mode:
    """In which mode a seed runs in a long run: every tenth has no prefill workers."""
    modes: dict[int, Mode] = {7: "colocated", 17: "chunked"}
    return modes.get(seed % 20, "separated")


def run_seed(seed: int, mode: Mode = "separated") -> SeedResult:
    """Runs a seed to its end, or to the first violation. Must not be called inside a running loop."""
    return Simulation(draw(seed, mode)).run()


def _collect() -> None:
    """What an earlier run left says its last words now, and not in the middle of the next one."""
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # the libraries stay: they need not be looked through again


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.watch = Watch()
        self.result = SeedResult(plan.seed, plan.mode)
        self._fault_free = False
        self._num_turns = 0

    def run(self) -> SeedResult:
        torch.set_num_threads(1)
        _collect()
        log, root = LogWatch(self.watch.fail), logging.getLogger()
        level = root.level
        root.addHandler(log)
        root.setLevel(logging.ERROR)
        gc.disable()  # what the collector ends, it ends at any time
        try:
            with determinism.seeded(self.plan.seed), self._attempts_watched():
                self._run_on(VirtualLoop(self._after_turn))
        except Exception as error:
            found = self.watch.violation or Violation("the simulation goes through", repr(error))
            self.result.violation = (found.invariant, found.detail)
        finally:
            gc.enable()
            root.removeHandler(log)
            root.setLevel(level)
        self.result.trace, self.result.num_events = self.watch.trace, self.watch.num_events
        self.result.last_events = list(self.watch.last_events)
        return self.result

    def _run_on(self, loop: VirtualLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._main())
            finally:
                loop.after_turn = None

    def _after_turn(self) -> None:
        self.watch.after_turn()
        self._num_turns += 1
        if self._num_turns > _MAX_TURNS:
            raise Violation("the cluster comes to rest", f"{_MAX_TURNS} turns of the loop")

    @contextlib.contextmanager
    def _attempts_watched(self) -> Iterator[None]:
        apply = Attempt.apply

        def watched(attempt: Attempt, event: Event) -> None:
            before = attempt.state.state
            apply(attempt, event)
            self.watch.attempt_stepped(attempt, before)

        with mock.patch.object(Attempt, "apply", watched):
            yield

    async def _main(self) -> None:
        plan = self.plan
        cluster = Cluster(
            prefills=2 if plan.mode == "separated" else 0,
            decodes=2,
            gateways=plan.gateways,
            page_tokens=PAGE_TOKENS,
            num_pages=plan.num_pages,
            prefill_pages=plan.prefill_pages * PAGE_TOKENS // plan.prefill_page_tokens,
            prefill_page_tokens=plan.prefill_page_tokens,
            max_running=plan.max_running,
            prefill_chunk=plan.prefill_chunk,
            growth_tokens=plan.growth_tokens,
            stash_bytes=plan.stash_bytes,
            optimistic_attempts=plan.optimistic_attempts,
            overlap=plan.overlap,
            step_s=plan.step_s,
            mode=plan.mode,
            reuse=plan.reuse,
            step_tokens=max(plan.max_running, plan.prefill_chunk),
            on_built=self.watch.on_built,
        )
        chaos = self._chaos = Chaos(plan, cluster, self.watch)
        self._cluster = cluster
        async with cluster:
            cluster.hub.policy, cluster.network.policy = chaos.policy, chaos.mishap
            self.watch.on_state, self.watch.on_deadline = chaos.on_state, chaos.on_deadline
            sweeping = asyncio.get_running_loop().create_task(self._sweep())
            await asyncio.gather(*(self._visit(visit) for visit in plan.visits))
            await chaos.end()
            self._fault_free = True
            await self._serve_again()
            await rest.reached(cluster, self.watch)
            sweeping.cancel()
            self.result.hits, self.result.struck = chaos.hits, chaos.struck
            self._count_work()
            for failure in cluster.task_failures:
                self.watch.fail("no task fails", failure)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.watch.sweep(self._cluster.gateways)

    async def _serve_again(self) -> None:
        """The faults are over: what comes now is answered."""
        await asyncio.sleep(_RECOVERY_S)
        for number in range(len(self._cluster.gateways)):
            kind = next(v.kind for v in self.plan.visits if v.can_fit)
            await self._visit(Visit(1000 + number, 0.0, kind, 20.0, gateway=number))

    async def _visit(self, visit: Visit) -> None:
        """A client comes, asks and leaves, each in a task of its own: it may be cancelled."""
        await asyncio.sleep(visit.at_s)
        cluster, loop = self._cluster, asyncio.get_running_loop()
        while not cluster.gateways[visit.gateway].alive:
            await asyncio.sleep(0.05)
        gateway = cluster.gateways[visit.gateway]
        client = Client(visit, self.watch.fail)
        began = loop.time()
        asking = loop.create_task(client.take(gateway.flow.generate(client.request())))
        if visit.leave_at_s is not None:
            loop.call_later(visit.leave_at_s, self._leave, asking)
        await asyncio.wait({asking})
        if not asking.cancelled() and (error := asking.exception()) is not None and gateway.alive:
            self.watch.fail("a client gets a typed error", f"request {visit.number}: {error!r}")
        if asking.cancelled() or asking.exception() is not None:
            client.outcome = Outcome.LEFT if asking in self._chaos.left else Outcome.GATEWAY_LOST
        if client.outcome is Outcome.GATEWAY_LOST and gateway.alive:
            self.watch.fail("a client gets a typed error", f"request {visit.number} was dropped")
        if loop.time() - began > visit.timeout_s + _END_SLACK_S:
            self.watch.fail("every request ends by its deadline", f"request {visit.number}: {client.outcome}")
        self._count(client)

    def _leave(self, asking: asyncio.Task[None]) -> None:
        if not asking.done():
            self._chaos.left.add(asking)
            asking.cancel()

    def _count(self, client: Client) -> None:
        assert client.outcome is not None
        name = client.outcome.value
        if client.error is not None:
            name = client.error.code
            struck = Counter() if self._fault_free else self._chaos.struck
            if (why := check_error(client.visit, client.error, struck, client.timings)) is not None:
                self.watch.fail("an error has a cause", f"request {client.visit.number}: {client.error!r}: {why}")
        elif client.outcome is Outcome.RIGHT and not client.visit.can_fit:
            name = "right"
        self.result.outcomes[name] += 1
        self.watch.event(f"request {client.visit.number} {name} {client.tokens}")

    def _count_work(self) -> None:
        for worker in self._cluster.workers:
            self.result.work["steps"] += worker.engine.stats.steps
            self.result.work["positions held"] += worker.engine.stats.prompt_tokens_held
            self.result.work["preemptions"] += worker.engine.stats.preemptions
        for gateway in self._cluster.gateways:
            for counter in ("attempts_retried", "recoveries", "recoveries_resumed", "recoveries_given_up"):
                self.result.work[counter.replace("_", " ")] += gateway.counters[counter]
            self.result.work["replays"] += gateway.counters["replays"]
