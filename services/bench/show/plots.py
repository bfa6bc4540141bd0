"""PNG plots of runs: gaps over time, how first tokens and gaps are spread, goodput against rate.

matplotlib is imported when a plot is made: `baton bench` starts fast without it. No global state of it is used.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from services.bench.campaign import Campaign, Run
from services.bench.errors import BenchError
from services.bench.figures.goodput import Limits
from services.bench.figures.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
_SIZE, _DPI = (8.0, 4.5), 120
_MS = 1000.0


def check_matplotlib() -> None:
    """BenchError where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BenchError(
            "plots need matplotlib, which is not installed; say pip install matplotlib, or install Baton as "
            "'baton-serving[bench]'"
        ) from error


def write_plots(directory: Path, campaign: Campaign) -> list[Path]:
    """All that the campaign has data for. Their paths."""
    limits = campaign.options.base.limits
    records = records_by_name(campaign.runs, by_rate=len(campaign.options.rates) > 1)
    figures = {"gaps-over-time": gaps_over_time({name: gap_points(found) for name, found in records.items()}, limits)}
    ttfts = {name: [record.ttft_s or 0.0 for record in _good(found)] for name, found in records.items()}
    gaps = {name: [gap for record in _good(found) for gap in record.gaps_s] for name, found in records.items()}
    figures["first-token-cdf"] = cdf(ttfts, "time to first token (ms)", limits.ttft_s)
    figures["gap-cdf"] = cdf(gaps, "gap between pieces of an answer (ms)", limits.gap_s)
    points = goodput_points(campaign.runs)
    if any(len(found) > 1 for found in points.values()):
        figures["goodput-rate"] = goodput_against_rate(points, limits)
    return [write(figure, directory / f"{name}.png") for name, figure in figures.items()]


def write(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, format="png", dpi=_DPI)
    return path


def records_by_name(runs: Sequence[Run], by_rate: bool) -> dict[str, list[RequestRecord]]:
    """All rounds of one server at one rate together."""
    found: dict[str, list[RequestRecord]] = defaultdict(list)
    for run in runs:
        found[f"{run.target}, {run.rate:g}/s" if by_rate else run.target] += run.result.records
    return dict(found)


def gap_points(records: Sequence[RequestRecord]) -> Points:
    """(when it ended, how long it was), in seconds, of every gap."""
    return [(later, later - earlier) for record in records for earlier, later in pairwise(record.chunk_s)]


def goodput_points(runs: Sequence[Run]) -> dict[str, Points]:
    """(rate, goodput) of each server, the medians over rounds."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.rate is not None and not run.result.stopped:
            found[run.target][run.rate].append(run.result.summary.goodput.requests_per_s)
    return {
        name: [(rate, median(values)) for rate, values in sorted(by_rate.items())] for name, by_rate in found.items()
    }


def gaps_over_time(points: Mapping[str, Points], limits: Limits) -> "Figure":
    """A dot for each gap, where it ended."""
    figure, axes = _figure("seconds since the load began", "gap between pieces of an answer (ms)")
    for name, found in points.items():
        if found:
            axes.plot(
                [at for at, _ in found], [gap * _MS for _, gap in found], ".", markersize=3, alpha=0.6, label=name
            )
    if any(points.values()):
        axes.set_yscale("log")
    if limits.gap_s is not None:
        axes.axhline(limits.gap_s * _MS, color="gray", linestyle="--", linewidth=1)
    return _with_legend(figure, axes)


def cdf(values: Mapping[str, Sequence[float]], label: str, limit_s: float | None) -> "Figure":
    """The share of values (seconds) that are at most so large."""
    figure, axes = _figure(label, "share")
    for name, found in values.items():
        if found:
            ordered = sorted(found)
            shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
            axes.step([value * _MS for value in ordered], shares, where="post", label=name)
    if any(values.values()):
        axes.set_xscale("log")
    if limit_s is not None:
        axes.axvline(limit_s * _MS, color="gray", linestyle="--", linewidth=1)
    axes.set_ylim(0.0, 1.02)
    return _with_legend(figure, axes)


def goodput_against_rate(points: Mapping[str, Points], limits: Limits) -> "Figure":
    """The gray line is where every request meets the limits."""
    figure, axes = _figure("requests sent per second", "requests per second that met the limits")
    axes.set_title(limits.describe())
    rates = sorted({rate for found in points.values() for rate, _ in found})
    axes.plot(rates, rates, color="gray", linestyle="--", linewidth=1)
    for name, found in points.items():
        axes.plot([rate for rate, _ in found], [good for _, good in found], marker="o", label=name)
    axes.set_ylim(bottom=0.0)
    return _with_legend(figure, axes)


def _figure(x_label: str, y_label: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _with_legend(figure: "Figure", axes: "Axes") -> "Figure":
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


def _good(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.outcome == "ok" and record.ttft_s is not None]
