"""Figures against values computed by hand."""

import pytest

from services.bench.figures.distribution import Distribution, percentile
from services.bench.figures.goodput import Limits
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import summarize


def answered(number: int, sent_s: float, chunk_s: list[float], **more: object) -> RequestRecord:
    fields = {"outcome": "ok", "status": 200, "ended_s": chunk_s[-1], "chunk_s": chunk_s} | more
    return RequestRecord(number, sent_s, sent_s, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (25, 17.5), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)]
)
def test_percentiles_lie_between_neighbours(percent: float, expected: float) -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0], percent) == pytest.approx(expected)


def test_every_percentile_of_one_value_is_that_value() -> None:
    assert Distribution.of([7.0]) == Distribution(1, 7.0, 7.0, 7.0, 7.0, 7.0)


def test_a_distribution_leaves_out_what_is_missing() -> None:
    assert Distribution.of([None, 4.0, 2.0, None]) == Distribution(2, 3.0, 3.0, 3.8, pytest.approx(3.98), 4.0)
    assert Distribution.of([None]) is None


def test_times_of_one_request() -> None:
    record = answered(0, 1.0, [1.5, 1.75, 2.75], completion_tokens=6)
    assert record.ttft_s == 0.5
    assert record.gaps_s == [0.25, 1.0]
    assert record.duration_s == 1.75
    assert record.token_time_s == 0.25  # 1.25 s for the five tokens after the first


def test_a_request_that_we_sent_late_has_waited_since_it_was_due() -> None:
    late = RequestRecord(0, 1.0, 1.75, outcome="ok", chunk_s=[2.0, 2.25], ended_s=2.5)
    assert (late.ttft_s, late.duration_s, late.gaps_s) == (1.0, 1.5, [0.25])
    found = summarize([late], Limits(ttft_s=0.5))
    assert (found.goodput.met, found.late_s) == (0, Distribution.of([0.75]))
    assert found.wall_s == 0.75, "from the first sending: rates are over the time in which there was a load"


def test_an_answer_of_one_piece_has_no_gaps() -> None:
    record = answered(0, 1.0, [1.5], completion_tokens=1)
    assert (record.ttft_s, record.gaps_s, record.token_time_s) == (0.5, [], None)
    assert summarize([record]).largest_gap_s is None


def test_the_whole_of_a_run() -> None:
    records = [
        answered(0, 0.0, [0.5, 0.75, 1.75], prompt_tokens=10, completion_tokens=3, path="remote"),
        answered(1, 0.0, [1.0, 2.0], prompt_tokens=20, completion_tokens=4, path="local"),
        RequestRecord(2, 1.0, 1.25, outcome="error", status=429, error="429 queue_full", ended_s=1.5),
        RequestRecord(3, 3.0, 3.0, chunk_s=[4.0], completion_tokens=100),
    ]
    found = summarize(records)
    assert (found.requests, found.succeeded, found.failed, found.cancelled) == (4, 2, 1, 1)
    assert found.wall_s == 4.0
    assert (found.prompt_tokens, found.completion_tokens) == (30, 7)
    assert found.tokens_per_s == 7 / 4
    assert found.requests_per_s == 2 / 4
    assert found.counted_by == "usage"
    assert found.ttft_s == Distribution(2, 0.75, 0.75, pytest.approx(0.95), pytest.approx(0.995), 1.0)
    assert found.gap_s is not None
    assert (found.gap_s.count, found.gap_s.p50, found.gap_s.max) == (3, 1.0, 1.0)
    assert found.largest_gap_s is not None
    assert found.largest_gap_s.count == 2
    assert found.token_time_s is not None
    assert found.token_time_s.mean == pytest.approx((1.25 / 2 + 1.0 / 3) / 2)
    assert found.late_s is not None
    assert found.late_s.max == 0.25
    assert found.errors == {"429 queue_full": 1}
    assert found.paths == {"remote": 1, "local": 1}


def test_pieces_count_where_the_server_does_not() -> None:
    silent, counting = answered(0, 0.0, [1.0, 2.0]), answered(1, 0.0, [1.0, 2.0], completion_tokens=5)
    assert (summarize([silent]).completion_tokens, summarize([silent]).counted_by) == (2, "pieces")
    assert (summarize([silent, counting]).completion_tokens, summarize([silent, counting]).counted_by) == (7, "mixed")


def test_only_prompts_that_were_handed_over_have_a_handoff_gap() -> None:
    timings = {"handoff_gap_s": 0.25}
    records = [
        answered(0, 0.0, [1.0], path="remote", timings=timings),
        answered(1, 0.0, [1.0], path="local", timings=timings),
        answered(2, 0.0, [1.0], path="remote", timings={"handoff_gap_s": None}),
        answered(3, 0.0, [1.0]),
    ]
    assert summarize(records).handoff_gap_s == Distribution.of([0.25])


def test_nothing_was_sent() -> None:
    found = summarize([])
    assert (found.requests, found.wall_s, found.tokens_per_s, found.ttft_s) == (0, 0.0, 0.0, None)
