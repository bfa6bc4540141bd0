"""`make bench-separation`: does it pay to separate prefill from decode? The same number of workers, the same engine and
the same requests, with and without.

One prefill and one decode worker against two workers that do both: whole prompts, and prompts in steps of several
budgets. Round by round, and each cluster is alone on the machine while it is measured. `docs/benchmarks.md` says what
each row means.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.local_cluster import REPO, LocalCluster
from benchmarks.report import RESULTS, Machine, Row, figure, print_rows, write_rows
from benchmarks.separation_loads import (
    CELLS,
    LIMITS,
    Capacity,
    Cell,
    GapRun,
    all_records,
    gap_load_s,
    measure_capacity,
    run_cell,
    run_gap_load,
    run_trace,
)
from services.bench.errors import BenchError
from services.bench.run import BenchResult
from services.bench.show.plots import cdf, check_matplotlib, gap_points, gaps_over_time, write

_GAP_GOAL = 5.0
_BUDGETS = (64, 128, 256)
_SEED_STEP = 100


@dataclass(frozen=True, slots=True)
class Setup:
    """flags: of `baton up`; two workers in each."""

    name: str
    flags: tuple[str, ...]


SEPARATED = Setup("separated", ("--prefill", "1", "--decode", "1"))
COLOCATED = Setup("colocated", ("--mode", "colocated", "--decode", "2"))
CHUNKED = tuple(
    Setup(f"chunked-{budget}", ("--mode", "chunked", "--step-tokens", str(budget), "--decode", "2"))
    for budget in _BUDGETS
)
SETUPS = (SEPARATED, COLOCATED, *CHUNKED)
_MAPPED = (SEPARATED, COLOCATED)
_TRACED = (SEPARATED, COLOCATED, CHUNKED[1])


@dataclass(slots=True)
class Found:
    """By the name of the setup, one for each round; the map's by place too, and in the first round only."""

    gaps: dict[str, list[GapRun]] = field(default_factory=lambda: defaultdict(list))
    traces: dict[str, list[BenchResult]] = field(default_factory=lambda: defaultdict(list))
    cells: dict[tuple[str, Cell], BenchResult] = field(default_factory=dict)


def main() -> None:
    asked = _parse()
    console, machine = Console(highlight=False), Machine.here()
    _check_modes()
    began, found = time.monotonic(), Found()
    console.print("how many long prompts one prefill worker takes …")
    with LocalCluster(*SEPARATED.flags) as cluster:
        capacity = measure_capacity(cluster.url)
    console.print(f"  {capacity.prompts_per_s:.3g} a second: the loads are 60 % of that")
    for number in range(asked.rounds):
        round_began = time.monotonic()
        for setup in SETUPS[number % len(SETUPS) :] + SETUPS[: number % len(SETUPS)]:
            _measure(
                console, f"round {number + 1} of {asked.rounds}, {setup.name}", setup, capacity, number, asked, found
            )
        now = time.monotonic()
        if now + (now - round_began) > began + asked.minutes * 60 and number + 1 < asked.rounds:
            console.print(f"{number + 1} of {asked.rounds} rounds fit into {asked.minutes:g} minutes", style="yellow")
            break
    rows = make_rows(found, capacity)
    print_rows(console, "bench-separation: 1 prefill and 1 decode worker against 2 that do both", rows, machine)
    console.print(f"written to {write_rows('separation', rows, machine)}", soft_wrap=True)
    _plot(console, found, RESULTS / "separation")


def _measure(
    console: Console, title: str, setup: Setup, capacity: Capacity, number: int, asked: argparse.Namespace, found: Found
) -> None:
    """All loads of one round at one cluster. Seeds go by round, so that all clusters get the same requests."""
    seed = number * _SEED_STEP
    with LocalCluster(*setup.flags) as cluster:
        length_s = gap_load_s(capacity.gap_rate, asked.seconds)
        console.print(f"{title}: steady streams and long prompts ({length_s:.0f} s) …")
        gaps = run_gap_load(cluster.url, capacity.gap_rate, asked.seconds, seed)
        found.gaps[setup.name].append(gaps)
        share = gaps.steady.client_cpu_share
        console.print(f"  largest gap p99 {gaps.gap_max_ms:.0f} ms; the client took {share:.1%} of a core")
        if setup in _TRACED:
            console.print(f"{title}: the trace ({asked.seconds:g} s) …")
            trace = run_trace(cluster.url, capacity.trace_rate, asked.seconds, seed)
            found.traces[setup.name].append(trace)
            good = trace.summary.goodput
            console.print(f"  {good.share:.0%} of {trace.summary.requests} requests met: {LIMITS.describe()}")
        if setup in _MAPPED and number == 0:
            for cell in CELLS:
                console.print(f"{title}: {cell.name} ({asked.cell_seconds:g} s) …")
                found.cells[setup.name, cell] = run_cell(cluster.url, cell, asked.cell_seconds, seed + 10)


def make_rows(found: Found, capacity: Capacity) -> list[Row]:
    """All are of the separated cluster, against another one."""
    rows = [figure("prefill-capacity", "prompts/s", [capacity.prompts_per_s], less_is_better=False)]
    gap_max = {name: [run.gap_max_ms for run in runs] for name, runs in found.gaps.items()}
    ours, best = gap_max[SEPARATED.name], min((setup.name for setup in CHUNKED), key=lambda name: median(gap_max[name]))
    rows += [
        figure("gap-max-colocated", "ms", ours, against=median(gap_max[COLOCATED.name]), goal=_GAP_GOAL),
        figure("gap-max-chunked-best", "ms", ours, against=median(gap_max[best])),
    ]
    rows += [figure(f"gap-max-{setup.name}", "ms", ours, against=median(gap_max[setup.name])) for setup in CHUNKED]
    mine = found.gaps[SEPARATED.name]
    for name in (COLOCATED.name, best):
        other = found.gaps[name]
        kind = name.partition("-")[0]
        rows += [
            _against(f"gap-p50-{kind}", "ms", [r.gap_p50_ms for r in mine], [r.gap_p50_ms for r in other]),
            _against(f"first-token-2048-{kind}", "ms", [r.ttft_ms for r in mine], [r.ttft_ms for r in other]),
            _against(f"output-{kind}", "tokens/s", [r.output for r in mine], [r.output for r in other], less=False),
        ]
    for setup in _TRACED[1:]:
        kind, results = setup.name.partition("-")[0], (found.traces[SEPARATED.name], found.traces[setup.name])
        rates, shares = (
            ([r.summary.goodput.requests_per_s for r in each] for each in results),
            ([r.summary.goodput.share for r in each] for each in results),
        )
        rows.append(_against(f"goodput-trace-{kind}", "requests/s", *rates, less=False))
        rows.append(_against(f"goodput-share-trace-{kind}", "share", *shares, less=False))
    return rows + [row for cell in CELLS for row in _map_rows(found, cell)]


def _map_rows(found: Found, cell: Cell) -> list[Row]:
    """Ratios below 1 are where separation loses."""
    ours, theirs = (found.cells[setup.name, cell].summary for setup in _MAPPED)
    rows = [_against(f"{cell.name}-output", "tokens/s", [ours.tokens_per_s], [theirs.tokens_per_s], less=False)]
    for name, mine, other in (
        ("first-token", ours.ttft_s, theirs.ttft_s),
        ("largest-gap", ours.largest_gap_s, theirs.largest_gap_s),
    ):
        if mine is not None and other is not None:
            rows.append(_against(f"{cell.name}-{name}", "ms", [mine.p50 * 1000], [other.p50 * 1000]))
    return rows


def _against(name: str, unit: str, ours: list[float], theirs: list[float], *, less: bool = True) -> Row:
    return figure(name, unit, ours, less_is_better=less, against=median(theirs))


def _plot(console: Console, found: Found, directory: Path) -> None:
    try:
        check_matplotlib()
    except BenchError as error:
        console.print(f"no plots: {error}", style="yellow", soft_wrap=True)
        return
    directory.mkdir(parents=True, exist_ok=True)
    first = {name: gap_points(runs[0].records) for name, runs in found.gaps.items()}
    records = {name: all_records(runs) for name, runs in found.gaps.items()}
    largest = {name: [r.largest_gap_s or 0.0 for r in each if len(r.chunk_s) > 1] for name, each in records.items()}
    for name, plot in (
        ("gaps-over-time", gaps_over_time(first, LIMITS)),
        ("largest-gap-cdf", cdf(largest, "largest gap of a request (ms)", LIMITS.gap_s)),
    ):
        console.print(f"written to {write(plot, directory / f'{name}.png')}", soft_wrap=True)


def _check_modes() -> None:
    """Before anything is measured."""
    argv = [sys.executable, "-m", "services.cli", "up", "--help"]
    told = subprocess.run(
        argv, cwd=REPO, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=True
    )
    if not all(flag in told.stdout for flag in ("--mode", "--step-tokens")):
        sys.exit(
            "bench-separation: this `baton up` has no --mode and --step-tokens, so there is nothing to compare with"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="medians are over so many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a load (default: %(default)s)")
    parser.add_argument(
        "--cell-seconds", type=float, default=8.0, help="of one place of the map (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="no round begins that would take it beyond that")
    return parser.parse_args()


if __name__ == "__main__":
    main()
