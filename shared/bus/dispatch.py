"""Runs the handlers of one bus client: each message in a task of its own, a bounded number at a time and waiting, all
of them ended with the client. Both buses use it, so that they behave alike."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.bus.base import MAX_PAYLOAD_BYTES, BusStats, Handler, Message

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

Reply = Callable[[Message, bytes], Awaitable[None]]
"""Sends the answer to a message."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Per subscription: handlers that run at the same time, and messages that wait for one to end; all bytes that wait
    in one client."""

    max_running: int = 256
    max_waiting: int = 8192
    max_waiting_bytes: int = 64 * MAX_PAYLOAD_BYTES


class Dispatcher:
    """Owns every handler task of a client."""

    def __init__(self, stats: BusStats, reply: Reply, limits: DispatchLimits) -> None:
        self.stats = stats
        self.limits = limits
        self.waiting_bytes = 0
        self._reply = reply
        # A dict, not a set: its order is that of arrival, so simulations repeat exactly.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def lane(self, handler: Handler) -> "Lane":
        return Lane(self, handler)

    def start(self, lane: "Lane", message: Message) -> None:
        self.stats.delivered += 1
        task = asyncio.get_running_loop().create_task(self._run(lane, message))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._ended(lane, done))

    async def close(self) -> None:
        """Cancels the handlers and waits for them, CLOSE_TIMEOUT_S at most."""
        self._closed = True
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            if pending:
                log.error("%d bus handlers did not end within %.0f s of being cancelled", len(pending), CLOSE_TIMEOUT_S)

    def _ended(self, lane: "Lane", task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if self._closed:
            return
        if task.cancelled():
            self.stats.handler_errors += 1
            log.error("bus handler was cancelled from inside")
        lane.handler_ended()

    async def _run(self, lane: "Lane", message: Message) -> None:
        try:
            answer = await lane.handler(message)
            if answer is not None and message.reply:
                await self._reply(message, answer)
                self.stats.replies += 1
        except Exception:
            self.stats.handler_errors += 1
            log.exception("bus handler for %s failed", message.subject)


class Lane:
    """The messages of one subscription, started in order of arrival."""

    def __init__(self, dispatcher: Dispatcher, handler: Handler) -> None:
        self.handler = handler
        self._dispatcher = dispatcher
        self._running = 0
        self._waiting: deque[Message] = deque()
        self._open = True

    def deliver(self, message: Message) -> None:
        """Starts the handler, lets the message wait, or drops and counts it. Never blocks."""
        if not self._open:
            return
        limits, size = self._dispatcher.limits, len(message.data)
        if self._running < limits.max_running:
            self._start(message)
        elif (
            len(self._waiting) < limits.max_waiting
            and self._dispatcher.waiting_bytes + size <= limits.max_waiting_bytes
        ):
            self._waiting.append(message)
            self._dispatcher.waiting_bytes += size
        else:
            self._dispatcher.stats.dropped += 1

    def close(self) -> None:
        """Nothing starts after this; what runs goes on."""
        self._open = False
        self._dispatcher.waiting_bytes -= sum(len(message.data) for message in self._waiting)
        self._waiting.clear()

    def handler_ended(self) -> None:
        self._running -= 1
        if self._waiting:
            message = self._waiting.popleft()
            self._dispatcher.waiting_bytes -= len(message.data)
            self._start(message)

    def _start(self, message: Message) -> None:
        self._running += 1
        self._dispatcher.start(self, message)
