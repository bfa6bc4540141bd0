"""What is sent, and when: an iterator of planned requests. A trace is another one of these."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from services.bench.errors import BenchError
from services.bench.prompts import PromptWriter

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
    """rate: requests a second, arriving as a Poisson process; None: a closed load, next when a stream is free.

    Ends after num_requests; an open load also before the first arrival beyond duration_s. The same seed gives the same
    requests at the same times.
    """

    writer: PromptWriter
    prompt_tokens: Lengths
    max_tokens: Lengths
    seed: int
    rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None

    def __iter__(self) -> Iterator[PlannedRequest]:
        lengths, arrivals = random.Random(f"{self.seed}:lengths"), random.Random(f"{self.seed}:arrivals")
        number, at_s = 0, 0.0
        while self.num_requests is None or number < self.num_requests:
            if self.rate is not None:
                at_s += arrivals.expovariate(self.rate)
                if self.duration_s is not None and at_s > self.duration_s:
                    return
            prompt = self.writer.write(number, self.prompt_tokens.draw(lengths))
            yield PlannedRequest(number, None if self.rate is None else at_s, prompt, self.max_tokens.draw(lengths))
            number += 1
