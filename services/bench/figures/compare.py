"""Several servers side by side: medians over rounds, and ratios against the first server. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from services.bench.figures.distribution import Distribution
from services.bench.figures.summary import Summary

T = TypeVar("T")
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    less_is_better: bool
    of: Callable[[Summary], float | None]


def _ms(take: Callable[[Summary], Distribution | None], percentile: str) -> Callable[[Summary], float | None]:
    def of(summary: Summary) -> float | None:
        found = take(summary)
        return None if found is None else float(getattr(found, percentile)) * _MS

    return of


METRICS = (
    Metric("output", "tokens/s", False, lambda summary: summary.tokens_per_s),
    Metric("answered", "requests/s", False, lambda summary: summary.requests_per_s),
    Metric("failed", "requests", True, lambda summary: float(summary.failed)),
    Metric("goodput", "requests/s", False, lambda summary: summary.goodput.requests_per_s),
    Metric("goodput share", "", False, lambda summary: summary.goodput.share),
    Metric("queue p50", "ms", True, _ms(lambda summary: summary.queue_s, "p50")),
    Metric("first token p50", "ms", True, _ms(lambda summary: summary.ttft_s, "p50")),
    Metric("first token p99", "ms", True, _ms(lambda summary: summary.ttft_s, "p99")),
    Metric("handoff gap p50", "ms", True, _ms(lambda summary: summary.handoff_gap_s, "p50")),
    Metric("gap p50", "ms", True, _ms(lambda summary: summary.gap_s, "p50")),
    Metric("gap p90", "ms", True, _ms(lambda summary: summary.gap_s, "p90")),
    Metric("gap p99", "ms", True, _ms(lambda summary: summary.gap_s, "p99")),
    Metric("largest gap p50", "ms", True, _ms(lambda summary: summary.largest_gap_s, "p50")),
    Metric("largest gap p99", "ms", True, _ms(lambda summary: summary.largest_gap_s, "p99")),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. rate: of its load, None where it has none."""

    target: str
    rate: float | None
    summary: Summary


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure at one rate. values: the median of each target's runs; ratios: against the first target, the larger
    the better, which has none itself. None: not known."""

    metric: str
    unit: str
    rate: float | None
    values: dict[str, float | None]
    ratios: dict[str, float | None]
    runs: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["ratios"] = {name: _finite(ratio) for name, ratio in self.ratios.items()}
        return found


def compare(measured: Sequence[Measured]) -> list[Compared]:
    """Targets and rates in the order in which they first appear. Figures that nobody has are left out."""
    targets, rates = _distinct(each.target for each in measured), _distinct(each.rate for each in measured)
    rows = [_row(metric, rate, targets, measured) for rate in rates for metric in METRICS]
    return [row for row in rows if any(row.runs.values())]


def ratio(value: float, against: float, less_is_better: bool) -> float:
    """The larger the better; two zeros are equal."""
    above, below = (against, value) if less_is_better else (value, against)
    if below == 0:
        return 1.0 if above == 0 else math.inf
    return above / below


def _row(metric: Metric, rate: float | None, targets: Sequence[str], measured: Sequence[Measured]) -> Compared:
    runs: dict[str, list[float]] = {target: [] for target in targets}
    for each in measured:
        found = metric.of(each.summary) if each.rate == rate else None
        if found is not None:
            runs[each.target].append(found)
    values = {target: median(found) if found else None for target, found in runs.items()}
    first = values[targets[0]]
    ratios: dict[str, float | None] = {}
    for target in targets[1:]:
        value = values[target]
        if value is None or first is None:
            ratios[target] = None
        else:
            ratios[target] = ratio(value, first, metric.less_is_better)
    return Compared(metric.name, metric.unit, rate, values, ratios, runs)


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None
