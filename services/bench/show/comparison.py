"""Several servers or rates beside one another, for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from services.bench.campaign import Campaign, Run
from services.bench.figures.compare import Compared
from services.bench.figures.goodput import NO_LIMITS
from services.bench.show.tables import doubts


def print_run(console: Console, run: Run, title: str) -> None:
    """One line while the campaign goes on, and one for each reason to doubt it."""
    summary = run.result.summary
    told = [f"{summary.succeeded} answered", f"{summary.tokens_per_s:.1f} tokens/s"]
    if summary.failed:
        told.append(f"{summary.failed} failed ({', '.join(summary.errors)})")
    if summary.ttft_s is not None:
        told.append(f"first token {summary.ttft_s.p50 * 1000:.0f} ms")
    if summary.largest_gap_s is not None:
        told.append(f"largest gap p99 {summary.largest_gap_s.p99 * 1000:.0f} ms")
    if summary.goodput.limits != NO_LIMITS:
        told.append(f"goodput {summary.goodput.share:.0%}")
    told.append(f"client {run.result.client_cpu_share:.0%} of a core")
    console.print(f"{title}: {', '.join(told)}", markup=False, highlight=False, soft_wrap=True)
    for text in doubts(run.result):
        console.print(f"  {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_comparison(console: Console, campaign: Campaign) -> None:
    """Medians over the rounds, and for each server after the first the ratio to it: above 1 it is better."""
    options, rows = campaign.options, campaign.compared()
    end = "  (stopped early: what there was by then)" if campaign.stopped else ""
    rounds = f", medians over {options.rounds} rounds" if options.rounds > 1 else ""
    title = f"{options.describe()}{rounds}, limits: {options.base.limits.describe()}{end}"
    console.print(f"\n{title}", style="bold", markup=False, highlight=False, soft_wrap=True)
    if rows:
        console.print(_table(rows, [target.name for target in options.asked], by_rate=len(options.rates) > 1))


def _table(rows: Sequence[Compared], targets: Sequence[str], by_rate: bool) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    if by_rate:
        table.add_column("rate", justify="right")
    table.add_column("figure", min_width=16)
    table.add_column("unit")
    for index, target in enumerate(targets):
        table.add_column(target, justify="right")
        if index:
            table.add_column("ratio", justify="right")
    last_rate = None
    for row in rows:
        cells = [row.metric, row.unit]
        if by_rate:
            cells.insert(0, "" if row.rate == last_rate or row.rate is None else f"{row.rate:g}")
            last_rate = row.rate
        for index, target in enumerate(targets):
            cells.append(_short(row.values.get(target)))
            if index:
                cells.append(_short(row.ratios.get(target)))
        table.add_row(*cells)
    return table


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
