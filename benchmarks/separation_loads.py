"""The loads of `make bench-separation`, each at one cluster, and the figures that are taken of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from services.bench.figures.distribution import Distribution
from services.bench.figures.goodput import Limits
from services.bench.figures.records import RequestRecord
from services.bench.options import BenchOptions, TraceOptions
from services.bench.plan.trace import TraceScale, read_trace
from services.bench.run import BenchResult, run_bench

LONG_PROMPT, LONG_ANSWER = 2048, 16
STREAMS, STREAM_PROMPT, STREAM_ANSWER = 4, 32, 48
SHARE = 0.6
"""Of what one prefill worker can take."""
LIMITS = Limits(ttft_s=4.0, gap_s=0.2)
TRACE = Path(__file__).parent / "traces" / "mooncake_conversation_200.jsonl"
TRACE_SCALE = TraceScale(block_tokens=16, max_context=2048)
MAP_PROMPTS, MAP_STREAMS, MAP_ANSWER = (32, 256, 1024), (1, 8), 32
_CAPACITY_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one prefill worker can take."""

    prompts_per_s: float

    @property
    def gap_rate(self) -> float:
        return SHARE * self.prompts_per_s

    @property
    def trace_rate(self) -> float:
        """Requests of the trace a second that are as many prompt tokens as the long prompts of `gap_rate`."""
        lengths = [TRACE_SCALE.input_len(line) for line in read_trace(TRACE) if TRACE_SCALE.fits(line)]
        return self.gap_rate * LONG_PROMPT / fmean(lengths)


@dataclass(frozen=True, slots=True)
class GapRun:
    """Steady streams beside long prompts."""

    steady: BenchResult
    prompts: BenchResult

    @property
    def records(self) -> list[RequestRecord]:
        return [*self.steady.records, *self.prompts.records]

    @property
    def gap_max_ms(self) -> float:
        """p99 over all requests of each one's largest gap."""
        return _ms(Distribution.of(record.largest_gap_s for record in self.records)).p99 * 1000

    @property
    def gap_p50_ms(self) -> float:
        return _ms(self.steady.summary.gap_s).p50 * 1000

    @property
    def ttft_ms(self) -> float:
        return _ms(self.prompts.summary.ttft_s).p50 * 1000

    @property
    def output(self) -> float:
        return self.steady.summary.tokens_per_s


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the map: a closed load."""

    prompt_len: int
    streams: int

    @property
    def name(self) -> str:
        return f"map-{self.prompt_len}-tokens-{self.streams}-stream{'s' if self.streams > 1 else ''}"


CELLS = tuple(Cell(prompt_len, streams) for prompt_len in MAP_PROMPTS for streams in MAP_STREAMS)


def measure_capacity(url: str) -> Capacity:
    """Two long prompts at a time, so that the worker never waits for the next."""
    options = BenchOptions(
        url=url,
        concurrency=2,
        num_requests=_CAPACITY_PROMPTS,
        prompt_tokens=str(LONG_PROMPT),
        max_tokens="1",
        path="remote",
        seed=900,
    )
    result = asyncio.run(run_bench(options))
    _all_answered(result)
    return Capacity(result.summary.requests_per_s)


def gap_load_s(rate: float, seconds: float) -> float:
    """Long enough for two long prompts to arrive and be computed while the streams go on."""
    return max(seconds, (2 + SHARE) / rate)


def num_long_prompts(rate: float, seconds: float) -> int:
    """Those that arrive early enough for one worker to compute them before the streams end."""
    return int(rate * seconds - SHARE + 1e-6)


def run_gap_load(url: str, rate: float, seconds: float, seed: int) -> GapRun:
    """For `seconds`, or as long as `gap_load_s` says."""
    return asyncio.run(_gap_load(url, rate, gap_load_s(rate, seconds), seed))


def run_cell(url: str, cell: Cell, seconds: float, seed: int) -> BenchResult:
    options = BenchOptions(
        url=url,
        concurrency=cell.streams,
        duration_s=seconds,
        prompt_tokens=str(cell.prompt_len),
        max_tokens=str(MAP_ANSWER),
        seed=seed,
        ignore_eos=True,
    )
    result = asyncio.run(run_bench(options))
    _all_answered(result)
    return result


def run_trace(url: str, rate: float, seconds: float, seed: int) -> BenchResult:
    """Requests that fail count against the goodput."""
    options = BenchOptions(
        url=url,
        rate=rate,
        duration_s=seconds,
        trace=TraceOptions(TRACE, None, TRACE_SCALE.block_tokens, TRACE_SCALE.max_context),
        limits=LIMITS,
        seed=seed,
        ignore_eos=True,
    )
    return asyncio.run(run_bench(options))


async def _gap_load(url: str, rate: float, seconds: float, seed: int) -> GapRun:
    steady = BenchOptions(
        url=url,
        concurrency=STREAMS,
        duration_s=seconds,
        prompt_tokens=str(STREAM_PROMPT),
        max_tokens=str(STREAM_ANSWER),
        seed=seed,
        ignore_eos=True,
    )
    prompts = BenchOptions(
        url=url,
        rate=rate,
        burst="0",
        num_requests=num_long_prompts(rate, seconds),
        prompt_tokens=str(LONG_PROMPT),
        max_tokens=str(LONG_ANSWER),
        seed=seed + 1,
        ignore_eos=True,
        sample=False,
    )
    found = GapRun(*await asyncio.gather(run_bench(steady), run_bench(prompts)))
    for result in (found.steady, found.prompts):
        _all_answered(result)
    return found


def _all_answered(result: BenchResult) -> None:
    """RuntimeError where a request failed: figures of what is left would be of something else."""
    if result.summary.failed or not result.summary.succeeded:
        raise RuntimeError(f"requests failed: {result.summary.errors or 'none was sent'}")


def _ms(found: Distribution | None) -> Distribution:
    if found is None:
        raise RuntimeError("answers came in one piece each, so that there are no gaps")
    return found


def all_records(runs: Sequence[GapRun]) -> list[RequestRecord]:
    return [record for run in runs for record in run.records]
