"""From records to figures. Pure functions; every figure says over what it was taken."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from services.bench.figures.distribution import Distribution
from services.bench.figures.goodput import NO_LIMITS, Goodput, Limits, goodput
from services.bench.figures.records import RequestRecord

CountedBy = Literal["usage", "pieces", "mixed"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds, unless a name says otherwise. Distributions are over requests that succeeded.

    wall_s: from the first sending to the last end; rates are over it. gap_s: between pieces of one answer that carried
    text, over all of them; largest_gap_s: the largest of each request. token_time_s: mean time of a request's tokens
    after the first. handoff_gap_s: first to second token at Baton's gateway, requests of path `remote`. queue_s: what
    Baton says they waited. late_s: sending behind the plan, of an open load; where it is large, this client was the
    limit. counted_by `pieces`: the server gave no usage, so a piece counts as a token. moved_bytes: state that was
    handed over, by Baton's own word.
    """

    requests: int
    succeeded: int
    failed: int
    cancelled: int
    wall_s: float
    requests_per_s: float
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    counted_by: CountedBy
    ttft_s: Distribution | None
    gap_s: Distribution | None
    largest_gap_s: Distribution | None
    token_time_s: Distribution | None
    duration_s: Distribution | None
    handoff_gap_s: Distribution | None
    queue_s: Distribution | None
    late_s: Distribution | None
    prompt_len: Distribution | None
    completion_len: Distribution | None
    moved_bytes: int
    goodput: Goodput
    errors: dict[str, int]
    paths: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(records: Sequence[RequestRecord], limits: Limits = NO_LIMITS) -> Summary:
    good = [record for record in records if record.outcome == "ok"]
    wall_s = _wall_s(records)
    completion = sum(record.num_tokens for record in good)
    return Summary(
        requests=len(records),
        succeeded=len(good),
        failed=sum(record.outcome == "error" for record in records),
        cancelled=sum(record.outcome == "cancelled" for record in records),
        wall_s=wall_s,
        requests_per_s=len(good) / wall_s if wall_s else 0.0,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in good),
        completion_tokens=completion,
        tokens_per_s=completion / wall_s if wall_s else 0.0,
        counted_by=_counted_by(good),
        ttft_s=Distribution.of(record.ttft_s for record in good),
        gap_s=Distribution.of(gap for record in good for gap in record.gaps_s),
        largest_gap_s=Distribution.of(record.largest_gap_s for record in good),
        token_time_s=Distribution.of(record.token_time_s for record in good),
        duration_s=Distribution.of(record.duration_s for record in good),
        handoff_gap_s=Distribution.of(record.handoff_gap_s for record in good),
        queue_s=Distribution.of(record.queue_s for record in good),
        late_s=Distribution.of(record.sent_s - record.planned_s for record in records),
        prompt_len=Distribution.of(record.prompt_tokens for record in good),
        completion_len=Distribution.of(record.num_tokens for record in good),
        moved_bytes=sum(_moved_bytes(record) for record in good),
        goodput=goodput(records, limits, wall_s),
        errors=_counts(record.error for record in records if record.outcome == "error"),
        paths=_counts(record.path for record in good),
    )


def _wall_s(records: Sequence[RequestRecord]) -> float:
    """To the last moment that anything is known of."""
    ends = [moment for r in records for moment in (r.sent_s, r.ended_s, *r.chunk_s[-1:]) if moment is not None]
    return max(ends) - min(record.sent_s for record in records) if records else 0.0


def _moved_bytes(record: RequestRecord) -> int:
    moved = (record.timings or {}).get("bytes")
    return sum(int(each) for each in moved.values()) if isinstance(moved, dict) else 0


def _counted_by(good: Sequence[RequestRecord]) -> CountedBy:
    by_usage = sum(record.completion_tokens is not None for record in good)
    if by_usage == len(good):
        return "usage"
    return "mixed" if by_usage else "pieces"


def _counts(words: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(word for word in words if word is not None).most_common())
