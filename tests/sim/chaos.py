"""Carries out the faults of a plan: what becomes of each message and transfer, and what strikes when a ticket enters a
state. All chance comes from the seed."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.bus.memory import Envelope
from shared.protocol import subjects
from shared.runtime.errors import PeerLost, TransferRefused, TransferTimeout
from shared.transfer.fake import Mishap
from shared.transfer.link import Piece, TicketKey
from tests.sim.cluster import Cluster
from tests.sim.plan import Plan, Trigger
from tests.sim.processes import Process, Worker
from tests.sim.stale import forge
from tests.sim.watch import Watch

WIRE_S = 0.0005
_AT_ONCE = (WIRE_S,)
_BEATS = (subjects.HEARTBEAT, "ping", "hello")
_ROOM = re.compile(rb'"room":(\d+)')
_FOLLOWED = 30
_PAUSES_S = (0.3, 1.2, 4.0, 6.5, 9.0)
_ERRORS = (PeerLost, TransferTimeout, TransferRefused)


@dataclass(frozen=True, slots=True)
class _Silence:
    """gray: heartbeats still pass."""

    until: float
    gray: bool


class Chaos:
    """hits: (fault, role, state) -> how often it struck a request there. struck: how often each fault was injected."""

    def __init__(self, plan: Plan, cluster: Cluster, watch: Watch) -> None:
        self._plan, self._cluster, self._watch = plan, cluster, watch
        self._rng = random.Random(plan.seed ^ 0x5EED)
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.struck: Counter[str] = Counter()
        self.corrupted: set[int] = set()
        self.left: set[asyncio.Task[None]] = set()
        self.over = False
        self._silent: dict[frozenset[str], _Silence] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._waiting = list(plan.triggers)
        self._restarts: dict[asyncio.Task[None], None] = {}
        self._mends: dict[asyncio.TimerHandle, Callable[[], None]] = {}

    async def end(self) -> None:
        """No fault from now on; what was broken is whole again when this returns."""
        self.over = True
        self._silent.clear()
        for timer, mend in self._mends.items():
            timer.cancel()
            mend()
        while self._restarts:
            await asyncio.wait(self._restarts)

    # Messages

    def policy(self, envelope: Envelope) -> Sequence[float]:
        """Heartbeats are too many to be written down, and single ones that get lost mean nothing."""
        beats = envelope.subject.endswith(_BEATS)
        is_silent = bool(self._silent) and self._is_silent(envelope.sender, envelope.receiver, beats)
        if beats:
            return () if is_silent else _AT_ONCE
        fault, fate = ("silence", ()) if is_silent else self._fate(envelope)
        verb = envelope.subject.rsplit(".", 1)[-1]
        self._watch.event(f"{envelope.kind} {envelope.sender} > {envelope.receiver} {verb} {fault}")
        return fate

    def _fate(self, envelope: Envelope) -> tuple[str, Sequence[float]]:
        if self.over:
            return "", _AT_ONCE
        fault = self._draw(self._plan.noise)
        if fault is None:
            return "", _AT_ONCE
        rng, late = self._rng, self._rng.choice((0.08, 0.6, 2.0))
        fates: dict[str, tuple[float, ...]] = {
            "drop": (),
            "duplicate": (WIRE_S, WIRE_S + rng.choice((0.0, 0.03, late, 5.0))),
            "delay": (rng.uniform(0.03, late),),
            "reorder": (rng.uniform(0.001, 0.02),),
            "stale": (WIRE_S,),
        }
        rooms = {int(room) for room in _ROOM.findall(envelope.asked or envelope.data)}
        self._hit(fault, rooms)
        if fault == "stale":
            for room in rooms:
                self._send_stale(room)
        return fault, fates[fault]

    def _is_silent(self, a: str, b: str, beats: bool) -> bool:
        now = asyncio.get_running_loop().time()
        found = [self._silent.get(names) for names in (frozenset((a, b)), frozenset((a,)), frozenset((b,)))]
        return any(s is not None and now < s.until and not (beats and s.gray) for s in found)

    def _send_stale(self, room: int) -> None:
        """Something is said about another generation of the room, to one of its legs."""
        legs = sorted(self._watch.homes.get(room, {}).items())
        if legs:
            role, process = self._rng.choice(legs)
            message = forge(self._rng, role, process.peer, TicketKey(room, self._watch.generations[room]))
            self._cluster.hub.inject(message, self._rng.uniform(0.0, 0.03))

    # Transfers

    def mishap(self, key: TicketKey, pieces: tuple[Piece, ...]) -> Mishap:
        fault = None if self.over else self._draw(self._plan.links)
        if fault is None:
            return Mishap(layer_delay_s=0.0005)
        self.struck[fault] += 1
        self._follow(fault, key, set(), _FOLLOWED)
        rng = self._rng
        if fault == "slow":
            return Mishap(rng.choice((0.0, 0.05)), rng.choice((0.01, 0.1, 0.5)), linger_s=rng.choice((0.0, 0.02, 0.4)))
        if fault == "lost":
            return Mishap(lost=True)
        if fault == "corrupt":
            self.corrupted.add(key.room)
            return Mishap(rng.choice((0.0, 0.03)), corrupt=True)
        return Mishap(rng.choice((0.0, 0.03)), layer_delay_s=0.001, error=rng.choice(_ERRORS)("the wire broke"))

    def _follow(self, fault: str, key: TicketKey, met: set[tuple[str, str]], left: int) -> None:
        """A transfer takes its time: every state that it meets the request in counts."""
        for where in set(self._watch.states.get(key.room, {}).items()) - met:
            met.add(where)
            self.hits[fault, *where] += 1
        links = self._cluster.network.links.values()
        if left and any(touch.key == key for link in links for touch in link.touched() if not touch.writes):
            asyncio.get_running_loop().call_later(0.02, self._follow, fault, key, met, left - 1)

    # What strikes in a state

    def on_state(self, role: str, state: str, room: int) -> None:
        if self.over:
            return
        if role == "gateway" and self._rng.random() < self._plan.noise["stale"]:
            self._hit("stale", {room})
            self._send_stale(room)
        self._seen[role, state] += 1
        for trigger in [t for t in self._waiting if (t.role, t.state) == (role, state)]:
            if self._seen[role, state] >= trigger.nth:
                self._waiting.remove(trigger)
                if trigger.delay_s:
                    asyncio.get_running_loop().call_later(trigger.delay_s, self._strike, trigger, room)
                else:  # in the middle of whatever is going on
                    self._strike(trigger, room)

    def on_deadline(self, room: int) -> None:
        self._hit("deadline", {room})

    def _strike(self, trigger: Trigger, room: int) -> None:
        if self.over:
            return
        if self._watch.states.get(room, {}).get(trigger.role) != trigger.state:  # too late: the next one then
            self._waiting.append(trigger)
            return
        self._watch.event(f"strike {trigger.fault} in {trigger.role}:{trigger.state} of {room}")
        kind, _, what = trigger.fault.partition(" ")
        if trigger.fault == "leave":
            self._leave(room)
        elif trigger.fault == "hub outage":
            self._cut("hub outage", self._cluster.processes, {*self._watch.homes})
        elif kind == "part":
            self._part(trigger.fault, [self._leg(role, room) for role in what.split("-")], room)
        else:
            process = self._leg(what, room)
            rooms = {room, *self._watch.rooms_on(process)}
            if not process.alive:
                return
            if kind == "crash":
                self._hit(trigger.fault, rooms)
                self._crash(process)
            elif kind == "sidecar":
                self._hit(trigger.fault, rooms)
                assert isinstance(process, Worker)
                self._later(process.link.restart())
            elif kind == "isolate":
                self._part(trigger.fault, [process], room)
            else:
                self._cut(trigger.fault, [process], rooms)

    def _leg(self, role: str, room: int) -> Process:
        """The process of that role which serves (or will serve) the room, else any."""
        peer = self._watch.routes.get(room, {}).get(role)
        home = self._watch.homes.get(room, {}).get(role)
        same = [p for p in self._cluster.processes if p.role == role]
        named = [p for p in same if p.peer == peer]
        return home or (named or [self._rng.choice(same)])[0]

    def _leave(self, room: int) -> None:
        client = self._watch.clients.get(room)
        if client is not None and not client.done():
            self._hit("leave", {room})
            self.left.add(client)
            client.cancel()

    def _part(self, fault: str, ends: list[Process], room: int) -> None:
        """Silence between two processes, or around one. Nobody is told."""
        pause_s = self._rng.choice(_PAUSES_S)
        until = asyncio.get_running_loop().time() + pause_s
        self._silent[frozenset(p.name for p in ends)] = _Silence(until, self._rng.random() < 0.5)
        self._disturb(ends, until)
        self._hit(fault, {room, *self._watch.rooms_on(*ends)})

    def _cut(self, fault: str, processes: Sequence[Process], rooms: set[int]) -> None:
        """They lose their connection to the bus, and notice."""
        pause_s = self._rng.choice((0.2, 1.0, 2.5, 5.0))
        self._disturb(processes, asyncio.get_running_loop().time() + pause_s)
        self._hit(fault, rooms)
        for process in processes:
            process.bus.cut()

        def mend() -> None:
            for process in processes:
                process.bus.mend()

        self._mends[asyncio.get_running_loop().call_later(pause_s, mend)] = mend

    def _crash(self, process: Process) -> None:
        process.kill_now()
        self._watch.died(process)
        if process.role == "gateway":
            for room in self._watch.rooms_on(process):
                if (client := self._watch.clients.get(room)) is not None:
                    client.cancel()
        self._later(self._restart(process, self._rng.choice((0.02, 0.3, 1.5))))

    async def _restart(self, process: Process, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._cluster.restart(process)

    def _later(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type, var-annotated]
        self._restarts[task] = None
        task.add_done_callback(lambda done: self._restarts.pop(done, None))

    def _disturb(self, processes: Sequence[Process], until: float) -> None:
        for process in processes:
            self._watch.disturbed_until[process.name] = max(until, self._watch.disturbed_until.get(process.name, 0.0))

    def _draw(self, chances: dict[str, float]) -> str | None:
        drawn = self._rng.random()
        for name, chance in chances.items():
            drawn -= chance
            if drawn < 0:
                return name
        return None

    def _hit(self, fault: str, rooms: set[int]) -> None:
        self.struck[fault] += 1
        for room in rooms:
            for role, state in self._watch.states.get(room, {}).items():
                self.hits[fault, role, state] += 1
