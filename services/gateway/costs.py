"""Which way an interrupted answer's state comes back sooner: out of the stores, or computed anew by a prefill worker.

Rates are learned from what tickets say of themselves; until then they are guesses that favour the stores, as any
measurement so far has.
"""

from dataclasses import dataclass

from shared.protocol.messages import TicketTimings

_LEAST_TOKENS = 64
"""Of shorter prompts the fixed costs would pass for a rate."""
_WEIGHT = 0.3
"""Of the newest measurement."""


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
    """Seconds a position takes to be computed, and to be loaded; and what a load costs whatever its size."""

    compute_s: float = 1e-3
    load_s: float = 2e-5
    load_fixed_s: float = 0.02

    def note(self, timings: TicketTimings, trunk_len: int) -> None:
        """Of a ticket with so many positions before its first token."""
        computed = trunk_len - timings.cached_tokens
        if timings.prefill_s and computed >= _LEAST_TOKENS:
            self.compute_s += _WEIGHT * (timings.prefill_s / computed - self.compute_s)
        if timings.load_s and timings.loaded_tokens >= _LEAST_TOKENS:
            seconds = max(0.0, timings.load_s - self.load_fixed_s)
            self.load_s += _WEIGHT * (seconds / timings.loaded_tokens - self.load_s)

    def estimate(self, trunk_len: int, stored: int) -> Estimate:
        """stored: positions that the stores have; the last one of the trunk is computed in any case."""
        anew = trunk_len * self.compute_s
        stored = min(stored, trunk_len - 1)
        if stored <= 0:
            return Estimate(None, anew)
        return Estimate(self.load_fixed_s + stored * self.load_s + (trunk_len - stored) * self.compute_s, anew)
