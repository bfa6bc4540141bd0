"""When requests of an open load arrive: at random, in bursts, or evenly. Pure; the seed decides everything."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from services.bench.errors import BenchError

_ON_OFF = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\s*$")
_WHAT_TO_WRITE = "write ON/OFF in seconds, such as 2/8, or a number: 0 evenly spaced, 1 Poisson, 4 in clumps"


class Arrivals(Protocol):
    """rate: requests a second on average."""

    @property
    def rate(self) -> float: ...

    def times(self, seed: int) -> Iterator[float]:
        """Seconds after the load begins, without end."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of mean 1/rate whose deviation is `variation` times that: 1 is a Poisson process, 0 a metronome."""

    rate: float
    variation: float = 1.0

    def times(self, seed: int) -> Iterator[float]:
        rng, at_s, mean_s = random.Random(f"{seed}:arrivals"), 0.0, 1.0 / self.rate
        shape = self.variation**-2 if self.variation else 0.0
        while True:
            if self.variation == 1.0:
                at_s += rng.expovariate(self.rate)
            elif self.variation:
                at_s += rng.gammavariate(shape, mean_s / shape)
            else:
                at_s += mean_s
            yield at_s

    def describe(self) -> str:
        name = {0.0: "evenly", 1.0: "Poisson"}.get(self.variation, f"gamma, variation {self.variation:g}")
        return f"{self.rate:g} requests/s ({name})"


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Poisson process that runs for on_s, rests for off_s, and so on; faster while it runs, so that `rate` holds."""

    rate: float
    on_s: float
    off_s: float

    def times(self, seed: int) -> Iterator[float]:
        rng, running_s, period_s = random.Random(f"{seed}:arrivals"), 0.0, self.on_s + self.off_s
        while True:
            running_s += rng.expovariate(self.rate * period_s / self.on_s)
            periods, into_s = divmod(running_s, self.on_s)
            yield periods * period_s + into_s

    def describe(self) -> str:
        return f"{self.rate:g} requests/s (within {self.on_s:g} s of every {self.on_s + self.off_s:g} s)"


def arrivals(rate: float, burst: str | None) -> Arrivals:
    """burst: as the flag has it; None: Poisson."""
    if burst is None:
        return Gamma(rate)
    match = _ON_OFF.match(burst)
    if match and float(match[1]) > 0:
        return OnOff(rate, float(match[1]), float(match[2]))
    try:
        variation = float(burst)
    except ValueError:
        variation = -1.0
    if not 0 <= variation <= 20:
        raise BenchError(f"--burst {burst}: {_WHAT_TO_WRITE}")
    return Gamma(rate, variation)
