"""Which requests were served well enough. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.bench.figures.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Limits:
    """ttft_s: the longest wait for the first token. gap_s: the longest gap in the middle of an answer, every one of
    which counts. None: any."""

    ttft_s: float | None = None
    gap_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """A request that failed meets none."""
        if record.outcome != "ok":
            return False
        ttft_s, gap_s = record.ttft_s, record.largest_gap_s
        in_time = self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s)
        return in_time and (self.gap_s is None or gap_s is None or gap_s <= self.gap_s)

    def describe(self) -> str:
        told = [("first token", self.ttft_s), ("every gap", self.gap_s)]
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in told if limit is not None) or "no limits"


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Goodput:
    """share: of the requests that were not given up by us, those that met the limits. requests_per_s: how many of them
    a second of the run."""

    limits: Limits
    met: int
    share: float
    requests_per_s: float


def goodput(records: Sequence[RequestRecord], limits: Limits, wall_s: float) -> Goodput:
    met = sum(limits.met_by(record) for record in records)
    counted = sum(record.outcome != "cancelled" for record in records)
    return Goodput(limits, met, met / counted if counted else 0.0, met / wall_s if wall_s else 0.0)
