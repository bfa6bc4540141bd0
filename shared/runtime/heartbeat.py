"""Publishes what a process is and has: at a steady pace, and soon after a change or when somebody asks."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from shared.bus.base import Bus, BusError, Message
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import encode
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)
MIN_GAP_S = 0.05


class Heartbeat:
    """report is called on the loop whenever a report goes out; `sequence` is stamped here. A bus that is away is waited
    out: reports are for now, so none is kept for later."""

    def __init__(self, bus: Bus, clock: Clock, report: Callable[[], WorkerReport], interval_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._report = report
        self._interval_s = interval_s
        self._wanted = asyncio.Event()
        self._sequence = 0
        self._away = False

    def changed(self) -> None:
        """Something in the report changed: it goes out within 50 ms, together with what changes until then."""
        self._wanted.set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        subscription = await self._bus.subscribe(subjects.hello(), self._on_hello)
        try:
            while True:
                await self.publish()
                await self._clock.sleep(min(MIN_GAP_S, self._interval_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s - MIN_GAP_S):
                        await self._wanted.wait()
                self._wanted.clear()
        finally:
            await subscription.unsubscribe()

    async def publish(self) -> None:
        """One report, now."""
        report = self._next()
        try:
            await self._bus.publish(subjects.subject(report.role, report.peer, subjects.HEARTBEAT), encode(report))
        except BusError as error:
            if not self._away:
                log.warning("reports are not getting out: %s", error)
            self._away = True
        else:
            self._away = False

    async def _on_hello(self, message: Message) -> bytes | None:
        if message.reply:
            return encode(self._next())
        self.changed()  # many who ask at once are answered together
        return None

    def _next(self) -> WorkerReport:
        self._sequence += 1
        return self._report().model_copy(update={"sequence": self._sequence})
