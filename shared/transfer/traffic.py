"""What a sidecar has sent since its start, by class and backend: the figures behind the link's metrics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import Field

from shared.protocol.messages import OnWire
from shared.protocol.wire import WireModel
from shared.transfer.classes import TrafficClass


class Sent(WireModel):
    """Transfers that were confirmed. bytes: on the wire, by component and format. queue_s: they waited so long for
    their turns. busy_s: so long they were under way beyond that."""

    traffic: TrafficClass
    backend: str
    transfers: int = 0
    bytes: dict[str, dict[str, int]] = Field(default_factory=dict)
    queue_s: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Sums:
    transfers: int = 0
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    queue_s: float = 0.0
    busy_s: float = 0.0


class TrafficSums:
    """They only rise."""

    def __init__(self) -> None:
        self._sums: dict[tuple[TrafficClass, str], _Sums] = {}

    def add(
        self, traffic: TrafficClass, backend: str, on_wire: Iterable[OnWire], queue_s: float, busy_s: float
    ) -> None:
        """One confirmed transfer."""
        sums = self._sums.setdefault((traffic, backend), _Sums())
        sums.transfers += 1
        sums.queue_s += queue_s
        sums.busy_s += busy_s
        for one in on_wire:
            sums.bytes[one.name, one.wire_format] += one.num_bytes

    def sent(self) -> tuple[Sent, ...]:
        return tuple(
            Sent(
                traffic=traffic,
                backend=backend,
                transfers=sums.transfers,
                bytes=_nested(sums.bytes),
                queue_s=sums.queue_s,
                busy_s=sums.busy_s,
            )
            for (traffic, backend), sums in sorted(self._sums.items())
        )

    def as_counters(self) -> dict[str, int]:
        """The same, rounded, for reports: by class alone, under names that no backend has."""
        found: Counter[str] = Counter()
        for (traffic, _), sums in sorted(self._sums.items()):
            found[f"class_{traffic}"] += sums.transfers
            found[f"class_{traffic}_bytes"] += sums.bytes.total()
            found[f"class_{traffic}_queue_ms"] += round(1000 * sums.queue_s)
        return dict(found)


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (component, wire_format), count in sorted(counts.items()):
        found.setdefault(component, {})[wire_format] = count
    return found
