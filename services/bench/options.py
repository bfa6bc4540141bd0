"""What a benchmark is asked for: one load, and the campaign of loads that a comparison or a sweep is."""

from dataclasses import dataclass, field
from pathlib import Path

from services.bench.errors import BenchError
from services.bench.figures.goodput import Limits
from services.bench.plan.arrivals import Arrivals, arrivals
from services.bench.plan.trace import TraceScale
from services.bench.wire.client import Api

DEFAULT_REQUESTS = 32
OPEN_IN_FLIGHT = 512


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """time_scale: seconds of ours for one of the trace. block_tokens: what 512 tokens of the trace become. max_context:
    longer requests are left out; None: those that the server's model cannot take, where it says how long that is."""

    file: Path
    time_scale: float | None = None
    block_tokens: int = 16
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One load. concurrency: streams of a closed load; of an open one, requests in flight at most. A rate or a trace
    makes it open; a rate with a trace stretches the trace's time to it. burst: as the flag has it. ignore_eos None:
    where the server is Baton. path: Baton only; the way is then asked for strictly. sample: ask Baton's gateway about
    its cluster meanwhile."""

    url: str = "http://127.0.0.1:8000"
    api: Api = "completions"
    model: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    burst: str | None = None
    trace: TraceOptions | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    prompt_tokens: str = "128"
    max_tokens: str = "32"
    shared_prefix: int = 0
    seed: int = 0
    ignore_eos: bool | None = None
    path: str | None = None
    timeout_s: float = 300.0
    limits: Limits = field(default_factory=Limits)
    sample: bool = True

    def __post_init__(self) -> None:
        if self.burst is not None and self.rate is None:
            raise BenchError("--burst says how requests of a --rate arrive; give --rate or --rates too")
        if self.burst is not None and self.trace is not None:
            raise BenchError("--burst makes arrival times and --trace has them; give one of the two")
        if self.trace is not None and self.trace.time_scale is not None and self.rate is not None:
            raise BenchError("--time-scale and --rate both stretch the time of the trace; give one of the two")
        if self.rate is not None:
            arrivals(self.rate, self.burst)

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.trace is not None

    @property
    def streams(self) -> int:
        return self.concurrency or (OPEN_IN_FLIGHT if self.is_open else 1)

    @property
    def requests(self) -> int | None:
        """What ends the load, if not its duration or its trace."""
        unlimited = self.num_requests is None and self.duration_s is None and self.trace is None
        return DEFAULT_REQUESTS if unlimited else self.num_requests

    @property
    def arrivals(self) -> Arrivals | None:
        return None if self.rate is None else arrivals(self.rate, self.burst)

    def trace_scale(self, longest: int | None) -> TraceScale:
        """longest: what the server's model can take, where it is known. Only with a trace."""
        assert self.trace is not None
        known = [limit for limit in (self.trace.max_context, longest) if limit is not None]
        scale = 1.0 if self.trace.time_scale is None else self.trace.time_scale
        return TraceScale(self.trace.block_tokens, scale, self.rate, min(known, default=None))

    def describe(self) -> str:
        if self.trace is not None:
            pace = "" if self.rate is None else f" at {self.rate:g} requests/s"
            if self.trace.time_scale is not None:
                pace = f", time × {self.trace.time_scale:g}"
            return f"{self.trace.file.name}{pace}, {self.trace.block_tokens} tokens for 512 of the trace"
        prompts = f"prompts of {self.prompt_tokens} tokens, answers of {self.max_tokens}"
        if (found := self.arrivals) is not None:
            return f"{found.describe()}, {prompts}"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}, {prompts}"


@dataclass(frozen=True, slots=True)
class NamedTarget:
    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "NamedTarget":
        name, equals, url = text.partition("=")
        if not (name and equals and url):
            raise BenchError(f"--compare {text}: write NAME=URL, such as baton=http://127.0.0.1:8000")
        return cls(name, url)


@dataclass(frozen=True, slots=True)
class CampaignOptions:
    """rates: the load of `base` at each of them. targets: empty: only that of `base`. Every round goes to every target
    at every rate."""

    base: BenchOptions
    targets: tuple[NamedTarget, ...] = ()
    rates: tuple[float, ...] = ()
    rounds: int = 1

    @property
    def asked(self) -> tuple[NamedTarget, ...]:
        return self.targets or (NamedTarget("target", self.base.url),)

    def describe(self) -> str:
        others = ", ".join(f"{rate:g}" for rate in self.rates[1:])
        return self.base.describe() + (f", and at {others} requests/s" if others else "")

    @property
    def is_single(self) -> bool:
        """One run, of which everything can be shown."""
        return len(self.asked) * len(self.rates or (0,)) * self.rounds == 1


def parse_rates(text: str) -> tuple[float, ...]:
    """`0.5,1,2`."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.001 <= rate <= 1e6 for rate in rates) or len(set(rates)) < len(rates):
        raise BenchError(f"--rates {text}: write different requests a second, such as 0.5,1,2,4")
    return rates


def parse_targets(texts: list[str]) -> tuple[NamedTarget, ...]:
    """Each text holds one NAME=URL or several with spaces between them."""
    targets = tuple(NamedTarget.parse(part) for text in texts for part in text.split())
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise BenchError("--compare: give every target a name of its own")
    return targets
