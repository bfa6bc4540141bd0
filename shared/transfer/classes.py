"""Who sends next: traffic classes, and the scheduler of a sidecar's bursts. Pure: it is told the time (`gate.py` lets
threads wait for it).

A transfer gets a *seat* at its peer when it comes up, by class, so that no class takes another's place there. Seated,
it sends *bursts*, each of which it asks for; asking says that the one before is over. Who may send:

- A higher class goes first, and within a class the request with the smaller priority number. While a transfer that goes
  first has something to send, the others send nothing, also to other peers: they would share its network and its
  processor. A burst that takes longer than `patience_s` holds back nobody but its own peer.
- Each class has a share: it may send as soon as it is owed a burst's worth of the bytes that the others have sent
  while it had something to send.
- Whoever has waited for `promote_s` counts one class higher, and after the highest is *overdue*: those go before all
  others, in the order of their waiting. So whatever the others do, everybody's next burst comes.
- Background never exceeds its cap, whatever its share and age.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from shared.runtime.bursts import polite_burst


class TrafficClass(StrEnum):
    """Highest first. last: the last chunk of a hand-off. recovery: stored state that a request waits for. background:
    checkpoints and offloading."""

    LAST = "last"
    HANDOFF = "handoff"
    RECOVERY = "recovery"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a transfer is, and whose: of two of a class the one with the smaller priority number goes first."""

    traffic: TrafficClass = TrafficClass.HANDOFF
    priority: int = 0


HANDOFF = Standing()
RANKS: Mapping[TrafficClass, int] = MappingProxyType({traffic: rank for rank, traffic in enumerate(TrafficClass)})
_MIB = 1 << 20
_ROUNDING_BYTES = 1.0
_NEARLY_ALL = 1 - 1e-9


def _shares() -> Mapping[TrafficClass, float]:
    return {
        TrafficClass.LAST: 0.5,
        TrafficClass.HANDOFF: 0.2,
        TrafficClass.RECOVERY: 0.1,
        TrafficClass.BACKGROUND: 0.03,
    }


def _seats() -> Mapping[TrafficClass, int]:
    return {
        TrafficClass.LAST: 2,
        TrafficClass.HANDOFF: 2,
        TrafficClass.RECOVERY: 1,
        TrafficClass.BACKGROUND: 1,
    }


@dataclass(frozen=True, slots=True)
class Rules:
    """burst_bytes: longest burst. window_bytes: what recovery and background may have sent that has not arrived yet, so
    that little of it is ahead of a hand-off in the network's queues; 0: any. width: bursts under way to one peer at
    once. background_bytes_per_s: cap for each peer; None: none. classes: False: all transfers are of one class, for
    comparison."""

    burst_bytes: int = 4 * _MIB
    window_bytes: int = 0
    width: int = 2
    shares: Mapping[TrafficClass, float] = field(default_factory=_shares)
    seats: Mapping[TrafficClass, int] = field(default_factory=_seats)
    promote_s: float = 1.0
    patience_s: float = 0.25
    background_bytes_per_s: float | None = None
    classes: bool = True

    @property
    def polite_burst_bytes(self) -> int:
        """Longest burst of recovery and background."""
        return polite_burst(self.burst_bytes, self.window_bytes)


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer in hand. asked: bytes of the burst it waits for; burst: of the one under way; 0: there is none. since:
    when it entered, or asked. moved_at: when its burst began."""

    link: str
    traffic: TrafficClass
    priority: int
    number: int
    since: float
    seated: bool = False
    asked: int = 0
    burst: int = 0
    moved_at: float = 0.0

    @property
    def rank(self) -> int:
        return RANKS[self.traffic]

    @property
    def has_something(self) -> bool:
        return bool(self.asked or self.burst)


@dataclass(slots=True)
class _Bucket:
    """What background may send to one peer: `level` bytes at the time `at`, `rate` more a second, `depth` at most."""

    rate: float
    depth: float
    level: float
    at: float

    def may_take(self, num_bytes: int, now: float) -> bool:
        self._fill(now)
        return self.level >= min(num_bytes, self.depth) - _ROUNDING_BYTES

    def ready_at(self, num_bytes: int, now: float) -> float:
        self._fill(now)
        return now + max(0.0, min(num_bytes, self.depth) - self.level) / self.rate

    def take(self, num_bytes: int) -> None:
        self.level -= num_bytes

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self.level >= self.depth

    def _fill(self, now: float) -> None:
        self.level = min(self.depth, self.level + self.rate * max(0.0, now - self.at))
        self.at = max(self.at, now)


class Scheduler:
    """After every call that changes something `advance` says whose turn it is now."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._flows: dict[Flow, None] = {}
        self._credit = dict.fromkeys(TrafficClass, 0.0)
        """Bytes that a class is owed."""
        self._buckets: dict[str, _Bucket] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._flows)

    def enter(self, link: str, standing: Standing, now: float) -> Flow:
        """A transfer to a peer, whose name is `link`, comes up. It waits for its seat."""
        standing = standing if self.rules.classes else HANDOFF
        flow = Flow(link, standing.traffic, standing.priority, next(self._numbers), now)
        self._flows[flow] = None
        return flow

    def raise_to(self, flow: Flow, traffic: TrafficClass) -> None:
        """Somebody of a higher class waits for this one."""
        if self.rules.classes and RANKS[traffic] < flow.rank:
            flow.traffic = traffic

    def ask(self, flow: Flow, num_bytes: int, now: float) -> None:
        """Its burst, if it had one, is over, and it has another one to send."""
        if not flow.seated or num_bytes < 1:
            raise ValueError("only who has a seat asks, and for something")
        flow.burst, flow.asked, flow.since = 0, num_bytes, now

    def rest(self, flow: Flow) -> None:
        """Its burst is over and it has nothing to send for now: it holds nobody back."""
        flow.burst = flow.asked = 0

    def leave(self, flow: Flow, now: float) -> None:
        """Idempotent."""
        self._flows.pop(flow, None)
        in_use = {other.link for other in self._flows}
        for link, bucket in list(self._buckets.items()):
            if link not in in_use and bucket.is_full(now):
                del self._buckets[link]

    def advance(self, now: float) -> list[Flow]:
        """Those that got a seat or a burst."""
        found = self._give_seats(now)
        while (flow := self._next(now)) is not None:
            self._grant(flow, now)
            found.append(flow)
        return found

    def next_at(self, now: float) -> float | None:
        """When time alone may give somebody a burst; None: never."""
        times: list[float] = []
        for flow in self._flows:
            if flow.asked:
                levels = range(1, flow.rank + 2)
                times += [flow.since + k * self.rules.promote_s for k in levels]
                if (bucket := self._bucket(flow, now)) is not None:
                    times.append(bucket.ready_at(flow.asked, now))
            elif flow.burst:
                times.append(flow.moved_at + self.rules.patience_s)
        if not any(flow.asked for flow in self._flows):
            return None
        return min((at for at in times if at > now), default=None)

    def _give_seats(self, now: float) -> list[Flow]:
        taken = Counter((flow.link, flow.traffic) for flow in self._flows if flow.seated)
        found = []
        for flow in sorted((f for f in self._flows if not f.seated), key=lambda f: self._order(f, now)):
            if taken[flow.link, flow.traffic] < self.rules.seats[flow.traffic]:
                taken[flow.link, flow.traffic] += 1
                flow.seated = True
                found.append(flow)
        return found

    def _next(self, now: float) -> Flow | None:
        waiting = [flow for flow in self._flows if flow.asked]
        if not waiting:
            return None
        running = Counter(flow.link for flow in self._flows if flow.burst)
        for flow in sorted(waiting, key=lambda f: self._order(f, now)):
            if running[flow.link] < self.rules.width and self._may_send(flow, now):
                return flow
        return None

    def _may_send(self, flow: Flow, now: float) -> bool:
        bucket = self._bucket(flow, now)
        if bucket is not None and not bucket.may_take(flow.asked, now):
            return False
        if self._is_owed(flow) or self._level(flow, now) < 0:
            return True
        return not any(self._holds_back(other, flow, now) for other in self._flows)

    def _holds_back(self, other: Flow, flow: Flow, now: float) -> bool:
        """By its class as it is: who was promoted goes first, but holds nobody back while it cannot go. At another
        peer only by what it is sending."""
        is_sending = other.burst and now < other.moved_at + self.rules.patience_s
        at_work = other.has_something if other.link == flow.link else is_sending
        return bool(at_work) and (other.rank, other.priority) < (self._level(flow, now), flow.priority)

    def _grant(self, flow: Flow, now: float) -> None:
        size = flow.asked
        for traffic in TrafficClass:
            wanted = max((f.asked or f.burst for f in self._flows if f.traffic is traffic), default=0)
            self._credit[traffic] = min(self._credit[traffic] + self.rules.shares[traffic] * size, 2.0 * wanted)
        self._credit[flow.traffic] = max(0.0, self._credit[flow.traffic] - size)
        if (bucket := self._bucket(flow, now)) is not None:
            bucket.take(size)
        flow.asked, flow.burst, flow.moved_at = 0, size, now

    def _order(self, flow: Flow, now: float) -> tuple[float, ...]:
        if self._is_owed(flow):
            return 0, flow.rank, flow.priority, flow.number
        level = self._level(flow, now)
        return (1, flow.since, flow.number) if level < 0 else (2, level, flow.priority, flow.number)

    def _is_owed(self, flow: Flow) -> bool:
        return bool(flow.asked) and self._credit[flow.traffic] >= flow.asked * _NEARLY_ALL

    def _level(self, flow: Flow, now: float) -> int:
        """Its rank, less one for each `promote_s` it has waited; below 0: overdue."""
        waits = flow.asked or not flow.seated
        levels = range(1, flow.rank + 2)
        return flow.rank - sum(now >= flow.since + k * self.rules.promote_s for k in levels if waits)

    def _bucket(self, flow: Flow, now: float) -> _Bucket | None:
        rate = self.rules.background_bytes_per_s
        if flow.traffic is not TrafficClass.BACKGROUND or rate is None:
            return None
        bucket = self._buckets.get(flow.link)
        if bucket is None:
            depth = float(self.rules.polite_burst_bytes)
            bucket = self._buckets[flow.link] = _Bucket(rate, depth, depth, now)
        return bucket
