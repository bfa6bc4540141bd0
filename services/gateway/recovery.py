"""The losses of one request that had tokens already, and how it went on after each: their limit, counts and times."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shared.protocol.messages import TicketTimings
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.errors import BatonError


@dataclass(slots=True)
class Recovery:
    """cause: the code of what was lost. detected_s, resumed_s: when the gateway knew, and when the next token came, in
    seconds from the request's arrival; without one it ended in another loss, or not at all. path: which way the
    state came anew. estimated_s: how long that was expected to take. loaded_tokens, loaded_bytes: what the stores
    brought. recomputed_tokens: positions before the next token that were computed again."""

    cause: str
    detected_s: float
    resumed_s: float | None = None
    path: str | None = None
    estimated_s: float | None = None
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    recomputed_tokens: int | None = None


class Recoveries:
    """Of one request, which arrived at `begun_at`. most: how many there may be."""

    def __init__(self, clock: Clock, counters: Counters, begun_at: float, most: int) -> None:
        self._clock = clock
        self._counters = counters
        self._begun_at = begun_at
        self._most = most
        self._list: list[Recovery] = []
        self._num_lost = 0
        self.under_way: BatonError | None = None
        """What was lost, until the next token comes."""

    def __len__(self) -> int:
        return len(self._list)

    @property
    def exhausted(self) -> bool:
        return self._num_lost >= self._most

    def begin(self, lost: BatonError, *, planned: bool = False) -> None:
        """Another attempt takes the request up. planned: nothing was lost, its worker is about to end."""
        self.under_way = lost
        self._num_lost += not planned
        self._list.append(Recovery(lost.code, self._clock.now() - self._begun_at))
        self._counters.add("recoveries")
        self._counters.add(f"recoveries_{lost.code}")

    def expect(self, seconds: float | None) -> None:
        """How long the state will take to come."""
        if self.under_way is not None:
            self._list[-1].estimated_s = seconds

    def resumed(self, path: str, ticket: TicketTimings, trunk_len: int) -> None:
        """A token came, as they do all the time: any but the first after a loss changes nothing. ticket: what it says
        of itself. trunk_len: positions whose state it needed."""
        if self.under_way is None:
            return
        self.under_way = None
        last = self._list[-1]
        last.resumed_s, last.path = self._clock.now() - self._begun_at, path
        if path in ("store", "hybrid"):
            last.loaded_tokens, last.loaded_bytes = ticket.loaded_tokens, ticket.loaded_bytes
        last.recomputed_tokens = trunk_len - ticket.cached_tokens
        self._counters.add("recoveries_resumed")
        self._counters.add(f"recoveries_by_{path}")
        if last.estimated_s is not None:
            off_s = abs(last.resumed_s - last.detected_s - last.estimated_s)
            self._counters.add("recovery_estimate_off_ms", round(1000 * off_s))

    def as_list(self) -> Sequence[dict[str, object]]:
        """The body of `baton.timings.recovery`."""
        return [asdict(recovery) for recovery in self._list]
