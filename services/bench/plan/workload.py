"""What is sent, and when: an iterator of planned requests, drawn at random. `trace.py` has one that was recorded."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.bench.errors import BenchError
from services.bench.plan.arrivals import Arrivals
from services.bench.plan.prompts import PromptWriter

_LENGTHS = re.compile(r"^\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?$")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """at_s: seconds after the load begins; None: as soon as one of the streams is free."""

    number: int
    at_s: float | None
    prompt: str
    max_tokens: int


class Workload(Protocol):
    """May be iterated once. num_requests and duration_s tell how far a run is; None where it is not known before."""

    @property
    def num_requests(self) -> int | None: ...

    @property
    def duration_s(self) -> float | None: ...

    def __iter__(self) -> Iterator[PlannedRequest]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers, each from low to high equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, what: str) -> "Lengths":
        """`128` or `64-512`; BenchError names `what`."""
        match = _LENGTHS.match(text)
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else 0
        if not 1 <= low <= high:
            raise BenchError(f"{what} {text}: write a number of tokens such as 128, or a range such as 64-512")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """arrivals: when they are sent; None: a closed load, next when a stream is free.

    Ends after num_requests; an open load also before the first arrival beyond duration_s. The same seed gives the same
    requests at the same times.
    """

    writer: PromptWriter
    prompt_tokens: Lengths
    max_tokens: Lengths
    seed: int
    arrivals: Arrivals | None = None
    num_requests: int | None = None
    duration_s: float | None = None

    def __iter__(self) -> Iterator[PlannedRequest]:
        lengths = random.Random(f"{self.seed}:lengths")
        times = None if self.arrivals is None else self.arrivals.times(self.seed)
        number = 0
        while self.num_requests is None or number < self.num_requests:
            at_s = None if times is None else next(times)
            if at_s is not None and self.duration_s is not None and at_s > self.duration_s:
                return
            prompt = self.writer.write(number, self.prompt_tokens.draw(lengths))
            yield PlannedRequest(number, at_s, prompt, self.max_tokens.draw(lengths))
            number += 1


@dataclass(frozen=True, slots=True)
class PreparedWorkload:
    """Requests that were made before, so that a run spends nothing on making them."""

    requests: Sequence[PlannedRequest]
    num_requests: int | None
    duration_s: float | None

    def __iter__(self) -> Iterator[PlannedRequest]:
        return iter(self.requests)


def prepared(workload: Workload, is_open: bool) -> Workload:
    """The same, made now. A closed load without a number of requests has no end, and stays as it is."""
    if workload.num_requests is None and not is_open:
        return workload
    return PreparedWorkload(tuple(workload), workload.num_requests, workload.duration_s)
