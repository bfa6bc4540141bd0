"""Circuit breakers: a leg of a worker that keeps failing is left alone for a while. Pure: the time is passed in.

One for each (worker, leg): `prefill`, `decode`, or `local` where D computes the prompt itself, because a D whose
transfers fail may well do without them. A peer's name holds its boot id, so a restart is a new peer and starts closed.

    closed      asked as usual; opens after failures in a row, or when half of the latest outcomes were failures
    open        not asked while another worker can be; each further time it stays open twice as long, up to a limit
    half-open   its time is over: one request is let through; its success closes, its failure opens again

Only a failure that a leg is blamed for counts: never a client's mistake, a refusal for want of room, or a cancel. The
two ends of a transfer cannot tell which of them broke it, so both are blamed; the healthy one's next success clears it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from shared.runtime.errors import (
    BatonError,
    Corrupt,
    EngineError,
    PeerLost,
    ProtocolError,
    TransferError,
    TransferRefused,
    TransferTimeout,
)

Key = tuple[str, str]
"""(peer, leg)."""
T = TypeVar("T")

_BOTH_ENDS = frozenset(kind.code for kind in (TransferError, TransferTimeout, TransferRefused, Corrupt))
_ONE_LEG = frozenset(kind.code for kind in (BatonError, PeerLost, EngineError, ProtocolError))
_CAPACITY = 1024


class Health(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """in_a_row: failures that open it. latest: outcomes that are remembered; with half of `at_least` or more of them
    failures it opens too. open_s, max_open_s: how long it stays open first, and at most."""

    in_a_row: int = 3
    latest: int = 16
    at_least: int = 8
    open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """probe: the room of the request that was let through while half-open."""

    settings: BreakerSettings
    outcomes: deque[bool]
    failures_in_a_row: int = 0
    times_opened: int = 0
    opened_at: float = float("-inf")
    open_until: float | None = None
    probe: int | None = None

    def health(self, now: float) -> Health:
        if self.open_until is None:
            return Health.CLOSED
        return Health.OPEN if now < self.open_until else Health.HALF_OPEN

    def is_shut(self, now: float) -> bool:
        """Whether nobody should be sent there now."""
        health = self.health(now)
        return health is Health.OPEN or (health is Health.HALF_OPEN and self.probe is not None)

    def badness(self, now: float) -> tuple[int, float]:
        """Orders those that are shut: the smallest is the least bad."""
        return self.times_opened, 0.0 if self.open_until is None else max(0.0, self.open_until - now)

    def succeeded(self) -> None:
        """Whatever the state: it works. How often it was opened is forgotten once it has worked for a while: what takes
        requests on and fails them later would else be back at once each time."""
        if self.open_until is not None:
            self.outcomes.clear()
        self.outcomes.append(True)
        self.failures_in_a_row = 0
        self.open_until = self.probe = None
        latest = list(self.outcomes)[-self.settings.in_a_row :]
        if len(latest) == self.settings.in_a_row and all(latest):
            self.times_opened = 0

    def failed(self, now: float, began_at: float) -> bool:
        """True where this opens it. What began before it opened last says nothing new."""
        if began_at < self.opened_at:
            return False
        if self.health(now) is Health.OPEN:  # used for want of another
            return False
        self.outcomes.append(False)
        self.failures_in_a_row += 1
        if self.open_until is None and not self._is_too_much():
            return False
        self.times_opened += 1
        open_s = min(self.settings.max_open_s, self.settings.open_s * 2 ** min(self.times_opened - 1, 30))
        self.opened_at, self.open_until, self.probe = now, now + open_s, None
        return True

    def _is_too_much(self) -> bool:
        num_bad = self.outcomes.count(False)
        often = len(self.outcomes) >= self.settings.at_least and 2 * num_bad >= len(self.outcomes)
        return often or self.failures_in_a_row >= self.settings.in_a_row


@dataclass(slots=True)
class Breakers:
    """Those of all workers. Only a leg that has failed of late has an entry; the number of entries is bounded."""

    settings: BreakerSettings = BreakerSettings()
    num_opened: int = 0
    _breakers: dict[Key, Breaker] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._breakers)

    def began(self, key: Key, room: int, now: float) -> None:
        """A request is sent there; of a half-open one it is the probe."""
        breaker = self._breakers.get(key)
        if breaker is not None and breaker.probe is None and breaker.health(now) is Health.HALF_OPEN:
            breaker.probe = room

    def released(self, key: Key, room: int) -> None:
        """That request is over, whatever became of it: it is a probe no longer."""
        breaker = self._breakers.get(key)
        if breaker is not None and breaker.probe == room:
            breaker.probe = None

    def succeeded(self, key: Key) -> None:
        breaker = self._breakers.get(key)
        if breaker is None:
            return
        breaker.succeeded()
        if all(breaker.outcomes) and len(breaker.outcomes) == breaker.outcomes.maxlen:
            del self._breakers[key]

    def failed(self, key: Key, now: float, began_at: float) -> None:
        breaker = self._breakers.get(key)
        if breaker is None:
            if len(self._breakers) >= _CAPACITY:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers[key] = Breaker(self.settings, deque(maxlen=self.settings.latest))
        self.num_opened += breaker.failed(now, began_at)

    def forget(self, peer: str) -> None:
        """That process is gone; its successor is another peer."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if key[0] != peer}

    def shut(self, now: float) -> dict[Key, tuple[int, float]]:
        """How bad those are that nobody should be sent to."""
        return {key: breaker.badness(now) for key, breaker in self._breakers.items() if breaker.is_shut(now)}

    def report(self, now: float) -> dict[Key, Health]:
        """Those that are not closed."""
        found = {key: breaker.health(now) for key, breaker in self._breakers.items()}
        return {key: health for key, health in found.items() if health is not Health.CLOSED}


def usable(
    workers: Sequence[T], leg: str, shut: Mapping[Key, tuple[int, float]], name: Callable[[T], str]
) -> Sequence[T]:
    """Those whose breaker lets a request through. Where all are shut, the least bad one: refusing everybody because of
    what was helps nobody, and its success is the quickest way back."""
    fit = [worker for worker in workers if (name(worker), leg) not in shut]
    if fit or not workers:
        return fit
    return [min(workers, key=lambda worker: (shut[name(worker), leg], name(worker)))]


def blamed(code: str, by: str, legs: Mapping[str, str]) -> tuple[str, ...]:
    """The peers to blame for a failure. legs: role -> peer of the attempt. Nobody, where `code` is no worker's fault
    or it is not known whose."""
    if code in _BOTH_ENDS or by == "link":
        return tuple(legs.values())
    return (legs[by],) if code in _ONE_LEG and by in legs else ()
