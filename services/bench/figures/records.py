"""What was observed of one request: written by the client while it happens, read by the summary afterwards."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from services.bench.figures.distribution import Distribution

Outcome = Literal["ok", "error", "cancelled"]


@dataclass(slots=True)
class RequestRecord:
    """All times are seconds since the load began.

    planned_s: when it should have been sent (an open load; else when it was sent); waits count from there, or a client
    that is late would make a server look fast. chunk_s: the arrival of each piece
    of the answer that carried text; a piece may hold several tokens. Token counts are the server's own (`usage`), None
    where it gave none. error: the status and the server's code, such as `429 queue_full`, or what went wrong on the
    way. cancelled: we gave it up, at Ctrl-C.
    """

    number: int
    planned_s: float
    sent_s: float
    outcome: Outcome = "cancelled"
    status: int | None = None
    error: str | None = None
    chunk_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    path: str | None = None
    timings: Mapping[str, Any] | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_s[0] - self.planned_s if self.chunk_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    @property
    def largest_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    @property
    def queue_s(self) -> float | None:
        """What Baton says it waited, at the gateway and before its prompt had its turn; None from other servers."""
        waits = [(self.timings or {}).get(name) for name in ("queue_s", "prefill_queue_s")]
        known = [float(wait) for wait in waits if isinstance(wait, int | float)]
        return sum(known) if known else None

    @property
    def duration_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.planned_s

    @property
    def num_tokens(self) -> int:
        """By `usage`; where the server gave none, the number of pieces."""
        return len(self.chunk_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def token_time_s(self) -> float | None:
        """Mean time of a token after the first."""
        if len(self.chunk_s) < 2 or self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)

    @property
    def handoff_gap_s(self) -> float | None:
        """From the first token to the second as Baton's gateway saw it; None from other servers and of other paths."""
        gap = (self.timings or {}).get("handoff_gap_s")
        return float(gap) if self.path == "remote" and isinstance(gap, int | float) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was observed, and what no reader should have to derive."""
        gaps_s = self.gaps_s
        return {
            "number": self.number,
            "planned_s": self.planned_s,
            "sent_s": self.sent_s,
            "outcome": self.outcome,
            "status": self.status,
            "error": self.error,
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "duration_s": self.duration_s,
            "handoff_gap_s": self.handoff_gap_s,
            "gap_s": asdict(found) if (found := Distribution.of(gaps_s)) else None,
            "gaps_s": gaps_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "path": self.path,
            "timings": self.timings,
        }
