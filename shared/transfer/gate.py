"""The scheduler of `classes.py` at work: the loop waits for seats, sending threads for their bursts.

Whoever changes something also wakes those whose turn it is now; a thread that waits looks again when time alone may
have made it its turn.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from shared.runtime.errors import TransferError
from shared.transfer.classes import Flow, Rules, Scheduler, Standing, TrafficClass

_POLITE = frozenset({TrafficClass.RECOVERY, TrafficClass.BACKGROUND})


class Gate:
    """One a sidecar. now: seconds of any clock that does not jump."""

    def __init__(self, rules: Rules, now: Callable[[], float] = time.monotonic) -> None:
        self.rules, self.now = rules, now
        self.lock = threading.Lock()
        self.scheduler = Scheduler(rules)
        self._turns: dict[Flow, GatedTurn] = {}

    def enter(self, link: str, standing: Standing) -> "GatedTurn":
        """A transfer to a peer, whose name is `link`, comes up. On the loop; whoever enters also leaves."""
        with self.lock:
            flow = self.scheduler.enter(link, standing, self.now())
            turn = self._turns[flow] = GatedTurn(self, flow)
            self.advance()
            return turn

    def advance(self) -> None:
        """With the lock held: tells those that got a seat or a burst."""
        for flow in self.scheduler.advance(self.now()):
            self._turns[flow].on_change()

    def forget(self, flow: Flow) -> None:
        """With the lock held."""
        self._turns.pop(flow, None)
        self.scheduler.leave(flow, self.now())
        self.advance()

    @property
    def num_transfers(self) -> int:
        """In hand or waiting for their seats."""
        with self.lock:
            return len(self.scheduler)


class GatedTurn:
    """One transfer's turns (`backend.Turn`). `seat` belongs to the loop, `wait` to the thread that sends; the rest
    may be called by any. waited_s: how long it had no turn though it wanted one, its seat included."""

    def __init__(self, gate: Gate, flow: Flow) -> None:
        self._gate, self._flow = gate, flow
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._seated = asyncio.Event()
        self._changed = threading.Condition(gate.lock)
        self._aborted = False
        self._entered_at = gate.now()
        self.waited_s = 0.0

    async def seat(self) -> None:
        """Returns once another transfer of its class may be in hand at its peer. TransferError if it is aborted."""
        await self._seated.wait()
        if self._aborted:
            raise TransferError("aborted before its turn")
        self.waited_s += self._gate.now() - self._entered_at

    @property
    def burst_bytes(self) -> int:
        rules = self._gate.rules
        return rules.polite_burst_bytes if self._flow.traffic in _POLITE else rules.burst_bytes

    @property
    def window_bytes(self) -> int:
        return self._gate.rules.window_bytes if self._flow.traffic in _POLITE else 0

    def wait(self, num_bytes: int) -> None:
        gate = self._gate
        with gate.lock:
            asked_at = gate.now()
            gate.scheduler.ask(self._flow, num_bytes, asked_at)
            gate.advance()
            while not self._flow.burst:
                if self._aborted:
                    raise TransferError("aborted before its turn")
                now = gate.now()
                at = gate.scheduler.next_at(now)
                self._changed.wait(None if at is None else at - now)
                gate.advance()
            self.waited_s += gate.now() - asked_at

    def at_once(self, num_bytes: int) -> bool:
        gate = self._gate
        with gate.lock:
            if self._aborted:
                raise TransferError("aborted before its turn")
            gate.scheduler.ask(self._flow, num_bytes, gate.now())
            gate.advance()
            if not self._flow.burst:
                gate.scheduler.rest(self._flow)
                gate.advance()
            return self._flow.burst > 0

    def raise_to(self, traffic: TrafficClass) -> None:
        """A transfer of a higher class waits for this one."""
        with self._gate.lock:
            self._gate.scheduler.raise_to(self._flow, traffic)
            self._gate.advance()

    def abort(self) -> None:
        """`seat` and `wait`, now and later, raise TransferError unless it has its seat or burst."""
        with self._gate.lock:
            self._aborted = True
            self.on_change()

    def leave(self) -> None:
        """The transfer is over. Idempotent."""
        with self._gate.lock:
            self._gate.forget(self._flow)

    def on_change(self) -> None:
        """With the lock held: it got its seat or a burst, or is to end."""
        self._changed.notify()
        if threading.get_ident() == self._loop_thread:
            self._seated.set()
        elif not self._seated.is_set():
            with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
                self._loop.call_soon_threadsafe(self._seated.set)
