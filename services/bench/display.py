"""What a person sees of a benchmark: a bar while it runs, then a table."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.bench.records import RequestRecord
from services.bench.summary import Distribution, Summary

_COLUMNS = ("p50", "p90", "p99", "max", "mean", "of")
_LATE_S = 0.05


class RunProgress:
    """A bar on a terminal; nothing elsewhere. By requests where their number is known, else by time."""

    def __init__(self, console: Console, num_requests: int | None, duration_s: float | None) -> None:
        self._by_time = num_requests is None and duration_s is not None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("waiting for the first answer", total=num_requests or duration_s)
        self._began = time.monotonic()
        self._done = self._failed = self._tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, record: RequestRecord) -> None:
        self._done += record.outcome == "ok"
        self._failed += record.outcome == "error"
        self._tokens += record.num_tokens
        elapsed_s = time.monotonic() - self._began
        failed = f", [red]{self._failed} failed[/]" if self._failed else ""
        self._bar.update(
            self._task,
            completed=elapsed_s if self._by_time else self._done + self._failed,
            description=f"{self._done} answered{failed}, {self._tokens / elapsed_s:.1f} tokens/s",
        )


def print_summary(console: Console, summary: Summary, title: str, stopped: bool) -> None:
    """The table, and a line below it for everything a reader must know to trust it."""
    end = "  (stopped early: what there was by then)" if stopped else ""
    console.print(f"\n{title}{end}", style="bold", markup=False, highlight=False, soft_wrap=True)
    if summary.succeeded:
        _print_rates(console, summary)
        console.print(_times_table(summary))
    _print_notes(console, summary)


def _print_rates(console: Console, summary: Summary) -> None:
    lines = [
        (
            "output",
            f"{summary.tokens_per_s:.1f} tokens/s, {summary.completion_tokens} tokens in {summary.wall_s:.1f} s",
        ),
        ("requests", f"{summary.succeeded} answered, {summary.requests_per_s:.2f} a second"),
        ("prompts", _lengths(summary.prompt_len)),
        ("answers", _lengths(summary.completion_len)),
    ]
    if summary.paths:
        lines.append(("paths", ", ".join(f"{path} {count}" for path, count in summary.paths.items())))
    for name, text in lines:
        console.print(f"  {name:<9} {text}", markup=False, highlight=False, soft_wrap=True)


def _times_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    table.add_column("milliseconds", min_width=26)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    rows = (
        ("time to first token", summary.ttft_s),
        ("gap between pieces", summary.gap_s),
        ("largest gap of a request", summary.largest_gap_s),
        ("time per token after it", summary.token_time_s),
        ("handoff gap", summary.handoff_gap_s),
        ("whole request", summary.duration_s),
    )
    for name, found in rows:
        if found is not None:
            values = (found.p50, found.p90, found.p99, found.max, found.mean)
            table.add_row(name, *(f"{value * 1000:.1f}" for value in values), str(found.count))
    return table


def _print_notes(console: Console, summary: Summary) -> None:
    def note(text: str, style: str = "") -> None:
        console.print(f"  {text}", style=style, markup=False, highlight=False, soft_wrap=True)

    if summary.failed:
        found = ", ".join(f"{error} ({count})" for error, count in summary.errors.items())
        note(f"{summary.failed} of {summary.requests} failed: {found}", "red")
    if summary.cancelled:
        note(f"{summary.cancelled} were under way when it was stopped; they count in no figure", "yellow")
    if summary.succeeded and summary.counted_by != "usage":
        note(
            "the server did not count all tokens: pieces of an answer are counted instead, which may be fewer", "yellow"
        )
    if summary.late_s is not None and summary.late_s.p99 > _LATE_S:
        late_ms = summary.late_s.p99 * 1000
        note(f"requests were sent up to {late_ms:.0f} ms (p99) behind the plan: this client was the limit", "yellow")


def _lengths(found: Distribution | None) -> str:
    if found is None:
        return "not counted by the server"
    return f"{found.mean:.0f} tokens on average, longest {found.max:.0f}"
