"""Which way an interrupted answer's state comes back sooner: out of the stores, or computed anew by a prefill worker.

Rates are learned from what tickets say of themselves; until then they are guesses that favour the stores, as any
measurement so far has. What was learned of the stores fades: one that was slow is used no more, so only time can show
that it has become fast again.
"""

from dataclasses import dataclass, field
from math import exp2

from shared.protocol.messages import TicketTimings
from shared.runtime.clock import Clock

_LEAST_TOKENS = 64
"""Of shorter prompts the fixed costs would pass for a rate."""
_WEIGHT = 0.3
"""Of the newest measurement."""
_LOAD_GUESS_S = 2e-5
LOAD_HALF_LIFE_S = 60.0
"""Without a load for so long, half of the way back from the learned rate to the guess is gone."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until the next token, by either way. store: None where the stores have nothing."""

    store_s: float | None
    prefill_s: float

    @property
    def from_store(self) -> bool:
        return self.store_s is not None and self.store_s < self.prefill_s


@dataclass(slots=True)
class Rates:
    """Seconds a position takes to be computed, to be sent by a prefill worker, and to be loaded; and what a load costs
    whatever its size. load_s: as of `loaded_at`. clock: without one nothing fades."""

    compute_s: float = 1e-3
    send_s: float = 2e-5
    load_s: float = _LOAD_GUESS_S
    load_fixed_s: float = 0.02
    loaded_at: float = 0.0
    clock: Clock | None = field(default=None, compare=False)

    def note(self, timings: TicketTimings, trunk_len: int) -> None:
        """Of a ticket with so many positions before its first token."""
        computed = trunk_len - timings.cached_tokens
        if timings.prefill_s and computed >= _LEAST_TOKENS:
            self.compute_s += _WEIGHT * (timings.prefill_s / computed - self.compute_s)
        sent = trunk_len - timings.held_tokens - timings.loaded_tokens
        if timings.moved_s and sent >= _LEAST_TOKENS:
            self.send_s += _WEIGHT * (timings.moved_s / sent - self.send_s)
        if timings.load_s and timings.loaded_tokens >= _LEAST_TOKENS:
            seconds = max(0.0, timings.load_s - self.load_fixed_s)
            self.load_s, self.loaded_at = self.load_now_s, self.clock.now() if self.clock is not None else 0.0
            self.load_s += _WEIGHT * (seconds / timings.loaded_tokens - self.load_s)

    def least_fetch(self) -> int:
        """Of at least so many positions that a prefill worker has as well the stores bring the state sooner than it; 0:
        never."""
        gain_s = self.send_s - self.load_now_s
        return max(_LEAST_TOKENS, round(self.load_fixed_s / gain_s)) if gain_s > 0 else 0

    @property
    def load_now_s(self) -> float:
        """What is left of `load_s`."""
        age_s = 0.0 if self.clock is None else self.clock.now() - self.loaded_at
        return _LOAD_GUESS_S + (self.load_s - _LOAD_GUESS_S) * exp2(-age_s / LOAD_HALF_LIFE_S)

    def estimate(self, trunk_len: int, stored: int) -> Estimate:
        """stored: positions that the stores have; the last one of the trunk is computed in any case."""
        anew = trunk_len * self.compute_s
        stored = min(stored, trunk_len - 1)
        if stored <= 0:
            return Estimate(None, anew)
        return Estimate(self.load_fixed_s + stored * self.load_now_s + (trunk_len - stored) * self.compute_s, anew)
