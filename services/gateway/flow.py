"""A request's way through the cluster as the gateway sees it: one coroutine a request, in protocol order.

`RequestFlow._run` reads top to bottom: wait for workers with room, ask both at once, pass their tokens on, end every
leg. Each attempt is a new ticket: a new room and the next generation. An attempt that has sent nothing to the client
may be tried again; after that a failure is the client's to see.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.admission import RoomQueue
from services.gateway.attempt import Attempt, Order, orders_of
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.inbox import Inbox
from services.gateway.router import Demand, Route, pages_wanted
from services.gateway.timings import Stopwatch
from services.gateway.workers import WorkerRegistry
from shared.bus.ask import ask
from shared.machines import request as machine
from shared.machines.stepping import CANCELLED, Cause, Ended
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Replay,
    ReplayReply,
    ReplayStatus,
    Verdict,
)
from shared.runtime.deps import Deps
from shared.runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineExceeded,
    InvalidRequest,
    PeerLost,
    ProtocolError,
    error_from_code,
)
from shared.runtime.ids import new_room


@dataclass(frozen=True, slots=True)
class GatewayFlowSettings:
    """max_attempts: tickets one request may use up by failures. grant_s: how long a worker may take to say yes or no.
    silence_s: after so much quiet the legs are asked. tell_s: how long a leg is told that it is over."""

    max_attempts: int = 3
    grant_s: float = 5.0
    silence_s: float = 1.0
    tell_s: float = 5.0


@dataclass(frozen=True, slots=True)
class GatewayFlow:
    """What the coroutine works with; makes one flow a request (the `Generator` of the HTTP side)."""

    deps: Deps
    registry: WorkerRegistry
    inbox: Inbox
    rooms: RoomQueue
    settings: GatewayFlowSettings = GatewayFlowSettings()

    def generate(self, request: GenerationRequest) -> "RequestFlow":
        return RequestFlow(self, request)


class RequestFlow:
    """One request. Implements `Generation`."""

    def __init__(self, g: GatewayFlow, request: GenerationRequest) -> None:
        self._g = g
        self._request = request
        self._deadline = g.deps.clock.now() + request.timeout_s
        self._begun_at = g.deps.clock.now()
        self._failed_peers: frozenset[str] = frozenset()
        self._watch = Stopwatch(g.deps.clock)
        self._attempt: Attempt | None = None
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
                route = attempt.route = await self._wait_for_room(attempt)
                attempt.apply(machine.WorkersChosen(generation))
                await self._ask_legs(attempt, route)
                attempt.apply(machine.Granted(generation))
                while attempt.box.events or not attempt.done:
                    if batch := await self._next_batch(attempt, route):
                        attempt.apply(machine.TokensArrived(generation))
                        self._path = route.path
                        self._watch.tokens(batch)
                        yield batch
                attempt.apply(machine.AllDone(generation))
                return
            except BatonError as error:
                attempt.apply(Ended(generation, Cause(error.code, error.message)))
                if not isinstance(error, CapacityError):
                    failures += 1
                    self._failed_peers |= attempt.peers
                if not self._may_retry(attempt, error, failures):
                    raise
                self._g.deps.counters.add("attempts_retried")
            finally:
                self._close_attempt(attempt)

    def _open_attempt(self, generation: int) -> Attempt:
        room = new_room()
        box = self._g.inbox.open(room, generation, self._request.sampling.n)
        self._attempt = Attempt(machine.Attempt(room, generation), box)
        return self._attempt

    async def _wait_for_room(self, attempt: Attempt) -> Route:
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
        route = await self._g.rooms.wait(demand, self._deadline, self._begun_at)
        self._watch.routed()
        for worker in route.workers:
            self._g.registry.charge(worker.peer, attempt.room, pages_wanted(worker, demand))
        return route

    async def _ask_legs(self, attempt: Attempt, route: Route) -> None:
        """Reserve to D and prefill to P, at once. The first no ends the waiting for the other, and so does a token: P
        computes only what it has accepted, and only once D has told it where the state goes."""
        room = attempt.room
        orders = orders_of(self._request, attempt, route, self._g.deps.peer, self._deadline - self._g.deps.clock.now())
        refusal: BatonError | None = None
        async with asyncio.TaskGroup() as legs:
            waiting = {legs.create_task(self._ask_leg(room, order)) for order in orders}
            arrived = legs.create_task(attempt.box.arrived())
            while waiting and refusal is None and not arrived.done():
                done, _ = await asyncio.wait({arrived, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                refusal = next((a.result() for a in waiting & done if a.result() is not None), None)
                waiting -= done
            for task in (arrived, *waiting):
                task.cancel()
        if refusal is not None:
            raise refusal
        self._settle(attempt)
        self._watch.granted()

    async def _ask_leg(self, room: int, order: Order) -> BatonError | None:
        """None for a yes, else why not."""
        deps, registry, peer = self._g.deps, self._g.registry, order.peer
        deadline = min(self._deadline, deps.clock.now() + self._g.settings.grant_s)
        try:
            where = subjects.subject(order.role, peer, order.verb)
            verdict = await ask(deps.bus, deps.clock, where, order.message, Verdict, deadline=deadline)
        except PeerLost as error:
            registry.drop(peer)
            return error
        except ValueError:
            return InvalidRequest("the request is too large to be passed on")
        except (DeadlineExceeded, ProtocolError) as error:
            registry.settle(peer, room, granted=False)
            return error if deadline >= self._deadline else PeerLost(f"{peer} did not answer in time")
        registry.settle(peer, room, granted=verdict.ok)
        if verdict.ok:
            return None
        self._g.rooms.refused(peer)
        refusal = error_from_code(verdict.code, f"{peer}: {verdict.message}")
        refusal.retry_after_s = verdict.retry_after_s
        return refusal

    async def _next_batch(self, attempt: Attempt, route: Route) -> tuple[TokenEvent, ...]:
        """What has arrived, at least one message's worth; in silence, and where a token is missing, D is asked."""
        box, deps = attempt.box, self._g.deps
        while not box.events:
            if box.failure is not None:
                raise error_from_code(box.failure.code, box.failure.message)
            left = self._deadline - deps.clock.now()
            if left <= 0:
                raise DeadlineExceeded(f"the request did not finish within {self._request.timeout_s:g} s")
            if box.gap:
                box.gap = False
                await self._replay(attempt, route)
                continue
            box.wake.clear()
            try:
                async with asyncio.timeout(min(self._g.settings.silence_s, left)):
                    await box.wake.wait()
            except TimeoutError:
                await self._check_legs(attempt, route)
        batch, box.events = tuple(e for e in box.events if e.choice not in attempt.stopped), []
        if box.timings is not None:
            self._watch.ticket(box.timings)
        return batch

    async def _check_legs(self, attempt: Attempt, route: Route) -> None:
        """Nothing came for a while. Who is lost is known from the heartbeats; D is asked for what may have got lost."""
        registry = self._g.registry
        if not self._g.deps.bus.connected:
            return
        if not registry.is_alive(route.decode.peer):
            raise PeerLost(f"the decode worker {route.decode.peer} is gone")
        waiting_for_prefill = route.decode.peer not in attempt.box.senders  # D has not taken over yet
        if waiting_for_prefill and route.prefill is not None and not registry.is_alive(route.prefill.peer):
            raise PeerLost(f"the prefill worker {route.prefill.peer} is gone")
        await self._replay(attempt, route)

    async def _replay(self, attempt: Attempt, route: Route) -> None:
        """Asks D for *tokens from k* of every choice that is not done."""
        deps, box = self._g.deps, attempt.box
        wanted = tuple((c, k) for c, k in enumerate(box.expected) if not box.finished[c] and c not in attempt.stopped)
        message = Replay(room=attempt.room, generation=attempt.generation, wanted=wanted)
        where = subjects.subject("decode", route.decode.peer, subjects.REPLAY)
        deadline = min(self._deadline, deps.clock.now() + self._g.settings.grant_s)
        try:
            reply = await ask(deps.bus, deps.clock, where, message, ReplayReply, deadline=deadline)
        except DeadlineExceeded:
            deaf = deps.clock.now() - self._g.registry.deaf_at < self._g.settings.grant_s
            if deaf or box.events or deps.clock.now() >= self._deadline:
                return  # the caller looks at what came and at the time, and asks again
            raise PeerLost(f"the decode worker {route.decode.peer} does not answer") from None
        deps.counters.add("replays")
        taken = sum(box.deliver(entry) for entry in reply.entries)
        if reply.status is ReplayStatus.LIVE or box.failure is not None or attempt.done:
            return
        box.gap = True  # nothing will come by itself any more: ask for the rest as soon as this is delivered
        if not taken:
            raise PeerLost(f"the decode worker {route.decode.peer} has ended the request")

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
        generation = attempt.generation
        attempt.apply(Ended(generation, Cause(CANCELLED, "the client went away")))
        self._g.inbox.close(attempt.room)
        self._settle(attempt)
        if attempt.route is None or not attempt.cancel_legs or all(attempt.box.finished):
            return
        order = Cancel(
            room=attempt.room, generation=generation, reason=attempt.state.cause.code if attempt.state.cause else ""
        )
        for role, worker in (("prefill", attempt.route.prefill), ("decode", attempt.route.decode)):
            if worker is not None:
                self._g.deps.spawn(self._tell(role, worker.peer, order), f"cancel-{attempt.room}")

    def _settle(self, attempt: Attempt) -> None:
        """Whatever the workers answered or would have: their next reports count what they hold."""
        for peer in attempt.peers:
            self._g.registry.settle(peer, attempt.room, granted=True)

    async def _tell(self, role: str, peer: str, order: Cancel) -> None:
        deps = self._g.deps
        try:
            deadline = deps.clock.now() + self._g.settings.tell_s
            await ask(
                deps.bus, deps.clock, subjects.subject(role, peer, subjects.CANCEL), order, Verdict, deadline=deadline
            )
        except (PeerLost, DeadlineExceeded, ProtocolError):
            deps.counters.add("cancels_unheard")

    @property
    def path(self) -> str:
        return self._path

    def timings(self) -> dict[str, object]:
        return self._watch.as_dict() | {
            "path": self._path,
            "attempts": self._attempt.generation if self._attempt else 0,
        }

    def stop_choice(self, choice: int) -> None:
        """A stop string: D need not go on with this choice. After the last one the end itself tells the legs."""
        attempt = self._attempt
        if attempt is None or choice in attempt.stopped or attempt.box.finished[choice]:
            return
        attempt.stopped.add(choice)
        attempt.box.wake.set()
        if attempt.route is not None and not attempt.done:
            order = Cancel(room=attempt.room, generation=attempt.generation, reason="stop", choice=choice)
            self._g.deps.spawn(self._tell("decode", attempt.route.decode.peer, order), f"stop-{attempt.room}")

    async def aclose(self) -> None:
        stream = self._stream
        if stream is not None and hasattr(stream, "aclose"):
            await stream.aclose()
