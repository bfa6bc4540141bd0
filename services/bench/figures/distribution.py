"""How values are spread: the figures that every table and file has of them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest of `ordered`, in proportion: at 0 the first, at 100 the last. Not empty."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution | None":
        """None values are left out; None where nothing is left."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
