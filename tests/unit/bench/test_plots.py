"""Plots are drawn from the data, and are PNG files."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.bench.campaign import Campaign, Run
from services.bench.errors import BenchError
from services.bench.figures.goodput import Limits
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import summarize
from services.bench.options import BenchOptions, CampaignOptions, NamedTarget
from services.bench.run import BenchResult
from services.bench.show.plots import (
    cdf,
    check_matplotlib,
    gap_points,
    gaps_over_time,
    goodput_against_rate,
    goodput_points,
    write_plots,
)
from services.bench.wire.client import Target

LIMITS = Limits(1.0, 0.5)


def result(chunk_s: list[float]) -> BenchResult:
    record = RequestRecord(0, 0.0, 0.0, outcome="ok", ended_s=chunk_s[-1], chunk_s=chunk_s)
    summary = summarize([record], LIMITS)
    return BenchResult(BenchOptions(), Target("http://x", "completions", "m"), [record], summary, stopped=False)


def run(target: str, rate: float | None, chunk_s: list[float], number: int = 1) -> Run:
    return Run(target, rate, number, result(chunk_s))


def drawn(line: object) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]  # type: ignore[attr-defined]


def test_gaps_over_time() -> None:
    points = {"a": gap_points(result([0.5, 0.75, 1.75]).records), "b": []}
    (axes,) = gaps_over_time(points, LIMITS).axes
    line, limit = axes.lines
    assert drawn(line) == [(0.75, 250.0), (1.75, 1000.0)]
    assert set(limit.get_ydata()) == {500.0}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a"]


def test_a_cdf() -> None:
    (axes,) = cdf({"a": [0.3, 0.1, 0.2, 0.4], "b": [1.0]}, "time (ms)", None).axes
    first, second = axes.lines
    assert drawn(first) == [(100.0, 0.25), (200.0, 0.5), (300.0, 0.75), (400.0, 1.0)]
    assert drawn(second) == [(1000.0, 1.0)]
    assert axes.get_xlabel() == "time (ms)"


def test_goodput_against_rate_takes_the_median_of_rounds() -> None:
    good, bad = [0.5, 1.0], [2.0, 4.0]
    runs = [run("a", 2.0, chunk_s, number) for number, chunk_s in enumerate((bad, good, bad), 1)]
    runs += [run("a", 1.0, good), run("b", 1.0, bad)]
    stopped = Run("b", 2.0, 2, replace(result(good), stopped=True))
    points = goodput_points([*runs, stopped])
    assert points == {"a": [(1.0, 1.0), (2.0, 0.0)], "b": [(1.0, 0.0)]}
    (axes,) = goodput_against_rate(points, LIMITS).axes
    ideal, first, second = axes.lines
    assert (drawn(ideal), drawn(first), drawn(second)) == ([(1.0, 1.0), (2.0, 2.0)], points["a"], points["b"])


def test_files_are_png(tmp_path: Path) -> None:
    targets = (NamedTarget("a", "x"), NamedTarget("b", "y"))
    options = CampaignOptions(BenchOptions(rate=1.0, limits=LIMITS), targets, rates=(1.0, 2.0))
    runs = [run(name, rate, [0.5, 0.75, 1.75]) for rate in (1.0, 2.0) for name in ("a", "b")]
    paths = write_plots(tmp_path, Campaign(options, runs))
    assert [path.name for path in paths] == [
        "gaps-over-time.png",
        "first-token-cdf.png",
        "gap-cdf.png",
        "goodput-rate.png",
    ]
    contents = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000 for content in contents)
    assert len(set(contents)) == 4


def test_nothing_was_answered(tmp_path: Path) -> None:
    failed = [RequestRecord(0, 0.0, 0.0, outcome="error", ended_s=1.0)]
    empty = replace(result([1.0]), records=failed, summary=summarize(failed))
    paths = write_plots(tmp_path, Campaign(CampaignOptions(BenchOptions()), [Run("target", None, 1, empty)]))
    assert len(paths) == 3


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchError, match=r"plots need matplotlib, which is not installed; say pip install matplotlib"):
        check_matplotlib()
