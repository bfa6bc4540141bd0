"""What the gateway knows of the workers: their last reports, and what it has asked of them since.

A report that arrives after a worker's yes already counts what was granted, because bus and worker keep the order of one
publisher; until then the grant stands in the gateway's own ledger.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.bus.base import Bus, Message, Subscription
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import MalformedMessage, decode
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.mode import Mode

_SWEEP_S = 0.25
_BURIED = 1024
"""Replaced incarnations that are remembered, so that a late report of theirs does not bring them back."""
_MOST_WORKERS = 1024
"""Processes that are known at once. More can only be noise; what is silent is soon forgotten anyway."""


@dataclass(slots=True)
class Worker:
    """report: the newest one. seen_at: when it came. pending: pages asked for, by room, that no report counts yet."""

    report: WorkerReport
    seen_at: float
    pending: dict[int, int] = field(default_factory=dict)
    granted: set[int] = field(default_factory=set)

    @property
    def peer(self) -> str:
        return self.report.peer

    @property
    def free_pages(self) -> int:
        pages = self.report.pages
        return 0 if pages is None else max(0, pages.free + pages.yieldable - sum(self.pending.values()))

    @property
    def total_pages(self) -> int:
        return 0 if self.report.pages is None else self.report.pages.total

    @property
    def total_slots(self) -> int:
        return 1 if self.report.slots is None else self.report.slots.total

    @property
    def free_slots(self) -> int:
        slots = self.report.slots
        return 1 if slots is None else max(0, slots.free + slots.yieldable - len(self.pending))

    def pages_for(self, num_tokens: int) -> int:
        page_tokens = self.report.geometry.page_tokens if self.report.geometry is not None else 1
        return -(-num_tokens // page_tokens)


class WorkerRegistry:
    """Live processes by peer name. on_change: called when there may be capacity. on_gone: called with a peer that is
    surely gone, not merely silent. on_draining: with each report of one that is about to end."""

    def __init__(self, clock: Clock, counters: Counters, worker_timeout_s: float) -> None:
        self._clock = clock
        self._counters = counters
        self._timeout_s = worker_timeout_s
        self._workers: dict[str, Worker] = {}
        self._deaf_at = float("-inf")
        self._swept_at = float("inf")
        self._buried: deque[str] = deque(maxlen=_BURIED)
        self.on_change: Callable[[], None] = lambda: None
        self.on_gone: Callable[[str], None] = lambda peer: None
        self.on_draining: Callable[[str], None] = lambda peer: None
        self._subscription: Subscription | None = None

    async def start(self, bus: Bus) -> None:
        self._subscription = await bus.subscribe(subjects.all_heartbeats(), self._on_heartbeat)
        await bus.publish(subjects.hello(), b"")

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            report = decode(WorkerReport, message.data)
        except MalformedMessage:
            self._counters.add("malformed_heartbeat")
            return
        if message.subject != subjects.subject(report.role, report.peer, subjects.HEARTBEAT):
            self._counters.add("malformed_heartbeat")
            return
        self.observe(report)

    def observe(self, report: WorkerReport) -> None:
        """Takes a report in. An older one than the newest changes nothing; a new boot id buries the earlier process."""
        known = self._workers.get(report.peer)
        if report.peer in self._buried:
            self._counters.add("late_heartbeat")
            return
        if known is None:
            same = (report.role, report.id)
            for peer in [p for p, w in self._workers.items() if (w.report.role, w.report.id) == same]:
                del self._workers[peer]
                self._buried.append(peer)
                self.on_gone(peer)
            if len(self._workers) >= _MOST_WORKERS:
                self._counters.add("surplus_heartbeats")
                return
            self._workers[report.peer] = Worker(report, self._clock.now())
        elif report.sequence > known.report.sequence:
            if report.state == "draining":
                self.on_draining(report.peer)
            known.report = report
            known.seen_at = self._clock.now()
            for room in known.granted:
                known.pending.pop(room, None)
            known.granted.clear()
        else:
            self._counters.add("late_heartbeat")
            return
        self.on_change()

    async def watch(self, bus: Bus, me: str) -> None:
        """Sweeps until cancelled, by time and not by traffic. `me`: this gateway, whose own heartbeats come round by
        the bus as well: while they do not, nobody could be heard, and nobody is to blame."""
        while True:
            before = self._swept_at = self._clock.now()
            await self._clock.sleep(_SWEEP_S)
            now = self._clock.now()
            own = self._workers.get(me)
            deaf = not bus.connected or (own is not None and now - own.seen_at > self._timeout_s / 2)
            if deaf or now - before > 4 * _SWEEP_S:
                self._deaf_at = now
                self.touch_all(but=me)
            else:
                self.sweep()

    def sweep(self) -> None:
        """Forgets what has been silent for too long. Driven by a timer, not by traffic."""
        oldest = self._clock.now() - self._timeout_s
        lost = [peer for peer, worker in self._workers.items() if worker.seen_at < oldest]
        for peer in lost:
            del self._workers[peer]
            self._counters.add("workers_lost")
        if lost:
            self.on_change()

    def touch_all(self, but: str = "") -> None:
        """The bus was away, or we stood still: silence says nothing."""
        for peer, worker in self._workers.items():
            if peer != but:
                worker.seen_at = self._clock.now()

    def was_deaf(self, within_s: float) -> bool:
        """Whether nobody could be heard of late: what was not answered then says nothing about a worker."""
        now = self._clock.now()
        return now - self._deaf_at < within_s or now - self._swept_at > 4 * _SWEEP_S

    def drop(self, peer: str) -> None:
        """The bus says that nobody listens there."""
        if self._workers.pop(peer, None) is not None:
            self._counters.add("workers_lost")
            self.on_change()
        self.on_gone(peer)

    def ready(self, role: str) -> list[Worker]:
        return [w for w in self._workers.values() if w.report.role == role and w.report.state == "ready"]

    def all(self) -> list[Worker]:
        return sorted(self._workers.values(), key=lambda w: (w.report.role, w.report.id))

    def of_another_mode(self, mode: Mode) -> str | None:
        """A worker that computes otherwise than a gateway of this mode asks for; what is measured would mislead."""
        for worker in (*self.ready("prefill"), *self.ready("decode")):
            if (other := worker.report.settings.get("mode", mode)) != mode:
                return f"{worker.report.id} runs in mode {other}, the gateway in mode {mode}"
        return None

    def is_shared(self) -> bool:
        """Whether several gateways compete for these workers. Our own reports come round as well."""
        return len(self.ready("gateway")) > 1

    def find(self, peer: str) -> Worker | None:
        return self._workers.get(peer)

    def is_alive(self, peer: str) -> bool:
        return peer in self._workers

    def charge(self, peer: str, room: int, pages: int) -> None:
        """The gateway is about to ask `peer` for pages."""
        if (worker := self._workers.get(peer)) is not None:
            worker.pending[room] = pages

    def settle(self, peer: str, room: int, *, granted: bool) -> None:
        """The worker answered: a yes is counted by its next report, a no never was."""
        if (worker := self._workers.get(peer)) is None:
            return
        if granted:
            worker.granted.add(room)
        elif worker.pending.pop(room, None) is not None:
            self.on_change()
