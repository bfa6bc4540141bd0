"""Who may take room on a worker while others wait for it. Pure: the time is passed in.

A worker alone knows what it has, and several gateways compete for it. A reservation that finds no room leaves a
*claim*: who asked, how much, since when. Later ones may be let past it a bounded number of times or for a bounded time;
then its room is kept, and nobody who came later gets in unless both fit. A claim that is not asked for again soon is
void, so a gateway that dies or a client that leaves holds nothing for long.

A claim holds no pages, and the order of claims is that of the requests, by priority and then by age, the same on every
worker: two requests that need the same two workers cannot each keep one of them from the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.runtime.errors import PoolExhausted


@dataclass(frozen=True, slots=True)
class Need:
    """What a reservation takes."""

    pages: int
    slots: int

    def __add__(self, other: "Need") -> "Need":
        return Need(self.pages + other.pages, self.slots + other.slots)

    def fits(self, free: "Need") -> bool:
        return self.pages <= free.pages and self.slots <= free.slots


@dataclass(frozen=True, slots=True)
class ClaimSettings:
    """passes, patience_s: how often, and how long after its arrival, later requests may be let past one that waits.
    expire_s: a claim that was not repeated for so long is void. capacity: claims that are remembered."""

    passes: int = 16
    patience_s: float = 2.0
    expire_s: float = 2.0
    capacity: int = 64


@dataclass(slots=True)
class Claim:
    """since: when the request arrived at its gateway, by our clock. passed: how many got in before it meanwhile."""

    request_id: str
    need: Need
    since: float
    asked_at: float
    priority: int = 0
    passed: int = 0

    @property
    def order(self) -> tuple[int, float, str]:
        return self.priority, self.since, self.request_id


class Claims:
    """The claims of one worker, by request. Bounded: beyond `capacity` the last is not remembered."""

    def __init__(self, settings: ClaimSettings = ClaimSettings()) -> None:
        self.settings = settings
        self._claims: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def check(self, request_id: str, need: Need, since: float, free: Need, now: float, priority: int = 0) -> None:
        """Raises PoolExhausted where room is kept for those who came before."""
        kept = Need(0, 0)
        num_kept = 0
        for claim in self._before(request_id, since, now, priority):
            if self._is_due(claim, now):
                kept += claim.need
                num_kept += 1
        if num_kept and not (need + kept).fits(free):
            raise PoolExhausted(f"{num_kept} requests that came earlier wait for room ({kept.pages} pages)")

    def leave(self, request_id: str, need: Need, since: float, now: float, priority: int = 0) -> None:
        """The request found no room; asked again, it keeps its place."""
        self._sweep(now)
        claim = self._claims.get(request_id)
        if claim is not None:
            claim.need, claim.since, claim.asked_at = need, min(claim.since, since), now
            return
        if len(self._claims) >= self.settings.capacity:
            last = max(self._claims.values(), key=lambda c: c.order)
            if last.order < (priority, since, request_id):
                return
            del self._claims[last.request_id]
        self._claims[request_id] = Claim(request_id, need, since, now, priority)

    def entered(self, request_id: str, since: float, now: float, priority: int = 0) -> None:
        """The request has its room: whoever came before and still waits was passed."""
        for claim in self._before(request_id, since, now, priority):
            claim.passed += 1
        self._claims.pop(request_id, None)

    def _before(self, request_id: str, since: float, now: float, priority: int) -> Iterator[Claim]:
        self._sweep(now)
        own = self._claims.get(request_id)
        order = (priority, since if own is None else min(own.since, since), request_id)
        return (c for c in list(self._claims.values()) if c.order < order)

    def _is_due(self, claim: Claim, now: float) -> bool:
        return claim.passed >= self.settings.passes or now - claim.since >= self.settings.patience_s

    def _sweep(self, now: float) -> None:
        oldest = now - self.settings.expire_s
        self._claims = {key: claim for key, claim in self._claims.items() if claim.asked_at >= oldest}
