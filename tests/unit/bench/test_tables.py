"""What is printed under a table, so that nobody trusts a figure that he should doubt."""

import pytest
from rich.console import Console

from services.bench.campaign import Run
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import summarize
from services.bench.options import BenchOptions
from services.bench.run import BenchResult
from services.bench.show.comparison import print_run
from services.bench.show.tables import print_result
from services.bench.wire.client import Target


def result(late_s: float = 0.0, tokens: int | None = 3, left_out: int = 0, share: float = 0.01) -> BenchResult:
    records = [RequestRecord(0, 1.0, 1.0 + late_s, "ok", 200, chunk_s=[2.0, 3.0], ended_s=3.0)]
    records[0].completion_tokens = tokens
    records.append(RequestRecord(1, 1.0, 1.0, "error", 429, "429 queue_full", ended_s=1.5))
    target = Target("http://x", "completions", "m")
    return BenchResult(
        BenchOptions(), target, records, summarize(records), False, client_cpu_share=share, left_out=left_out
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (result(), None),
        (result(late_s=0.04), None),
        (result(late_s=0.5), "requests were sent up to 495 ms (p99) behind the plan: this client was the limit"),
        (result(tokens=None), "the server did not count all tokens"),
        (result(left_out=7), "7 requests of the trace were left out"),
    ],
)
def test_a_reason_to_doubt_is_said_of_one_run_and_of_each_of_many(
    found: BenchResult, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(Console(width=100), found)
    alone = capsys.readouterr().out
    assert "1 of 2 failed: 429 queue_full (1)" in alone
    assert "this client took 1.0% of a core" in alone
    print_run(Console(width=100), Run("x", None, 1, found), "round 1")
    of_many = capsys.readouterr().out
    assert "1 failed (429 queue_full)" in of_many
    for printed in (alone, of_many):
        if said is None:
            assert not any(word in printed for word in ("behind the plan", "did not count", "left out"))
        else:
            assert said in printed
