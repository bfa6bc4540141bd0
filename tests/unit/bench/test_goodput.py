"""Which requests were served well enough, from records made by hand."""

import pytest

from services.bench.figures.goodput import Limits, goodput
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import summarize


def answered(number: int, sent_s: float, chunk_s: list[float], **more: object) -> RequestRecord:
    fields = {"outcome": "ok", "status": 200, "ended_s": chunk_s[-1], "chunk_s": chunk_s} | more
    return RequestRecord(number, sent_s, sent_s, **fields)  # type: ignore[arg-type]


RECORDS = [
    answered(0, 0.0, [0.5, 0.75, 1.0]),  # first token 0.5, gaps 0.25
    answered(1, 0.0, [0.5, 0.5, 0.5, 1.5]),  # gap 1.0, though a third on average
    answered(2, 1.0, [4.0, 4.25]),  # first token 3.0
    answered(3, 1.0, [1.5]),  # one token, no gap
    RequestRecord(4, 1.0, 1.0, outcome="error", chunk_s=[1.1], ended_s=2.0),
    RequestRecord(5, 3.0, 3.0, chunk_s=[3.1]),  # given up by us: counts nowhere
]


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        (Limits(), 4),
        (Limits(ttft_s=0.5), 3),
        (Limits(ttft_s=0.49), 0),
        (Limits(gap_s=0.25), 3),
        (Limits(gap_s=0.5), 3),
        (Limits(ttft_s=2.0, gap_s=0.5), 2),
    ],
)
def test_share_and_rate(limits: Limits, met: int) -> None:
    found = goodput(RECORDS, limits, wall_s=4.0)
    assert (found.met, found.share, found.requests_per_s) == (met, met / 5, met / 4)


def test_it_is_part_of_the_summary() -> None:
    found = summarize(RECORDS, Limits(ttft_s=2.0, gap_s=0.5))
    assert found.wall_s == 4.25
    assert (found.goodput.met, found.goodput.requests_per_s) == (2, 2 / 4.25)


def test_nothing_was_sent() -> None:
    found = goodput([], Limits(1.0, 1.0), 0.0)
    assert (found.met, found.share, found.requests_per_s) == (0, 0.0, 0.0)


def test_limits_are_told() -> None:
    assert Limits(2.0, 0.2).describe() == "first token ≤ 2 s, every gap ≤ 0.2 s"
    assert Limits().describe() == "no limits"


def test_a_request_says_its_queues_and_its_gaps() -> None:
    timings = {"queue_s": 0.25, "prefill_queue_s": 0.5, "bytes": {"kv": 1000, "ring": 24}, "handoff_gap_s": 0.125}
    record = answered(0, 0.0, [1.0, 1.25, 2.25], timings=timings, path="remote")
    told = record.as_dict()
    assert (told["queue_s"], told["handoff_gap_s"], told["ttft_s"]) == (0.75, 0.125, 1.0)
    assert told["gaps_s"] == [0.25, 1.0]
    assert (told["gap_s"]["p50"], told["gap_s"]["p90"], told["gap_s"]["max"]) == (0.625, pytest.approx(0.925), 1.0)
    found = summarize([record, answered(1, 0.0, [1.0, 2.0])])
    assert found.queue_s is not None
    assert (found.queue_s.count, found.queue_s.p50, found.moved_bytes) == (1, 0.75, 1024)
