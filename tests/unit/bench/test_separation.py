"""The rows of `make bench-separation`, from runs made by hand."""

from benchmarks.separation import CHUNKED, COLOCATED, SEPARATED, Found, make_rows
from benchmarks.separation_loads import CELLS, LIMITS, Capacity, GapRun, gap_load_s, num_long_prompts
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import summarize
from services.bench.options import BenchOptions
from services.bench.run import BenchResult
from services.bench.wire.client import Target


def result(*gaps_s: float, ttft_s: float = 1.0) -> BenchResult:
    """One request for each gap, of two tokens."""
    records = [
        RequestRecord(n, 0.0, 0.0, outcome="ok", ended_s=ttft_s + gap, chunk_s=[ttft_s, ttft_s + gap])
        for n, gap in enumerate(gaps_s)
    ]
    summary = summarize(records, LIMITS)
    return BenchResult(BenchOptions(), Target("http://x", "completions", "m"), records, summary, stopped=False)


def gap_run(gap_s: float, ttft_s: float = 1.0) -> GapRun:
    return GapRun(result(0.0625, gap_s), result(0.0625, ttft_s=ttft_s))


def test_rows() -> None:
    found = Found()
    found.gaps[SEPARATED.name] = [gap_run(0.25, 4.0), gap_run(0.5, 4.0)]
    found.gaps[COLOCATED.name] = [gap_run(3.0, 2.0), gap_run(6.0, 2.0)]
    for setup, gap_s in zip(CHUNKED, (0.75, 1.5, 3.0), strict=True):
        found.gaps[setup.name] = [gap_run(gap_s), gap_run(gap_s)]
    for setup, gap_s in ((SEPARATED, 0.125), (COLOCATED, 1.0), (CHUNKED[1], 0.125)):
        found.traces[setup.name] = [result(gap_s, 0.125)] * 2
    for cell in CELLS:
        found.cells[SEPARATED.name, cell] = result(0.5)
        found.cells[COLOCATED.name, cell] = result(0.25, ttft_s=0.75)
    rows = {row.name: row for row in make_rows(found, Capacity(0.25))}
    p99_of_three = {gap: (0.0625 + (gap - 0.0625) * 0.98) * 1000 for gap in (0.25, 0.5)}
    worst = rows["gap-max-colocated"]
    assert worst.runs == tuple(p99_of_three.values())
    assert (worst.goal, worst.unit, worst.reached) == (5.0, "ms", True)
    assert worst.ratio is not None
    assert 11.9 < worst.ratio < 12.1
    assert rows["gap-max-chunked-best"].against == rows["gap-max-chunked-64"].against
    assert rows["gap-max-chunked-256"].ratio == rows["gap-max-chunked-256"].against / worst.value  # type: ignore[operator]
    assert (rows["first-token-2048-colocated"].value, rows["first-token-2048-colocated"].ratio) == (4000.0, 0.5)
    share = rows["goodput-share-trace-colocated"]
    assert (share.value, share.against, share.ratio) == (1.0, 0.5, 2.0)
    assert rows["goodput-share-trace-chunked"].ratio == 1.0
    losing = rows["map-32-tokens-1-stream-output"]
    assert (losing.value, losing.against) == (2 / 1.5, 2.0)
    assert len([name for name in rows if name.startswith("map-")]) == 18
    assert Capacity(0.25).gap_rate == 0.15


def test_the_trace_is_as_many_prompt_tokens_as_the_long_prompts() -> None:
    capacity = Capacity(0.25)
    assert 0.15 * 2048 / 500 < capacity.trace_rate < 0.15 * 2048 / 300  # its prompts have about 400 tokens


def test_long_prompts_are_computed_while_the_streams_go_on() -> None:
    for rate in (0.005, 0.07, 0.5):
        seconds = gap_load_s(rate, 30.0)
        last_s = num_long_prompts(rate, seconds) / rate  # evenly spaced, the first one step after the begin
        assert num_long_prompts(rate, seconds) >= 2
        assert last_s + 0.6 / rate <= seconds + 1e-3  # a worker takes 0.6 of the time between two
    assert gap_load_s(0.5, 30.0) == 30.0
