"""What a person reads of one run, when it has ended."""

from rich.console import Console
from rich.table import Table

from services.bench.figures.cluster import ClusterFigures, Spread
from services.bench.figures.distribution import Distribution
from services.bench.figures.goodput import NO_LIMITS
from services.bench.figures.summary import Summary
from services.bench.run import BenchResult

_COLUMNS = ("p50", "p90", "p99", "max", "mean", "of")
_LATE_S = 0.05
_HEAVY_SHARE = 0.2
_MIB = 1 << 20


def print_result(console: Console, result: BenchResult) -> None:
    """The table, and a line below it for everything a reader must know to trust it."""
    summary = result.summary
    end = "  (stopped early: what there was by then)" if result.stopped else ""
    title = f"{result.target.model} at {result.target.url}: {result.options.describe()}{end}"
    console.print(f"\n{title}", style="bold", markup=False, highlight=False, soft_wrap=True)
    if summary.succeeded:
        _print_lines(console, _rates(summary))
        if result.cluster is not None:
            _print_lines(console, cluster_lines(result.cluster))
        console.print(_times_table(summary))
    _print_notes(console, result)


def cluster_lines(found: ClusterFigures) -> list[tuple[str, str]]:
    """What Baton says of itself: a line for each pool, and one for the bytes."""
    lines = []
    for role, pool in found.pools.items():
        told = [f"{pool.workers} worker{'s' if pool.workers > 1 else ''}"]
        if pool.busy_share is not None:
            told.append(f"busy {pool.busy_share:.0%}")
        if pool.kv_use is not None:
            told.append(f"KV {pool.kv_use.mean:.0%} used (most {pool.kv_use.max:.0%})")
        lines.append((role, ", ".join(told + [_queue(name, length) for name, length in pool.queues.items()])))
    told = [_queue(name, length) for name, length in found.gateway_queues.items()]
    if found.gateway_cpu_share is not None:
        told.insert(0, f"{found.gateway_cpu_share:.0%} of a core")
    if told:
        lines.append(("gateway", ", ".join(told)))
    if found.moved_bytes:
        moved = ", ".join(f"{count / _MIB:.1f} MiB by {backend}" for backend, count in found.moved_bytes.items())
        lines.append(("moved", moved))
    return lines


def _queue(name: str, length: Spread) -> str:
    return f"{name} {length.mean:.1f} (most {length.max:g})"


def _rates(summary: Summary) -> list[tuple[str, str]]:
    lines = [
        (
            "output",
            f"{summary.tokens_per_s:.1f} tokens/s, {summary.completion_tokens} tokens in {summary.wall_s:.1f} s",
        ),
        ("requests", f"{summary.succeeded} answered, {summary.requests_per_s:.2f} a second"),
        ("prompts", _lengths(summary.prompt_len)),
        ("answers", _lengths(summary.completion_len)),
    ]
    good = summary.goodput
    if good.limits != NO_LIMITS:
        told = f"{good.share:.0%} of requests, {good.requests_per_s:.2f} a second, met: {good.limits.describe()}"
        lines.append(("goodput", told))
    if summary.paths:
        lines.append(("paths", ", ".join(f"{path} {count}" for path, count in summary.paths.items())))
    return lines


def _print_lines(console: Console, lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        console.print(f"  {name:<9} {text}", markup=False, highlight=False, soft_wrap=True)


def _times_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    table.add_column("milliseconds", min_width=26)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    rows = (
        ("waiting in queues", summary.queue_s),
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


def doubts(result: BenchResult) -> list[str]:
    """What a reader must know before he trusts a run's figures, beyond what failed and what the client took."""
    summary, told = result.summary, []
    if summary.cancelled:
        told.append(f"{summary.cancelled} were under way when it was stopped; they count in no figure")
    if summary.succeeded and summary.counted_by != "usage":
        told.append("the server did not count all tokens: pieces of an answer are counted instead, which may be fewer")
    if summary.late_s is not None and summary.late_s.p99 > _LATE_S:
        late_ms = summary.late_s.p99 * 1000
        told.append(f"requests were sent up to {late_ms:.0f} ms (p99) behind the plan: this client was the limit")
    if result.left_out:
        told.append(f"{result.left_out} requests of the trace were left out: too long for the model or --max-context")
    return told


def _print_notes(console: Console, result: BenchResult) -> None:
    summary = result.summary

    def note(text: str, style: str = "") -> None:
        console.print(f"  {text}", style=style, markup=False, highlight=False, soft_wrap=True)

    if summary.failed:
        found = ", ".join(f"{error} ({count})" for error, count in summary.errors.items())
        note(f"{summary.failed} of {summary.requests} failed: {found}", "red")
    for text in doubts(result):
        note(text, "yellow")
    share = result.client_cpu_share
    note(f"this client took {share:.1%} of a core", "yellow" if share > _HEAVY_SHARE else "")


def _lengths(found: Distribution | None) -> str:
    if found is None:
        return "not counted by the server"
    return f"{found.mean:.0f} tokens on average, longest {found.max:.0f}"
