"""Who is next when room is scarce: first come, first served among those of one priority, and the smaller number before
all others; with a bounded bypass. Before everybody comes who was being served and has lost its workers. Pure: the
time is passed in.

A request that does not fit waits; later ones that do fit may pass it, a bounded number of times or for a bounded time.
Then it is *due*: the workers it aims at are kept for it, nobody behind it is sent there, and so they empty until it
fits. What it does not lack stays open to the others. Nothing is held while waiting: what is served is served whole.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LineSettings:
    """passes, patience_s: how often, and how long after its arrival, later requests may pass one that waits. reach: how
    many of the line are looked at in one go."""

    passes: int = 32
    patience_s: float = 2.0
    reach: int = 64


@dataclass(eq=False, slots=True)
class Place:
    """A request's place in the line, by its priority and arrival; kept while it is tried, so that it never has to queue
    anew. lost_at: when it last lost the workers that were serving it. stranded: there is no worker that it could wait
    for. kept: workers whose room is kept for it, while it waits."""

    since: float
    priority: int = 0
    lost_at: float | None = None
    passed: int = 0
    stranded: bool = False
    kept: frozenset[str] = field(default_factory=frozenset)


Serve = Callable[[Place, frozenset[str]], bool]
"""Serves a place if there is room outside of the given workers; False: it has to wait."""
Lacks = Callable[[Place, frozenset[str]], frozenset[str]]
"""The workers a place aims at that lack room for it, outside of the given ones."""


class Line:
    """Those who wait, in order: who has lost its workers first, then eldest first within a priority."""

    def __init__(self, settings: LineSettings = LineSettings()) -> None:
        self.settings = settings
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self, place: Place) -> None:
        place.kept = frozenset()
        insort(self._places, place, key=lambda p: (p.lost_at is None, p.priority, p.since))

    def leave(self, place: Place) -> None:
        if place in self._places:
            self._places.remove(place)

    def is_due(self, place: Place, now: float) -> bool:
        waited_long = place.passed >= self.settings.passes or now - place.since >= self.settings.patience_s
        return waited_long or place.lost_at is not None

    def advance(self, now: float, serve: Serve, lacks: Lacks) -> None:
        """Serves whoever can be served now, in order; those leave the line."""
        waiting: list[Place] = []
        kept: frozenset[str] = frozenset()
        looked_at = 0
        for place in list(self._places):
            if looked_at == self.settings.reach:
                break
            served = serve(place, kept)
            if place.stranded:
                place.kept = frozenset()
                continue
            looked_at += 1
            if not served:
                waiting.append(place)
                kept |= self._keep(place, kept, now, lacks)
                continue
            self.leave(place)
            for elder in waiting:
                elder.passed += 1
                kept |= self._keep(elder, kept, now, lacks)

    def _keep(self, place: Place, kept: frozenset[str], now: float, lacks: Lacks) -> frozenset[str]:
        if self.is_due(place, now):
            place.kept |= lacks(place, kept)
        return place.kept
