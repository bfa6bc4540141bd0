"""A request's way through the cluster as the gateway sees it: one coroutine a request, in protocol order.

`RequestFlow._run` reads top to bottom: wait for workers with room, ask both at once, pass their tokens on, end every
leg. Each attempt is a new ticket: a new room and the next generation. An attempt that has sent nothing to the client
may be tried again; after that a failure is the client's to see.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.admission import RoomQueue, Waiting
from services.gateway.attempt import Attempt
from services.gateway.farewells import Farewells
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.inbox import Inbox
from services.gateway.legs import TICK_S, Legs
from services.gateway.peer_watch import PeerWatch
from services.gateway.router import Demand
from services.gateway.timings import Stopwatch
from services.gateway.workers import WorkerRegistry
from shared.bus.listen import listen
from shared.machines import request as machine
from shared.machines.stepping import CANCELLED, Cause, Ended
from shared.protocol import subjects
from shared.protocol.messages import RollCall
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, CapacityError, DeadlineExceeded, error_from_code
from shared.runtime.ids import new_room


@dataclass(frozen=True, slots=True)
class GatewayFlowSettings:
    """max_attempts: tickets one request may use up by failures. grant_s: how long a worker may take to say yes or no.
    silence_s: after so much quiet the legs are asked."""

    max_attempts: int = 3
    grant_s: float = 5.0
    silence_s: float = 1.0


class GatewayFlow:
    """What the coroutine works with; makes one flow a request (the `Generator` of the HTTP side)."""

    def __init__(
        self,
        deps: Deps,
        registry: WorkerRegistry,
        inbox: Inbox,
        rooms: RoomQueue,
        settings: GatewayFlowSettings = GatewayFlowSettings(),
    ) -> None:
        self.deps = deps
        self.registry = registry
        self.inbox = inbox
        self.rooms = rooms
        self.settings = settings
        self.farewells = Farewells(deps)

    async def start(self) -> None:
        """From now on workers that die are noticed, and workers are told what is over when they ask."""
        deps, inbox = self.deps, self.inbox
        self.registry.on_gone = self._lose
        await listen(deps.bus, "gateway", deps.peer, subjects.ROLL_CALL, RollCall, inbox.on_roll_call, deps.counters)
        deps.spawn_vital(PeerWatch(deps, inbox.peers, self.registry.drop).run(), "peer-watch")

    def _lose(self, peer: str) -> None:
        self.inbox.lose(peer)
        self.rooms.breakers.forget(peer)

    def generate(self, request: GenerationRequest) -> "RequestFlow":
        return RequestFlow(self, request)


class RequestFlow:
    """One request. Implements `Generation`."""

    def __init__(self, g: GatewayFlow, request: GenerationRequest) -> None:
        self._g = g
        self._request = request
        self._begun_at = g.deps.clock.now()
        self._deadline = self._begun_at + request.timeout_s
        self._place = Waiting(self._begun_at, request.priority)
        self._failed_peers: frozenset[str] = frozenset()
        self._watch = Stopwatch(g.deps.clock)
        self._attempt: Attempt | None = None
        self._legs: Legs | None = None
        self._path = "pending"
        self._stream: AsyncIterator[tuple[TokenEvent, ...]] | None = None

    def __aiter__(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        self._stream = self._run()
        return self._stream

    async def _run(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        generation = 0
        failures = 0
        while True:
            generation += 1
            attempt = self._open_attempt(generation)
            try:
                legs = self._legs = await self._wait_for_room(attempt)
                attempt.apply(machine.WorkersChosen(generation))
                await legs.ask(self._g.deps.clock.now() - self._begun_at)
                self._watch.granted()
                attempt.apply(machine.Granted(generation))
                while attempt.box.events or not attempt.done:
                    if batch := await self._next_batch(attempt, legs):
                        attempt.apply(machine.TokensArrived(generation))
                        self._watch.tokens(batch)
                        yield batch
                attempt.apply(machine.AllDone(generation))
                legs.proven()
                return
            except BatonError as error:
                attempt.apply(Ended(generation, Cause(error.code, error.message, by=error.by)))
                if not isinstance(error, CapacityError):
                    failures += 1
                    self._note_failure(attempt, error)
                if not self._may_retry(attempt, error, failures):
                    raise
                self._g.deps.counters.add("attempts_retried")
            finally:
                self._close_attempt(attempt)

    def _open_attempt(self, generation: int) -> Attempt:
        room = new_room()
        box = self._g.inbox.open(room, generation, self._request.sampling.n)
        self._legs = None
        self._attempt = Attempt(machine.Attempt(room, generation), box, self._g.deps.clock.now())
        return self._attempt

    async def _wait_for_room(self, attempt: Attempt) -> Legs:
        """The pair that has announced room for this request; reservations never pile up behind a busy P."""
        request = self._request
        demand = Demand(
            prompt_len=len(request.prompt),
            num_choices=request.sampling.n,
            max_tokens=request.sampling.max_tokens,
            path=request.path,
            strict=request.strict,
            avoid=self._failed_peers,
        )
        attempt.route = await self._g.rooms.wait(self._place, demand, attempt.room, self._deadline)
        attempt.began_at = self._g.deps.clock.now()
        self._watch.routed()
        return Legs(self._g, request, attempt, attempt.route, self._deadline)

    async def _next_batch(self, attempt: Attempt, legs: Legs) -> tuple[TokenEvent, ...]:
        """What has arrived, at least one message's worth; in silence, and where a token is missing, D is asked."""
        box, deps = attempt.box, self._g.deps
        while not box.events or attempt.may_start_over:
            if box.failure is not None:
                error = error_from_code(box.failure.code, box.failure.message)
                error.by = box.failure.by
                raise error
            left = self._deadline - deps.clock.now()
            if left <= TICK_S:
                raise DeadlineExceeded(f"the request did not finish within {self._request.timeout_s:g} s")
            if box.gap:
                box.gap = False
                await legs.replay()
                continue
            box.wake.clear()
            try:
                async with asyncio.timeout(min(self._g.settings.silence_s, left)):
                    await box.wake.wait()
            except TimeoutError:
                await legs.check()
        batch, box.events = tuple(e for e in box.events if e.choice not in attempt.stopped), []
        if box.timings is not None:
            self._watch.ticket(box.timings)
        if attempt.route is not None:
            self._path = attempt.route.path
        if box.taken_over:
            legs.proven()
        return batch

    def _note_failure(self, attempt: Attempt, error: BatonError) -> None:
        """Who failed the request is asked again only where there is no other."""
        if self._legs is not None:
            self._failed_peers |= self._legs.blame(error) or attempt.peers

    def _may_retry(self, attempt: Attempt, error: BatonError, failures: int) -> bool:
        """Only what has not reached the client is tried again; waiting for room is not a failure."""
        in_time = self._g.deps.clock.now() < self._deadline
        asked = attempt.route is not None  # without a route nothing was tried: the queue itself has said no
        return (
            error.retryable
            and asked
            and attempt.state.retryable
            and in_time
            and failures < self._g.settings.max_attempts
        )

    def _close_attempt(self, attempt: Attempt) -> None:
        """Ends the attempt whatever its state; each leg that may still hold something is told."""
        attempt.apply(Ended(attempt.generation, Cause(CANCELLED, "the client went away")))
        self._g.inbox.close(attempt.room)
        if self._legs is not None:
            self._legs.end(attempt.state.cause.code if attempt.state.cause else "")

    @property
    def path(self) -> str:
        return self._path

    def timings(self) -> dict[str, object]:
        return self._watch.as_dict() | {
            "path": self._path,
            "kv_precision": self._request.kv_precision,
            "attempts": self._attempt.generation if self._attempt else 0,
        }

    def stop_choice(self, choice: int) -> None:
        """A stop string: D need not go on with this choice. After the last one the end itself tells the legs."""
        attempt = self._attempt
        if attempt is None or choice in attempt.stopped or attempt.box.finished[choice]:
            return
        attempt.stopped.add(choice)
        attempt.box.wake.set()
        if self._legs is not None and not attempt.done:
            self._legs.stop_choice(choice)

    async def aclose(self) -> None:
        stream = self._stream
        if stream is not None and hasattr(stream, "aclose"):
            await stream.aclose()
