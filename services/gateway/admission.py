"""The gateway's queue: requests wait here, bounded and in order, until workers have announced room for them."""

import asyncio

from services.gateway.router import Demand, Policy, Route
from services.gateway.workers import WorkerRegistry
from shared.runtime.clock import Clock
from shared.runtime.errors import CapacityError, DeadlineExceeded, QueueFull


class RoomQueue:
    """First come, first served. A worker's no is remembered until its next report."""

    def __init__(
        self, registry: WorkerRegistry, policy: Policy, clock: Clock, *, max_queued: int, queue_timeout_s: float
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._clock = clock
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._turn = asyncio.Lock()
        self._refused: dict[str, int] = {}
        self.num_waiting = 0

    async def wait(self, demand: Demand, deadline: float, since: float) -> Route:
        """A route with room. Raises NoWorker at once where waiting cannot help, QueueFull where too many wait, and
        CapacityError or DeadlineExceeded when it took too long, counted from `since`, the request's arrival."""
        if not self._turn.locked() and (route := self._choose(demand)) is not None:
            return route
        if self.num_waiting >= self._max_queued:
            raise QueueFull(f"{self.num_waiting} requests are waiting already", retry_after_s=1.0)
        give_up = since + self._queue_timeout_s
        self.num_waiting += 1
        try:
            async with asyncio.timeout(max(0.0, min(give_up, deadline) - self._clock.now())):
                async with self._turn:
                    while (route := self._choose(demand)) is None:
                        await self._registry.wait_changed(0.25)
                    return route
        except TimeoutError:
            if self._clock.now() >= deadline:
                raise DeadlineExceeded("the request's deadline passed while it waited for a worker") from None
            why = f"no worker had room within {self._queue_timeout_s:g} s"
            raise CapacityError(why, retry_after_s=5.0) from None
        finally:
            self.num_waiting -= 1

    def refused(self, peer: str) -> None:
        """That worker has just said no: it is not asked again before it has reported anew."""
        for worker in self._registry.all():
            if worker.peer == peer:
                self._refused[peer] = worker.report.sequence

    def _choose(self, demand: Demand) -> Route | None:
        newest = {worker.peer: worker.report.sequence for worker in self._registry.all()}
        self._refused = {p: at for p, at in self._refused.items() if newest.get(p) == at}
        registry = self._registry
        return self._policy.choose(
            demand, registry.ready("prefill"), registry.ready("decode"), frozenset(self._refused)
        )
