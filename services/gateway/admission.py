"""The gateway's queue: requests wait here, bounded and in order (`line.py`), until workers have announced room.

Where several gateways compete for the workers, waiting for an announcement is not enough: the others may take every bit
of room as it comes. So the eldest that is due asks its workers all the same, now and then. A worker's no leaves a claim
there, and the worker keeps its room for the eldest of all gateways (`shared/worker/admission.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.gateway.breaker import Breakers
from services.gateway.line import Line, LineSettings, Place
from services.gateway.router import Demand, Fleet, Policy, Route, has_room, pages_wanted
from services.gateway.workers import Worker, WorkerRegistry
from shared.runtime.clock import Clock, Timer
from shared.runtime.errors import CapacityError, DeadlineExceeded, NoWorker, QueueFull

_LOOK_EVERY_S = 0.25
_LOOK_GAP_S = 0.02
"""Reports come often and a look costs: that many changes are looked at together."""
_CLAIM_EVERY_S = 0.5


@dataclass(eq=False, slots=True)
class Waiting(Place):
    """A request's place. returning: it was let into the queue before. claimed_at: when it last asked without room."""

    returning: bool = False
    claimed_at: float = float("-inf")


@dataclass(slots=True)
class _Question:
    demand: Demand
    room: int
    renew: Callable[[Demand], Demand]
    answer: asyncio.Future[Route | NoWorker] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RoomQueue:
    """A worker's no is remembered until its next report. As a route is given, its workers are charged
    its pages, and of one whose breaker is half-open it is the probe."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: Policy,
        clock: Clock,
        *,
        max_queued: int,
        queue_timeout_s: float,
        line: LineSettings | None = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._clock = clock
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._line = Line(line or LineSettings())
        self._questions: dict[Place, _Question] = {}
        self._refused: dict[str, int] = {}
        self._looked_at = float("-inf")
        self._timer: Timer | None = None
        self.breakers = Breakers()
        registry.on_change = self._look_soon

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    async def wait(
        self,
        place: Waiting,
        demand: Demand,
        room: int,
        deadline: float,
        renew: Callable[[Demand], Demand] = lambda demand: demand,
    ) -> Route:
        """A route with room, charged to `room`. Raises NoWorker at once where waiting cannot help, QueueFull where too
        many wait, and CapacityError or DeadlineExceeded when it took too long since the request's arrival. Who comes
        back keeps its place. Who has lost its workers is not sent away: it waits for room until its deadline, and for
        workers that are gone as long as others may wait for room. renew: the demand by what is known when its turn has
        come."""
        question = self._questions[place] = _Question(demand, room, renew)
        self._line.join(place)
        try:
            self._look() if len(self._line) == 1 else self._look_soon()
            if not question.answer.done() and not place.returning and len(self._line) > self._max_queued:
                raise QueueFull(f"{len(self._line) - 1} requests are waiting already", retry_after_s=1.0)
            place.returning = True
            give_up = place.since + self._queue_timeout_s if place.lost_at is None else deadline
            await self._until_answered(question, give_up, deadline)
        except BaseException:
            if question.answer.done() and isinstance(route := question.answer.result(), Route):
                self._take_back(route, room)
            raise
        finally:
            self._line.leave(place)
            del self._questions[place]
        answer = question.answer.result()
        if isinstance(answer, NoWorker):
            raise answer
        return answer

    async def _until_answered(self, question: _Question, give_up: float, deadline: float) -> None:
        limit = min(give_up, deadline)
        while not question.answer.done():
            now = self._clock.now()
            if now >= deadline:
                raise DeadlineExceeded("the request's deadline passed while it waited for a worker")
            if now >= give_up:
                raise CapacityError(f"no worker had room within {self._queue_timeout_s:g} s", retry_after_s=5.0)
            if now - self._looked_at >= _LOOK_EVERY_S:  # time alone can help: patience, breakers
                self._look()
            await asyncio.wait({question.answer}, timeout=min(_LOOK_EVERY_S, limit - now))

    def could_serve(self, demand: Demand, without: str) -> bool:
        """Whether there is room now, at other workers than that one."""
        decodes = [worker for worker in self._registry.ready("decode") if worker.peer != without]
        shut = self.breakers.shut(self._clock.now())
        fleet = Fleet(self._registry.ready("prefill"), decodes, self._still_refused(), shut)
        try:
            route = self._policy.choose(demand, fleet)
        except NoWorker:
            return False
        return route is not None and all(has_room(worker, demand) for worker in route.workers)

    def refused(self, peer: str) -> None:
        """That worker has just said no: it is not asked again before it has reported anew."""
        for worker in self._registry.all():
            if worker.peer == peer:
                self._refused[peer] = worker.report.sequence

    def _still_refused(self) -> frozenset[str]:
        newest = {worker.peer: worker.report.sequence for worker in self._registry.all()}
        self._refused = {p: at for p, at in self._refused.items() if newest.get(p) == at}
        return frozenset(self._refused)

    def _look_soon(self) -> None:
        now = self._clock.now()
        if self._timer is None and len(self._line):
            self._timer = self._clock.call_at(max(now, self._looked_at + _LOOK_GAP_S), self._look)

    def _look(self) -> None:
        """Serves whoever can be served now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._looked_at = self._clock.now()
        prefills, decodes = self._registry.ready("prefill"), self._registry.ready("decode")
        refused = self._still_refused()

        def fleet() -> Fleet:
            return Fleet(prefills, decodes, refused, self.breakers.shut(now))  # who was just served may be a probe

        self._line.advance(
            now,
            lambda place, kept: self._serve(place, kept, fleet()),
            lambda place, kept: self._lacks(place, kept, fleet()),
        )

    def _serve(self, place: Place, kept: frozenset[str], fleet: Fleet) -> bool:
        question = self._questions[place]
        place.stranded = False
        if question.answer.done():
            return False
        try:
            route = self._policy.choose(question.demand, replace(fleet, refused=fleet.refused | kept))
            if route is not None and (renewed := question.renew(question.demand)) != question.demand:
                question.demand = renewed
                route = self._policy.choose(renewed, replace(fleet, refused=fleet.refused | kept)) or route
            if route is None and not kept and self._may_claim(place):
                route = self._policy.aim(question.demand, fleet)
        except NoWorker as error:
            if place.lost_at is None or self._looked_at - place.lost_at > self._queue_timeout_s:
                question.answer.set_result(error)
            else:
                place.stranded = True  # a worker that died may be started again
            return False
        if route is None:
            return False
        for worker in route.workers:
            self._registry.charge(worker.peer, question.room, pages_wanted(worker, question.demand))
        for key in route.legs.values():
            self.breakers.began(key, question.room, self._looked_at)
        question.answer.set_result(route)
        return True

    def _may_claim(self, place: Place) -> bool:
        """Whether the eldest asks without announced room, so that the workers keep some for it."""
        now = self._clock.now()
        assert isinstance(place, Waiting)
        if not self._line.is_due(place, now) or now - place.claimed_at < _CLAIM_EVERY_S:
            return False
        if not self._registry.is_shared():  # what we do not hand out nobody does
            return False
        place.claimed_at = now
        return True

    def _lacks(self, place: Place, kept: frozenset[str], fleet: Fleet) -> frozenset[str]:
        """It aims at workers that are not kept for another, and stays with its own."""
        question = self._questions[place]
        if question.answer.done():
            return frozenset()

        def own(workers: list[Worker]) -> list[Worker]:
            return [w for w in workers if w.peer in place.kept] or [w for w in workers if w.peer not in kept]

        mine = replace(fleet, prefills=own(list(fleet.prefills)), decodes=own(list(fleet.decodes)))
        try:
            route = self._policy.aim(question.demand, mine)
        except NoWorker:
            return frozenset()
        workers = () if route is None else route.workers
        full = (w for w in workers if w.peer in fleet.refused or not has_room(w, question.demand))
        return frozenset(w.peer for w in full)

    def _take_back(self, route: Route, room: int) -> None:
        for worker in route.workers:
            self._registry.settle(worker.peer, room, granted=False)
        for key in route.legs.values():
            self.breakers.released(key, room)
