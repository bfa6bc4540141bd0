"""`baton bench`, from options to figures. Other benchmarks call `run_bench` and print what they like."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from services.bench.client import Api, Client, Target
from services.bench.display import RunProgress, print_summary
from services.bench.errors import BenchError
from services.bench.load import Load
from services.bench.prompts import Measure, PromptWriter
from services.bench.records import RequestRecord
from services.bench.summary import Summary, summarize
from services.bench.target import find_target, measure_words
from services.bench.workload import Lengths, SyntheticWorkload, Workload

DEFAULT_REQUESTS = 32
OPEN_IN_FLIGHT = 512
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """concurrency: streams of a closed load; with a rate, requests in flight at most. ignore_eos None: where the server
    is Baton. path: Baton only; the way is then asked for strictly."""

    url: str = "http://127.0.0.1:8000"
    api: Api = "completions"
    model: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    prompt_tokens: str = "128"
    max_tokens: str = "32"
    shared_prefix: int = 0
    seed: int = 0
    ignore_eos: bool | None = None
    path: str | None = None
    timeout_s: float = 300.0

    @property
    def streams(self) -> int:
        return self.concurrency or (1 if self.rate is None else OPEN_IN_FLIGHT)

    @property
    def requests(self) -> int | None:
        """What ends the load, if not its duration."""
        return DEFAULT_REQUESTS if self.num_requests is None and self.duration_s is None else self.num_requests

    def describe(self) -> str:
        prompts = f"prompts of {self.prompt_tokens} tokens, answers of {self.max_tokens}"
        if self.rate is not None:
            return f"{self.rate:g} requests/s (Poisson), {prompts}"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}, {prompts}"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """stopped: ended by hand, before its plan."""

    options: BenchOptions
    target: Target
    records: list[RequestRecord]
    summary: Summary
    stopped: bool

    def as_dict(self) -> dict[str, Any]:
        target = {"url": self.target.url, "model": self.target.model, "is_baton": self.target.is_baton}
        return {
            "target": target,
            "options": asdict(self.options),
            "stopped": self.stopped,
            "summary": self.summary.as_dict(),
            "requests": [record.as_dict() for record in self.records],
        }


def bench(options: BenchOptions, json_file: Path | None, api_key: str | None, console: Console) -> BenchResult:
    """Runs it with a bar on stderr, prints the table and writes the file; Ctrl-C ends it with what there is.

    Raises BenchError where no load could be sent. Requests that fail raise nothing: they are figures.
    """
    if json_file is not None:
        _check_writable(json_file)
    result = asyncio.run(run_bench(options, api_key, Console(stderr=True), on_sigint=True))
    title = f"{result.target.model} at {result.target.url}: {options.describe()}"
    print_summary(console, result.summary, title, result.stopped)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
        console.print(f"  written to {json_file}", markup=False, highlight=False, soft_wrap=True)
    return result


async def run_bench(
    options: BenchOptions, api_key: str | None = None, console: Console | None = None, *, on_sigint: bool = False
) -> BenchResult:
    """One load, to its end. console: where a bar and warnings go; None: nowhere. on_sigint: SIGINT ends the load and
    not the process."""
    lengths = Lengths.parse(options.prompt_tokens, "--prompt-tokens"), Lengths.parse(options.max_tokens, "--max-tokens")
    console = console or Console(quiet=True)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        target = await find_target(session, options.url, options.api, options.model, api_key)
        target = _with_extras(target, options)
        measure = await measure_words(session, target)
        if measure is None:
            console.print("The server counts no prompt tokens: a word is taken for a token.", style="yellow")
        writer = PromptWriter(options.seed, measure or Measure(), options.shared_prefix)
        workload = SyntheticWorkload(writer, *lengths, options.seed, options.rate, options.requests, options.duration_s)
        client, stop = Client(session, target), asyncio.Event()
        with _interrupt(stop.set) if on_sigint else contextlib.nullcontext():
            records = await _play(client, workload, options.streams, stop, console)
    return BenchResult(options, target, records, summarize(records), stop.is_set())


async def _play(
    client: Client, workload: Workload, streams: int, stop: asyncio.Event, console: Console
) -> list[RequestRecord]:
    with RunProgress(console, workload.num_requests, workload.duration_s) as progress:
        load = Load(client, workload, streams, progress)
        await load.run(stop)
    return load.records


def _with_extras(target: Target, options: BenchOptions) -> Target:
    if options.path is not None and not target.is_baton:
        raise BenchError(f"--path needs a Baton server, and {target.url} is none")
    extra: dict[str, Any] = {}
    if target.is_baton:
        extra["baton"] = {"timings": True}
        if options.path is not None:
            extra["baton"] |= {"path": options.path, "strict": True}
    if target.is_baton if options.ignore_eos is None else options.ignore_eos:
        extra["ignore_eos"] = True
    return Target(target.url, target.api, target.model, target.is_baton, target.headers, extra)


@contextlib.contextmanager
def _interrupt(then: Callable[[], None]) -> Iterator[None]:
    """SIGINT calls `then`, once: another one ends the process as ever."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        then()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _check_writable(path: Path) -> None:
    """Before minutes are spent on what could then not be kept."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise BenchError(f"--json {path}: {error.strerror}; give a file that can be written") from error
