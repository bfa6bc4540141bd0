"""One load at one server, from options to figures. Other benchmarks call `run_bench` and print what they like."""

import asyncio
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp
from rich.console import Console

from services.bench.errors import BenchError
from services.bench.figures.cluster import ClusterFigures, ClusterHistory
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import Summary, summarize
from services.bench.load import Load
from services.bench.options import BenchOptions
from services.bench.plan.prompts import Measure, PromptWriter
from services.bench.plan.trace import TraceWorkload, read_trace
from services.bench.plan.workload import Lengths, SyntheticWorkload, Workload, prepared
from services.bench.sampling import ClusterSampler
from services.bench.show.progress import RunProgress
from services.bench.wire.client import Client, Target
from services.bench.wire.target import find_target, measure_words

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """stopped: ended by hand, before its plan. cluster: what Baton said of itself meanwhile; None from others.
    client_cpu_share: what this process took of one core while the load ran. left_out: requests of a trace that were too
    long."""

    options: BenchOptions
    target: Target
    records: list[RequestRecord]
    summary: Summary
    stopped: bool
    cluster: ClusterFigures | None = None
    client_cpu_share: float = 0.0
    left_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": {"url": self.target.url, "model": self.target.model, "is_baton": self.target.is_baton},
            "options": asdict(self.options),
            "stopped": self.stopped,
            "client_cpu_share": self.client_cpu_share,
            "left_out": self.left_out,
            "summary": self.summary.as_dict(),
            "cluster": None if self.cluster is None else self.cluster.as_dict(),
            "requests": [record.as_dict() for record in self.records],
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that answers, and how many tokens it makes of our words."""

    target: Target
    measure: Measure


async def run_bench(
    options: BenchOptions,
    api_key: str | None = None,
    console: Console | None = None,
    stop: asyncio.Event | None = None,
) -> BenchResult:
    """One load, to its end or until `stop`. console: where a bar and warnings go; None: nowhere."""
    found = await prepare(options, api_key, console)
    return await run_prepared(options, found, console, stop)


async def prepare(options: BenchOptions, api_key: str | None = None, console: Console | None = None) -> Prepared:
    """Asks the server who it is, and sends two short prompts. BenchError where nothing of use answers."""
    _lengths(options)
    async with _session(options) as session:
        target = await find_target(session, options.url, options.api, options.model, api_key)
        measure = await measure_words(session, target)
    if measure is None and console is not None:
        console.print(f"{target.url} counts no prompt tokens: a word is taken for a token.", style="yellow")
    if options.path is not None and not target.is_baton:
        raise BenchError(f"--path needs a Baton server, and {target.url} is none")
    return Prepared(target, measure or Measure())


async def run_prepared(
    options: BenchOptions,
    found: Prepared,
    console: Console | None = None,
    stop: asyncio.Event | None = None,
    title: str = "",
) -> BenchResult:
    """title: what the bar says before its figures."""
    target, stop = _with_extras(found.target, options), stop or asyncio.Event()
    workload, left_out = make_workload(options, found)
    async with _session(options) as session:
        sampler = ClusterSampler(session, target) if target.is_baton and options.sample else None
        with RunProgress(console or Console(quiet=True), workload.num_requests, workload.duration_s, title) as progress:
            load = Load(Client(session, target), workload, options.streams, progress)
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            history = await _play(load, stop, sampler)
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        if sampler is not None and not stop.is_set():
            await sampler.finish()
    return BenchResult(
        options,
        target,
        load.records,
        summarize(load.records, options.limits),
        stop.is_set(),
        history.figures(),
        cpu_s / wall_s,
        left_out,
    )


def make_workload(options: BenchOptions, found: Prepared) -> tuple[Workload, int]:
    """What is sent, and how many requests of a trace are not."""
    if options.trace is not None:
        scale = options.trace_scale(found.target.max_model_len)
        lines = read_trace(options.trace.file)
        trace = TraceWorkload(lines, scale, found.measure, options.seed, options.num_requests, options.duration_s)
        return trace, trace.left_out
    writer = PromptWriter(options.seed, found.measure, options.shared_prefix)
    synthetic = SyntheticWorkload(
        writer, *_lengths(options), options.seed, options.arrivals, options.requests, options.duration_s
    )
    return prepared(synthetic, options.is_open), 0


async def _play(load: Load, stop: asyncio.Event, sampler: ClusterSampler | None) -> ClusterHistory:
    if sampler is None:
        await load.run(stop)
        return ClusterHistory()
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(sampler.run())
        await load.run(stop)
        sampling.cancel()
    return sampler.history


def _session(options: BenchOptions) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=options.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def _lengths(options: BenchOptions) -> tuple[Lengths, Lengths]:
    return Lengths.parse(options.prompt_tokens, "--prompt-tokens"), Lengths.parse(options.max_tokens, "--max-tokens")


def _with_extras(target: Target, options: BenchOptions) -> Target:
    extra: dict[str, Any] = {}
    if target.is_baton:
        extra["baton"] = {"timings": True}
        if options.path is not None:
            extra["baton"] |= {"path": options.path, "strict": True}
    if target.is_baton if options.ignore_eos is None else options.ignore_eos:
        extra["ignore_eos"] = True
    return replace(target, extra=extra)
