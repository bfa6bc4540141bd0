"""Which kvstores there are, by their heartbeats."""

from shared.bus.base import Message, Subscription
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import MalformedMessage, decode
from shared.runtime.deps import Deps


class Roster:
    """`start` subscribes, `stop` ends it. timeout_s: a store that was silent for so long is not there."""

    def __init__(self, deps: Deps, timeout_s: float = 3.0) -> None:
        self._deps, self._timeout_s = deps, timeout_s
        self._heard: dict[str, tuple[str, float]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._deps.bus.subscribe(subjects.heartbeats_of("kvstore"), self._on_heartbeat)
        await self._deps.bus.publish(subjects.hello(), b"")

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def stores(self) -> dict[str, str]:
        """name -> peer, of those that are ready."""
        oldest = self._deps.clock.now() - self._timeout_s
        return {name: peer for name, (peer, heard_at) in self._heard.items() if heard_at >= oldest}

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            report = decode(WorkerReport, message.data)
        except MalformedMessage:
            self._deps.counters.add("malformed_heartbeat")
            return
        if report.state == "ready":
            self._heard[report.id] = report.peer, self._deps.clock.now()
        elif (known := self._heard.get(report.id)) is not None and known[0] == report.peer:
            del self._heard[report.id]
