"""Tokens and failures that come in for this gateway's requests: each token index once, in order, whoever sent it.

Both P and D send token 0, D's later messages overlap after a replay, and NATS may lose, repeat or reorder any of them;
what passes here is the next expected index and nothing else. A later attempt begins where the client is.
"""

import asyncio
from dataclasses import dataclass, field

from services.gateway.generation import TokenEvent
from services.gateway.history import History
from shared.machines.stepping import Cause
from shared.protocol.messages import Fail, RollCall, RollCallReply, TicketTimings, TokenEntry, Tokens, Verdict
from shared.runtime.clock import Clock, LoopClock
from shared.runtime.counters import Counters
from shared.runtime.errors import PeerLost
from shared.runtime.tombstones import Tombstones


@dataclass(slots=True)
class Letterbox:
    """What arrived for one attempt and was not taken yet. expected: the next index of each choice. finished: choices of
    which nothing more comes. gap: a choice has a hole that only a replay can fill. failure: the first cause a leg
    reported. senders: who has sent tokens. legs: who serves it, by role. stored: positions that the stores have.
    leaving: its D is about to end."""

    generation: int
    expected: list[int]
    finished: list[bool]
    events: list[TokenEvent] = field(default_factory=list)
    gap: bool = False
    failure: Cause | None = None
    timings: TicketTimings | None = None
    senders: set[str] = field(default_factory=set)
    legs: dict[str, str] = field(default_factory=dict)
    stored: int = 0
    leaving: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, entry: TokenEntry) -> int:
        """Takes the tokens that are next; returns how many were. A hole is noted, what was known already is skipped."""
        if entry.choice >= len(self.expected) or self.finished[entry.choice]:
            return 0
        expected = self.expected[entry.choice]
        if entry.index > expected:
            self.gap = True
            self.wake.set()
            return 0
        taken = 0
        for offset in range(expected - entry.index, len(entry.tokens)):
            is_last = offset == len(entry.tokens) - 1
            self.events.append(
                TokenEvent(
                    choice=entry.choice,
                    index=entry.index + offset,
                    token=entry.tokens[offset],
                    logprob=entry.logprobs[offset] if offset < len(entry.logprobs) else None,
                    finish=entry.finish if is_last else None,
                )
            )
            taken += 1
        self.expected[entry.choice] = expected + taken
        if taken and entry.finish is not None:
            self.finished[entry.choice] = True
        if taken:
            self.wake.set()
        return taken

    @property
    def taken_over(self) -> bool:
        """D speaks: it has the state, and P has no part in the request any more."""
        return self.legs.get("decode") in self.senders

    def lose(self, peer: str) -> None:
        """That process is gone. If a leg still needed it, that is why the attempt failed."""
        for role, name in self.legs.items():
            if name == peer and not (role == "prefill" and self.taken_over):
                self.fail(Cause(PeerLost.code, f"the {role} worker {peer} is gone", by=role))

    async def arrived(self) -> None:
        """Until there is a token, or a failure."""
        while not self.events and self.failure is None:
            self.wake.clear()
            await self.wake.wait()

    def fail(self, cause: Cause) -> None:
        """Keeps the first cause."""
        if self.failure is None:
            self.failure = cause
            self.wake.set()


class Inbox:
    """room -> letterbox. What comes for a room that is not open, or another generation, is counted."""

    def __init__(self, counters: Counters, clock: Clock | None = None) -> None:
        self._boxes: dict[int, Letterbox] = {}
        self._counters = counters
        self._clock = clock or LoopClock()
        self._kept: Tombstones[float] = Tombstones(self._clock)
        """Until when: rooms of tickets that were left for another gateway, which may not have asked for them yet."""

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, room: int, generation: int, history: History) -> Letterbox:
        """For an attempt that goes on behind `history`."""
        box = Letterbox(generation, [len(tokens) for tokens in history.tokens], list(history.over))
        self._boxes[room] = box
        return box

    def close(self, room: int, keep_s: float = 0.0) -> None:
        """keep_s: for so long the ticket is not over, for another gateway may take it up."""
        self._boxes.pop(room, None)
        if keep_s:
            self._kept.put(room, self._clock.now() + keep_s)

    async def on_tokens(self, message: Tokens) -> Verdict:
        for entry in message.entries:
            box = self._box(entry.room, entry.generation)
            if box is None:
                self._counters.add("late_tokens")
                continue
            box.senders.add(message.sender)
            if box.deliver(entry) < len(entry.tokens):
                self._counters.add("repeated_tokens")
        for room, timings in message.timings:
            box = self._boxes.get(room)
            if box is not None and (message.sender == box.legs.get("decode") or not box.taken_over):
                box.timings = timings  # what P says first D says again, and more
        for room, position in message.stored:
            if (box := self._boxes.get(room)) is not None:
                box.stored = max(box.stored, position)
        return Verdict(ok=True)

    async def on_fail(self, notice: Fail) -> Verdict:
        box = self._box(notice.room, notice.generation)
        if box is None:
            self._counters.add("late_fail")
        else:
            box.fail(Cause(notice.code, notice.message, by=notice.by))
        return Verdict(ok=True)

    async def on_roll_call(self, question: RollCall) -> RollCallReply:
        """A worker asks which of its tickets are over."""
        now = self._clock.now()
        over = (room for room in question.rooms if room not in self._boxes and (self._kept.get(room) or now) <= now)
        return RollCallReply(gone=tuple(over))

    def peers(self) -> list[tuple[str, str]]:
        """(role, peer) of everybody who serves an open room."""
        return list(dict.fromkeys(leg for box in self._boxes.values() for leg in box.legs.items()))

    def lose(self, peer: str) -> None:
        for box in self._boxes.values():
            box.lose(peer)

    def leave(self, decode: str) -> None:
        """That worker is about to end; what it serves may go on elsewhere."""
        for box in self._boxes.values():
            if box.legs.get("decode") == decode and box.taken_over:
                box.leaving = True
                box.wake.set()

    def _box(self, room: int, generation: int) -> Letterbox | None:
        box = self._boxes.get(room)
        return box if box is not None and box.generation == generation else None
