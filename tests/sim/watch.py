"""Looks on while a simulated cluster runs: every transition, every page that changes hands, every step and every
message; and says at once which invariant is broken. It never takes part."""

import asyncio
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from services.gateway.attempt import Attempt
from shared.bus.base import BusError
from shared.machines.decode import CommitMatched, DecodeState
from shared.machines.prefill import PrefillState
from shared.machines.request import RequestState
from shared.machines.stepping import CANCELLED, Cause, Event, Outcome, Step
from shared.protocol.messages import Fail, Verdict
from shared.transfer.link import TicketKey
from shared.worker.tickets import LiveTicket
from tests.sim.pool_audit import PoolAudit
from tests.sim.processes import GATEWAY_TIMEOUT_S, Gateway, Process, Worker

SLACK_S = 1.0
"""How long after its deadline a ticket may hold on: a slow copier and a step have to end."""
_LAST_EVENTS = 60
_OVER = {PrefillState.RELEASED, DecodeState.FREE, RequestState.ENDED}
_ENDED = {PrefillState.RELEASING, DecodeState.QUARANTINED}


class Violation(AssertionError):
    """An invariant is broken. The first one ends the run."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant, self.detail = invariant, detail


class Watch:
    """states: of every room that is alive, by role. homes: which process a room's leg lives on; routes: on which the
    gateway means it to. on_state: told of each state that is entered, as (role, state, room)."""

    def __init__(self) -> None:
        self.violation: Violation | None = None
        self.states: dict[int, dict[str, str]] = {}
        self.homes: dict[int, dict[str, Process]] = {}
        self.generations: dict[int, int] = {}
        self.routes: dict[int, dict[str, str]] = {}
        self.clients: dict[int, asyncio.Task[Any]] = {}
        self.on_state: Callable[[str, str, int], None] = lambda role, state, room: None
        self.on_deadline: Callable[[int], None] = lambda room: None
        self.disturbed_until: dict[str, float] = {}
        self.last_events: deque[str] = deque(maxlen=_LAST_EVENTS)
        self.num_events = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._changed: dict[PoolAudit, None] = {}
        self._committed: Counter[TicketKey] = Counter()
        self._ended: dict[str, set[TicketKey]] = {"prefill": set(), "decode": set(), "gateway": set()}
        self._dead_at: dict[str, float] = {}
        self._tickets: list[tuple[Worker, LiveTicket[Any, Any]]] = []

    # What happens

    def fail(self, invariant: str, detail: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant, detail)
            self.event(f"VIOLATION {self.violation}")

    def event(self, what: str) -> None:
        line = f"{self._now():.6f} {what}"
        self._hash.update(line.encode())
        self.last_events.append(line)
        self.num_events += 1

    @property
    def trace(self) -> str:
        """Equal for two runs in which the same things happened at the same times."""
        return self._hash.hexdigest()

    def on_built(self, process: Process) -> None:
        """Puts its eyes into a process that is about to start."""
        if isinstance(process, Worker):
            PoolAudit(process, self)
            self._watch_tickets(process)
        elif isinstance(process, Gateway):
            self._watch_inbox(process)

    def pool_changed(self, audit: PoolAudit) -> None:
        """It is looked at when the turn is over."""
        self._changed[audit] = None

    def died(self, process: Process) -> None:
        self._dead_at[process.peer] = self._now()
        for room, homes in list(self.homes.items()):
            if homes.get(process.role) is process:
                del homes[process.role]
                self.states[room].pop(process.role, None)

    def rooms_on(self, *processes: Process) -> list[int]:
        """Rooms with a leg on any of them."""
        return [r for r, homes in self.homes.items() if any(p is q for p in homes.values() for q in processes)]

    # Invariants

    def after_turn(self) -> None:
        """After each turn of the loop. Raises the first violation."""
        if self._changed:
            for audit in self._changed:
                audit.check()
            self._changed.clear()
        if self.violation is not None:
            raise self.violation

    def sweep(self, gateways: Iterable[Gateway]) -> None:
        """What time alone can break; called every now and then."""
        now = self._now()
        self._tickets = [(w, t) for w, t in self._tickets if w.alive and w.desk.tickets.find(t.key) is t]
        for worker, ticket in self._tickets:
            if now > ticket.deadline + SLACK_S:
                self.fail("every ticket ends by its deadline", f"{worker.name} {ticket.key} {ticket.state.state}")
            dead_at = max(self._dead_at.get(ticket.order.gateway, now), self.disturbed_until.get(worker.name, 0.0))
            if now - dead_at > GATEWAY_TIMEOUT_S + 1.5 + SLACK_S:
                self.fail("a dead gateway's tickets end", f"{worker.name} {ticket.key} {ticket.state.state}")
        for gateway in gateways:
            if gateway.alive and now > self.disturbed_until.get(gateway.name, 0.0) + 4.0:
                for worker_report in gateway.registry.all():
                    if now - self._dead_at.get(worker_report.peer, now) > 4.0:
                        self.fail("the dead are forgotten", f"{gateway.name} still lists {worker_report.peer}")

    # Eyes

    def _watch_tickets(self, worker: Worker) -> None:
        table: Any = worker.desk.tickets
        add = table.add

        def watched_add(ticket: LiveTicket[Any, Any]) -> None:
            add(ticket)
            step: Callable[[Any, Event], Step[Any]] = ticket._step
            ticket._step = lambda state, event: self._stepped(worker, ticket, state, event, step(state, event))
            self._tickets.append((worker, ticket))
            self._enter(worker.role, ticket.state.state.value, ticket.key, worker)

        table.add = watched_add

    def _stepped(
        self, worker: Worker, ticket: LiveTicket[Any, Any], before: Any, event: Event, step: Step[Any]
    ) -> Step[Any]:
        if not worker.alive or step.outcome is not Outcome.APPLIED:
            return step
        after = step.ticket.state
        if isinstance(event, CommitMatched) and any(type(e).__name__ == "StartGroup" for e in step.effects):
            self._committed[ticket.key] += 1
            if self._committed[ticket.key] > 1:
                self.fail("at most one commit per ticket", f"{worker.name} {ticket.key}")
        if after is before.state:
            return step
        if after in _ENDED:
            cause = step.ticket.cause
            self._ended[worker.role].add(ticket.key)
            if cause.code == "deadline_exceeded" and cause.by == worker.role:
                self.on_deadline(ticket.key.room)
            self._check_cause(worker, ticket, cause)
        if after in _OVER:
            self._leave(worker.role, ticket.key.room)
        else:
            self._enter(worker.role, after.value, ticket.key, worker)
        return step

    def _check_cause(self, worker: Worker, ticket: LiveTicket[Any, Any], cause: Cause) -> None:
        """Nobody ends a ticket in another's name."""
        key, gateway = ticket.key, ticket.order.gateway
        if key in self._ended["gateway"] or gateway in self._dead_at:
            return
        if cause.by == "gateway":
            fair = cause.code != CANCELLED and self._was_disturbed(worker.name, gateway.rpartition("-")[0])
        elif cause.by in ("prefill", "decode") and cause.by != worker.role:
            peer = ticket.order.prefill if cause.by == "prefill" else ticket.order.decode
            fair = key in self._ended[cause.by] or peer in self._dead_at
            fair |= cause.code == "peer_lost" and self._was_disturbed(peer.rpartition("-")[0])  # not found there
            # P goes by silence, which does not say which of the two cannot be heard; D by the bus, which knows.
            fair |= "does not answer" in cause.message and self._was_disturbed(worker.name)
        elif cause.by == "link" and worker.role != "prefill":  # only who sends finds that out
            fair = key in self._ended["prefill"] or ticket.order.prefill in self._dead_at
        else:
            return
        if not fair:
            self.fail("a ticket ends only by its own", f"{worker.name} {key} ended by {cause}, who did not say so")

    def _was_disturbed(self, *names: str) -> bool:
        """Whether one of them could not be heard a while ago."""
        return any(self.disturbed_until.get(name, float("-inf")) > self._now() - 9.0 for name in names)

    def _watch_inbox(self, gateway: Gateway) -> None:
        inbox: Any = gateway.inbox
        open_box, on_fail = inbox.open, inbox.on_fail

        def watched_open(room: int, generation: int, history: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self.clients[room] = task
            self._enter("gateway", RequestState.ROUTING.value, TicketKey(room, generation), gateway)
            return open_box(room, generation, history)

        async def watched_on_fail(notice: Fail) -> Verdict:
            box = inbox._boxes.get(notice.room)
            before = None if box is None else box.failure
            verdict: Verdict = await on_fail(notice)
            if box is not None and before is None and box.failure is not None:
                key = TicketKey(notice.room, box.generation)
                if key not in self._ended["prefill"] and key not in self._ended["decode"]:
                    self.fail("a ticket ends only by its own", f"{gateway.name} {key} failed by {notice.sender}")
            return verdict

        inbox.open, inbox.on_fail = watched_open, watched_on_fail

    def attempt_stepped(self, attempt: Attempt, before: RequestState) -> None:
        """An attempt at a gateway was given an event."""
        after, room = attempt.state.state, attempt.room
        gateway = self.homes.get(room, {}).get("gateway")
        if after is before or gateway is None:
            return
        key = TicketKey(room, attempt.generation)
        if after is RequestState.ENDED:
            self._ended["gateway"].add(key)
            if attempt.state.cause is not None and attempt.state.cause.code == "deadline_exceeded":
                self.on_deadline(room)
            self._leave("gateway", room)
            self.clients.pop(room, None)
        else:
            if attempt.route is not None:
                self.routes[room] = {worker.report.role: worker.peer for worker in attempt.route.workers}
            self._enter("gateway", after.value, key, gateway)

    def _enter(self, role: str, state: str, key: TicketKey, process: Process) -> None:
        self.states.setdefault(key.room, {})[role] = state
        self.homes.setdefault(key.room, {})[role] = process
        self.generations[key.room] = key.generation
        self.event(f"{process.name} {key.room} {role}:{state}")
        self.on_state(role, state, key.room)

    def _leave(self, role: str, room: int) -> None:
        self.event(f"{room} {role}:over")
        self.states.get(room, {}).pop(role, None)
        self.homes.get(room, {}).pop(role, None)
        if not self.homes.get(room):
            self.homes.pop(room, None)
            for known in (self.states, self.generations, self.routes):
                known.pop(room, None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class LogWatch(logging.Handler):
    """An exception that only a log has seen is a bug, unless the bus was away."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        super().__init__(logging.ERROR)
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, BusError):
            self._fail("nothing raises where nobody looks", f"{record.getMessage()}: {error!r}")
