"""What the gateway says to the workers of one attempt: may I, are you still at it, it is over.

Every failure names the leg to blame (`error.by`), for the circuit breakers and for the choice of the next attempt.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from services.gateway.attempt import Attempt, Order, cancel_of, orders_of
from services.gateway.breaker import blamed
from services.gateway.generation import GenerationRequest
from services.gateway.moving import Draining
from services.gateway.router import Route
from shared.bus.ask import ask
from shared.machines.stepping import Cause
from shared.protocol import subjects
from shared.protocol.messages import Replay, ReplayReply, ReplayStatus, Verdict
from shared.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    PeerLost,
    ProtocolError,
    RequestError,
    error_from_code,
)

if TYPE_CHECKING:
    from services.gateway.flow import GatewayFlow

E = TypeVar("E", bound=BatonError)

TICK_S = 0.001
"""Timers fire a little early: so close to its deadline a request is over."""


class Legs:
    """The workers of one attempt, from the route's choice to their release."""

    def __init__(
        self, g: "GatewayFlow", request: GenerationRequest, attempt: Attempt, route: Route, deadline: float
    ) -> None:
        self._g = g
        self._request = request
        self._attempt = attempt
        self.route = route
        self._deadline = deadline
        attempt.box.legs = {worker.report.role: worker.peer for worker in route.workers}

    async def ask(self, waited_s: float) -> None:
        """Reserve to D and prefill to P, at once. The first no ends the waiting for the other, and so does a token: P
        computes only what it has accepted, and only once D has told it where the state goes."""
        attempt, now = self._attempt, self._g.deps.clock.now()
        orders = orders_of(
            self._request, attempt, self.route, self._g.deps.peer, self._deadline - now, waited_s=waited_s
        )
        refusal: BatonError | None = None
        async with asyncio.TaskGroup() as legs:
            waiting = {legs.create_task(self._ask_leg(order)) for order in orders}
            arrived = legs.create_task(attempt.box.arrived())
            while waiting and refusal is None and not arrived.done():
                done, _ = await asyncio.wait({arrived, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                refusal = next((a.result() for a in waiting & done if a.result() is not None), None)
                waiting -= done
            for task in (arrived, *waiting):
                task.cancel()
        if refusal is not None:
            raise refusal
        self.settle()

    async def _ask_leg(self, order: Order) -> BatonError | None:
        """None for a yes, else why not."""
        registry, peer, room = self._g.registry, order.peer, self._attempt.room
        try:
            verdict = await self._verdict(order)
        except PeerLost as error:
            registry.drop(peer)
            return _blame(error, order.role)
        except ValueError:
            return InvalidRequest("the request is too large to be passed on")
        except (DeadlineExceeded, ProtocolError) as error:
            registry.settle(peer, room, granted=False)
            late = self._deadline - self._g.deps.clock.now() <= TICK_S
            return _blame(error if late else PeerLost(f"{peer} did not answer in time"), order.role)
        registry.settle(peer, room, granted=verdict.ok)
        if verdict.ok:
            return None
        refusal = error_from_code(verdict.code, f"{peer}: {verdict.message}")
        if not isinstance(refusal, RequestError):  # that would say nothing about other requests
            self._g.rooms.refused(peer)
        refusal.retry_after_s = verdict.retry_after_s
        return _blame(refusal, verdict.by or order.role)

    async def _verdict(self, order: Order) -> Verdict:
        """The worker's answer; DeadlineExceeded after `grant_s`, of which time when nobody can be heard is no part."""
        deps, registry, grant_s = self._g.deps, self._g.registry, self._g.settings.grant_s
        where = subjects.subject(order.role, order.peer, order.verb)
        while True:
            now = deps.clock.now()
            message = order.message.model_copy(update={"remaining_s": max(0.0, self._deadline - now)})
            deadline = min(self._deadline, now + grant_s)
            try:
                return await ask(deps.bus, deps.clock, where, message, Verdict, deadline=deadline)
            except DeadlineExceeded:
                if deadline >= self._deadline or not registry.was_deaf(grant_s):
                    raise

    async def until_heard(self, may_move: Callable[[], bool]) -> None:
        """Until tokens have arrived; in silence, and where one is missing, D is asked. Raises what has failed, and
        Draining where D is about to end and the stream may leave it now."""
        box, deps = self._attempt.box, self._g.deps
        while not box.events:
            if box.leaving and may_move():
                raise Draining(f"{box.legs['decode']} is about to end")
            if box.failure is not None:
                error = error_from_code(box.failure.code, box.failure.message)
                error.by = box.failure.by
                raise error
            left = self._deadline - deps.clock.now()
            if left <= TICK_S:
                raise DeadlineExceeded(f"the request did not finish within {self._request.timeout_s:g} s")
            if box.gap:
                box.gap = False
                await self.replay()
                continue
            box.wake.clear()
            try:
                async with asyncio.timeout(min(self._g.settings.silence_s, left)):
                    await box.wake.wait()
            except TimeoutError:
                await self.check()

    async def check(self) -> None:
        """Nothing came for a while. Who is lost is known from the heartbeats; D is asked for what may have got lost."""
        registry, route = self._g.registry, self.route
        if not self._g.deps.bus.connected:
            return
        if not registry.is_alive(route.decode.peer):
            raise _blame(PeerLost(f"the decode worker {route.decode.peer} is gone"), "decode")
        prefill = None if self._attempt.box.taken_over else route.prefill
        if prefill is not None and not registry.is_alive(prefill.peer):
            raise _blame(PeerLost(f"the prefill worker {prefill.peer} is gone"), "prefill")
        await self.replay()

    async def replay(self, *, mine: bool = False) -> bool:
        """Asks D for *tokens from k* of every choice that is not done; False where it did not answer, and that says
        nothing. mine: it was another gateway's so far, and what comes from now on is to come here."""
        deps, box, attempt, decode = self._g.deps, self._attempt.box, self._attempt, self.route.decode.peer
        over = attempt.history.over
        wanted = tuple((c, k) for c, k in enumerate(box.expected) if not box.finished[c] and not over[c])
        gateway = deps.peer if mine else None
        message = Replay(
            room=attempt.room, generation=attempt.generation, wanted=wanted, gateway=gateway, epoch=attempt.epoch
        )
        deadline = min(self._deadline, deps.clock.now() + self._g.settings.grant_s)
        try:
            where = subjects.subject("decode", decode, subjects.REPLAY)
            reply = await ask(deps.bus, deps.clock, where, message, ReplayReply, deadline=deadline)
        except PeerLost as error:
            raise _blame(error, "decode") from None
        except DeadlineExceeded:
            deaf = self._g.registry.was_deaf(self._g.settings.grant_s)
            if deaf or box.events or deadline >= self._deadline:
                return False  # the caller looks at what came and at the time, and asks again
            raise _blame(PeerLost(f"the decode worker {decode} does not answer"), "decode") from None
        deps.counters.add("replays")
        taken = sum(box.deliver(entry) for entry in reply.entries)
        if reply.status is ReplayStatus.LIVE or box.failure is not None or attempt.done:
            return True
        box.gap = True  # nothing will come by itself any more: ask for the rest as soon as this is delivered
        if not taken:
            box.fail(_why_ended(reply, decode))
        return True

    def proven(self) -> None:
        """D has taken over, or P's token was all there is: so much works. Counted once."""
        attempt = self._attempt
        for role, key in self.route.legs.items():
            if not attempt.proven and (role == "prefill" or attempt.box.taken_over):
                self._g.rooms.breakers.succeeded(key)
        attempt.proven = True

    def blame(self, error: BatonError) -> frozenset[str]:
        """The peers that failed the attempt, as far as it is known; counted by their breakers."""
        now, box = self._g.deps.clock.now(), self._attempt.box
        peers = blamed(error.code, error.by, box.legs)
        for key in self.route.legs.values():
            if key[0] in peers and self._g.registry.is_alive(key[0]):  # who is gone is not asked anyway
                self._g.rooms.breakers.failed(key, now, self._attempt.began_at)
        return frozenset(peers)

    def settle(self) -> None:
        """Whatever the workers answered or would have: their next reports count what they hold."""
        for worker in self.route.workers:
            self._g.registry.settle(worker.peer, self._attempt.room, granted=True)

    def stop_choice(self, choice: int) -> None:
        order = cancel_of(self._attempt, "stop", choice)
        self._g.farewells.tell("decode", self.route.decode.peer, order, self._deadline)

    def end(self, reason: str, *, tell: bool = True) -> None:
        """The attempt is over. Legs that may still hold something are told; those that have finished know. tell: False
        where they go on for another gateway."""
        attempt = self._attempt
        self.settle()
        for key in self.route.legs.values():
            self._g.rooms.breakers.released(key, attempt.room)
        if not tell or not attempt.cancel_legs or all(attempt.box.finished):
            return
        order = cancel_of(attempt, reason)
        for role, peer in attempt.box.legs.items():
            self._g.farewells.tell(role, peer, order, self._deadline)


def _blame(error: E, leg: str) -> E:
    error.by = leg
    return error


def _why_ended(reply: ReplayReply, decode: str) -> Cause:
    """The first cause, where D still knows it: its own notice may have got lost. D forgets after a while: then what
    became of the request is nobody's fault that is known."""
    if reply.code:
        return Cause(reply.code, reply.message, by=reply.by)
    if reply.status is ReplayStatus.UNKNOWN:
        return Cause(PeerLost.code, f"the decode worker {decode} does not know the request any more")
    return Cause(PeerLost.code, f"the decode worker {decode} has ended the request", by="decode")
