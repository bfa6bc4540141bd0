"""Workers watch the gateways they work for: a ticket whose gateway is gone has nobody to answer to."""

from collections.abc import Callable, Iterable

from shared.bus.base import Bus, Message, Subscription
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import MalformedMessage, decode
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters


class GatewayWatch:
    """in_use: the gateways of live tickets. on_lost: called once for a gateway that was silent for `timeout_s`.

    A gateway is watched from the first sweep that finds it in use, heard or not. Silence counts only while others are
    heard: all heartbeats come in here, our own as well.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        in_use: Callable[[], Iterable[str]],
        on_lost: Callable[[str], None],
        timeout_s: float,
        counters: Counters | None = None,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._in_use = in_use
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._counters = counters or Counters()
        self._heard_at: dict[str, float] = {}
        self._anybody_at = 0.0

    async def run(self) -> None:
        """Sweeps until cancelled, by time and not by traffic."""
        subscription: Subscription = await self._bus.subscribe(subjects.all_heartbeats(), self._on_heartbeat)
        try:
            every_s = min(0.5, self._timeout_s / 2)
            while True:
                before = self._clock.now()
                await self._clock.sleep(every_s)
                now = self._clock.now()
                stood_still = now - before > 2 * every_s
                if stood_still or now - self._anybody_at > self._timeout_s / 2:  # whom could we have heard?
                    self._heard_at.clear()
                self.sweep()
        finally:
            await subscription.unsubscribe()

    def sweep(self) -> None:
        now = self._clock.now()
        in_use = set(self._in_use())
        self._heard_at = {g: at for g, at in self._heard_at.items() if g in in_use}
        for gateway in in_use:
            heard_at = self._heard_at.setdefault(gateway, now)
            if not self._bus.connected:
                self._heard_at[gateway] = now
            elif now - heard_at > self._timeout_s:
                del self._heard_at[gateway]
                self._on_lost(gateway)

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            report = decode(WorkerReport, message.data)
        except MalformedMessage:
            self._counters.add("malformed_heartbeat")
            return
        self._anybody_at = self._clock.now()
        if report.peer in self._heard_at:
            self._heard_at[report.peer] = self._clock.now()
