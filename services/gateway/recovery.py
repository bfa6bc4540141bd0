"""The losses of one request that had tokens already, and how it went on after each: their limit, counts and times."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.errors import BatonError


@dataclass(slots=True)
class Recovery:
    """cause: the code of what was lost. detected_s, resumed_s: when the gateway knew, and when the next token came, in
    seconds from the request's arrival; without one it ended in another loss, or not at all. path: which way the
    state came anew."""

    cause: str
    detected_s: float
    resumed_s: float | None = None
    path: str | None = None


class Recoveries:
    """Of one request, which arrived at `begun_at`. most: how many there may be."""

    def __init__(self, clock: Clock, counters: Counters, begun_at: float, most: int) -> None:
        self._clock = clock
        self._counters = counters
        self._begun_at = begun_at
        self._most = most
        self._list: list[Recovery] = []
        self.under_way: BatonError | None = None
        """What was lost, until the next token comes."""

    def __len__(self) -> int:
        return len(self._list)

    @property
    def exhausted(self) -> bool:
        return len(self._list) >= self._most

    def begin(self, lost: BatonError) -> None:
        """Another attempt takes the request up."""
        self.under_way = lost
        self._list.append(Recovery(lost.code, self._clock.now() - self._begun_at))
        self._counters.add("recoveries")
        self._counters.add(f"recoveries_{lost.code}")

    def resumed(self, path: str) -> None:
        """A token came, as they do all the time: any but the first after a loss changes nothing."""
        if self.under_way is not None:
            self.under_way = None
            self._list[-1].resumed_s = self._clock.now() - self._begun_at
            self._list[-1].path = path
            self._counters.add("recoveries_resumed")

    def as_list(self) -> Sequence[dict[str, object]]:
        """The body of `baton.timings.recovery`."""
        return [asdict(recovery) for recovery in self._list]
