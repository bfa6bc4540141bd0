"""A request's way through the cluster as the gateway sees it: one coroutine a request, in protocol order.

`RequestFlow._run` reads top to bottom: wait for workers with room, ask both at once, pass their tokens on, end every
leg. Each attempt is a new ticket: a new room and the next generation. Where one fails, the next goes on behind the
tokens that the client has, and the client sees nothing of it but the gap. Only when too many fail is it told.
"""

from collections.abc import AsyncIterator

from services.gateway.admission import RoomQueue, Waiting
from services.gateway.adoption import adopt
from services.gateway.asking import Asking
from services.gateway.attempt import Attempt
from services.gateway.costs import Rates
from services.gateway.farewells import Farewells
from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.history import History, Past
from services.gateway.inbox import Inbox
from services.gateway.legs import Legs
from services.gateway.moving import Draining, Moves
from services.gateway.peer_watch import PeerWatch
from services.gateway.prefixes import STORES, Beginning, Prefixes
from services.gateway.recovery import Recoveries
from services.gateway.timings import Stopwatch
from services.gateway.workers import WorkerRegistry
from shared.bus.listen import listen
from shared.machines import request as machine
from shared.machines.stepping import CANCELLED, Cause, Ended
from shared.protocol import subjects
from shared.protocol.messages import RollCall
from shared.protocol.stream_messages import StreamTicket
from shared.runtime.deps import Deps
from shared.runtime.errors import (
    BatonError,
    CapacityError,
    InvalidRequest,
    PeerLost,
    PrefixGone,
    StoreError,
)
from shared.runtime.ids import new_room

_DEFAULTS = GatewayFlowSettings()


class GatewayFlow:
    """What the coroutine works with; makes one flow a request (the `Generator` of the HTTP side)."""

    def __init__(
        self,
        deps: Deps,
        registry: WorkerRegistry,
        inbox: Inbox,
        rooms: RoomQueue,
        settings: GatewayFlowSettings = _DEFAULTS,
    ) -> None:
        self.deps = deps
        self.registry = registry
        self.inbox = inbox
        self.rooms = rooms
        self.settings = settings
        self.farewells = Farewells(deps)
        self.rates = Rates(clock=deps.clock)
        self.moves = Moves(rooms, is_on=settings.migrate_on_drain)
        self.prefixes = Prefixes(settings.block_tokens)

    async def start(self) -> None:
        """From now on workers that die are noticed, and workers are told what is over when they ask."""
        deps, inbox = self.deps, self.inbox
        self.registry.on_gone, self.registry.on_draining = self._lose, inbox.leave
        await listen(deps.bus, "gateway", deps.peer, subjects.ROLL_CALL, RollCall, inbox.on_roll_call, deps.counters)
        deps.spawn_vital(PeerWatch(deps, inbox.peers, self.registry.drop).run(), "peer-watch")

    def _lose(self, peer: str) -> None:
        self.inbox.lose(peer)
        self.prefixes.forget(peer)
        self.rooms.breakers.forget(peer)

    def generate(self, request: GenerationRequest, past: Past | None = None) -> "RequestFlow":
        """past: what another gateway has done for it; the generation goes on behind what its client has."""
        return RequestFlow(self, request, past)


class RequestFlow:
    """One request. Implements `Generation`."""

    def __init__(self, g: GatewayFlow, request: GenerationRequest, past: Past | None) -> None:
        self._g = g
        self._request = request
        self._begun_at = g.deps.clock.now()
        self._deadline = self._begun_at + request.timeout_s
        self._place = Waiting(self._begun_at, request.priority)
        self._past = past or Past(History.empty(request.sampling.n))
        self._history = self._past.history
        self._beginning = Beginning(g.prefixes, request.sharing, g.registry.is_alive)
        self._asking = Asking(request, self._history, self._beginning, g.rates, g.settings, self._past.identity)
        self._recoveries = Recoveries(g.deps.clock, g.deps.counters, self._begun_at, g.settings.max_recoveries)
        self._watch = Stopwatch(g.deps.clock)
        self._attempt: Attempt | None = None
        self._legs: Legs | None = None
        self._path = self._past.path
        self._is_left = False
        self._stream: AsyncIterator[tuple[TokenEvent, ...]] | None = None

    def __aiter__(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        self._stream = self._run()
        return self._stream

    async def _run(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        generation = 0
        failures = 0
        try:
            adopted = await self._adopt()
            while True:
                turn: tuple[Attempt, Legs | None] = adopted or (self._open_attempt(generation + 1), None)
                adopted, (attempt, legs) = None, turn
                generation = attempt.generation
                try:
                    if legs is None:
                        legs = self._legs = await self._wait_for_room(attempt)
                        attempt.apply(machine.WorkersChosen(generation))
                        await legs.ask(self._g.deps.clock.now() - self._begun_at)
                    self._watch.granted()
                    attempt.apply(machine.Granted(generation))
                    while attempt.box.events or not attempt.done:
                        if batch := await self._next_batch(attempt, legs):
                            attempt.apply(machine.TokensArrived(generation))
                            self._note_tokens(batch)
                            yield batch
                    attempt.apply(machine.AllDone(generation))
                    legs.proven()
                    self._note_whole(attempt, legs)
                    return
                except Draining as error:
                    failures = 0
                    attempt.apply(Ended(generation, Cause(error.code, error.message)))
                    self._begin_recovery(error)
                except BatonError as error:
                    is_failure = attempt.granted or not isinstance(error, CapacityError)  # want of room is none
                    attempt.apply(Ended(generation, Cause(error.code, error.message, by=error.by)))
                    self._g.moves.ended(self)
                    if isinstance(error, StoreError):
                        self._history.stored = 0  # that they had less than was thought is nobody's fault
                        self._beginning.gone(STORES)
                    elif isinstance(error, PrefixGone) and attempt.route is not None:
                        self._beginning.gone(attempt.route.decode.peer)
                    elif is_failure:
                        failures = 1 if attempt.state.emitted else failures + 1
                        self._avoid_who_failed(attempt, error)
                    counts = is_failure and not isinstance(error, (StoreError, PrefixGone))
                    if not self._may_go_on(attempt, error) or (counts and self._are_too_many(failures)):
                        raise self._final(error) from error.__cause__
                    self._g.deps.counters.add("attempts_retried")
                    if counts and self._history.begun:
                        self._begin_recovery(error)
                finally:
                    self._close_attempt(attempt)
        finally:
            self._g.moves.ended(self)

    async def _adopt(self) -> tuple[Attempt, Legs] | None:
        """The ticket that another gateway has begun, where it still lives; else it has been lost with that gateway."""
        adopted = await adopt(self._g, self._request, self._past, self._asking.trunk_len, self._deadline)
        if adopted is not None:
            self._attempt, self._legs = adopted
        elif self._history.begun:
            self._begin_recovery(PeerLost("its gateway has changed"))
        return adopted

    def _open_attempt(self, generation: int) -> Attempt:
        room = new_room()
        box = self._g.inbox.open(room, generation, self._history)
        self._legs = None
        now, trunk_len = self._g.deps.clock.now(), self._asking.trunk_len
        self._attempt = Attempt(machine.Attempt(room, generation), box, self._history, now, trunk_len)
        return self._attempt

    async def _wait_for_room(self, attempt: Attempt) -> Legs:
        """The pair that has announced room for this request; reservations never pile up behind a busy P."""
        request = self._request
        self._beginning.grow(self._history.prefix(request.prompt))
        demand, estimate, renew = self._asking.demand(), self._asking.estimate(), self._asking.renew
        self._recoveries.expect(estimate.store_s if demand.load else estimate.prefill_s)
        attempt.route = await self._g.rooms.wait(self._place, demand, attempt.room, self._deadline, renew)
        attempt.began_at = self._g.deps.clock.now()
        self._watch.routed()
        return Legs(self._g, request, attempt, attempt.route, self._deadline)

    async def _next_batch(self, attempt: Attempt, legs: Legs) -> tuple[TokenEvent, ...]:
        """What has arrived, at least one message's worth."""
        box = attempt.box
        await legs.until_heard(lambda: self._g.moves.may_begin(self, box.legs["decode"], self._asking.demand))
        if not attempt.has_tokens and legs.route.prefill is not None:
            self._beginning.sent(legs.route.prefill)
        attempt.has_tokens = True
        batch, box.events = tuple(e for e in box.events if not self._history.over[e.choice]), []
        if box.timings is not None:
            self._watch.ticket(box.timings)
            self._g.rates.note(box.timings, attempt.trunk_len)
            box.timings = None
            if box.taken_over:
                self._beginning.sent(legs.route.decode)
        self._history.stored = max(self._history.stored, box.stored)
        if attempt.route is not None:
            self._path = attempt.path_by(self._watch.last_ticket)
            self._asking.identity = attempt.route.decode.report.identity
        if box.taken_over:
            legs.proven()
        return batch

    def _note_tokens(self, batch: tuple[TokenEvent, ...]) -> None:
        """They are as good as with the client: whatever happens from here on, they are never sent again."""
        attempt = self._attempt
        assert attempt is not None
        self._history.add(batch)
        self._watch.tokens(batch)
        self._recoveries.resumed(self._path, self._watch.last_ticket, attempt.trunk_len)
        self._g.moves.ended(self)

    def _note_whole(self, attempt: Attempt, legs: Legs) -> None:
        """D has the prompt, and what a single choice has given out; but where the handoff tokens ended the answer P
        alone has any of it, and nobody has waited for the stores."""
        if self._path == "pending":
            self._path = "remote"
        if legs.route.prefill is None or (attempt.box.taken_over and any(len(t) > 1 for t in self._history.tokens)):
            self._beginning.grow(self._history.prefix(self._request.prompt))
            self._beginning.sent(legs.route.decode)

    def _avoid_who_failed(self, attempt: Attempt, error: BatonError) -> None:
        """They are asked again only where there is no other."""
        if self._legs is not None:
            self._asking.avoid |= self._legs.blame(error) or attempt.peers

    def _may_go_on(self, attempt: Attempt, error: BatonError) -> bool:
        """Whether another attempt may bring what is left."""
        in_time = self._g.deps.clock.now() < self._deadline
        asked = attempt.route is not None  # without a route nothing was tried: the queue itself has said no
        return error.retryable and asked and in_time

    def _are_too_many(self, failures: int) -> bool:
        """In a row, or of those that the answer has survived."""
        return failures >= self._g.settings.max_attempts or (self._history.begun and self._recoveries.exhausted)

    def _begin_recovery(self, error: BatonError) -> None:
        """The client has tokens and its workers are lost: the next attempt goes before all who wait for their first."""
        self._place.lost_at = self._g.deps.clock.now()
        self._recoveries.begin(error, planned=isinstance(error, Draining))

    def _final(self, error: BatonError) -> BatonError:
        """What the client is told. That no worker can take on the rest of its answer is no mistake of its own."""
        lost = self._recoveries.under_way
        if lost is not None or (self._history.begun and error.retryable):
            self._g.deps.counters.add("recoveries_given_up")
        if lost is None or not isinstance(error, InvalidRequest):
            return error
        return PeerLost("its worker was told to end") if isinstance(lost, Draining) else lost

    def _close_attempt(self, attempt: Attempt) -> None:
        """Ends the attempt whatever its state; each leg that may still hold something is told."""
        attempt.apply(Ended(attempt.generation, Cause(CANCELLED, "the client went away")))
        is_left = self._is_left and self.progress().ticket is not None
        self._g.inbox.close(attempt.room, keep_s=self._request.orphan_grace_s if is_left else 0.0)
        self._history.stored = max(self._history.stored, attempt.box.stored)
        self._beginning.kept(self._history.stored)
        if self._legs is not None:
            self._legs.end(attempt.state.cause.code if attempt.state.cause else "", tell=not is_left)

    @property
    def path(self) -> str:
        return self._path

    def progress(self) -> Past:
        """From which another gateway can go on."""
        attempt, ticket = self._attempt, None
        if attempt is not None and attempt.box.taken_over:
            ticket = StreamTicket(room=attempt.room, generation=attempt.generation, decode=attempt.box.legs["decode"])
        return Past(self._history, self._asking.identity, self._path, ticket, self.cached_tokens)

    def leave(self) -> None:
        """It is about to end here, and what its decode worker does goes on for another gateway."""
        self._is_left = True

    @property
    def cached_tokens(self) -> int:
        if self._past.cached_tokens is not None:
            return self._past.cached_tokens
        return min(self._watch.cached_tokens, len(self._request.prompt))

    def timings(self) -> dict[str, object]:
        return self._watch.as_dict() | {
            "path": self._path,
            "kv_precision": self._request.kv_precision,
            "attempts": self._attempt.generation if self._attempt else 0,
            "recoveries": len(self._recoveries),
            "recovery": self._recoveries.as_list(),
        }

    def stop_choice(self, choice: int) -> None:
        """A stop string: D need not go on with this choice. After the last one the end itself tells the legs."""
        attempt = self._attempt
        if attempt is None or self._history.over[choice]:
            return
        self._history.over[choice] = True
        attempt.box.wake.set()
        if self._legs is not None and not attempt.done and not attempt.box.finished[choice]:
            self._legs.stop_choice(choice)

    async def aclose(self) -> None:
        stream = self._stream
        if stream is not None and hasattr(stream, "aclose"):
            await stream.aclose()
