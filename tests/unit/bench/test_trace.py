"""A trace, scaled: lengths, times and what prompts share."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.bench.errors import BenchError
from services.bench.plan.prompts import Measure
from services.bench.plan.trace import TraceLine, TraceScale, TraceWorkload, read_trace
from services.bench.plan.workload import PlannedRequest
from tests.support_text import text_model

SLICE = Path(__file__).parents[3] / "benchmarks" / "traces" / "mooncake_conversation_200.jsonl"


def line(timestamp: float = 0, input_length: int = 1024, output_length: int = 320, ids: Any = (1, 2)) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(ids),
    }


def write(directory: Path, *lines: dict[str, Any]) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def planned(trace: list[TraceLine], scale: TraceScale | None = None, **more: Any) -> list[PlannedRequest]:
    return list(
        TraceWorkload(trace, scale or TraceScale(), more.pop("measure", Measure()), more.pop("seed", 0), **more)
    )


def words(request: PlannedRequest) -> list[str]:
    return request.prompt.split()


def test_lengths_are_scaled_by_the_block() -> None:
    scale = TraceScale(block_tokens=16)
    (found,) = planned([TraceLine(0.0, 1300, 320, (1, 2, 3))], scale)
    assert len(words(found)) == 41  # 1300 × 16 / 512 = 40.6
    assert found.max_tokens == 10
    (found,) = planned([TraceLine(0.0, 1300, 3, (1, 2, 3))], TraceScale(block_tokens=32))
    assert (len(words(found)), found.max_tokens) == (81, 1)


def test_equal_ids_give_equal_text_and_others_do_not() -> None:
    trace = [TraceLine(0.0, 1536, 32, (7, 8, 9)), TraceLine(1.0, 1280, 32, (7, 8, 4)), TraceLine(2.0, 512, 32, (9,))]
    one, other, third = planned(trace, TraceScale(block_tokens=16))
    assert words(one)[:32] == words(other)[:32]
    assert words(one)[32:40] != words(other)[32:40]
    assert len(words(other)) == 40
    assert words(third) == words(one)[32:]


def test_the_text_of_a_block_follows_from_its_id_wherever_a_replay_begins() -> None:
    trace = [TraceLine(0.0, 1024, 32, (7, 8)), TraceLine(1.0, 512, 32, (9,))]
    assert planned(trace)[1].prompt == planned(trace[1:])[0].prompt


def test_the_seed_decides_the_text_and_nothing_else() -> None:
    trace = [TraceLine(0.0, 1024, 32, (7, 8)), TraceLine(1.0, 1024, 32, (7, 9))]
    first, again, other = planned(trace, seed=1), planned(trace, seed=1), planned(trace, seed=2)
    assert first == again
    assert [each.prompt for each in first] != [each.prompt for each in other]
    assert [(each.at_s, each.max_tokens) for each in first] == [(each.at_s, each.max_tokens) for each in other]
    assert words(other[0])[:16] == words(other[1])[:16]


def test_a_server_with_longer_words_gets_fewer_of_them() -> None:
    trace = [TraceLine(0.0, 1024, 32, (7, 8)), TraceLine(1.0, 768, 32, (7, 9))]
    one, other = planned(trace, TraceScale(block_tokens=32), measure=Measure(base=10.0, slope=2.0))
    assert (len(words(one)), len(words(other))) == (32, 24)
    assert words(one)[:16] == words(other)[:16]


def test_times_are_stretched() -> None:
    trace = [TraceLine(at_s, 512, 32, (1,)) for at_s in (0.0, 1.0, 4.0)]
    assert [each.at_s for each in planned(trace, TraceScale(time=5.0))] == [0.0, 5.0, 20.0]
    assert [each.at_s for each in planned(trace, TraceScale(rate=0.25))] == [0.0, 2.0, 8.0]  # 2 gaps in 8 s


def test_a_rate_is_that_of_what_is_sent() -> None:
    trace = [TraceLine(at_s, 512 * n, 32, tuple(range(n))) for at_s, n in ((0.0, 1), (1.0, 9), (2.0, 1), (50.0, 9))]
    assert [each.at_s for each in planned(trace, TraceScale(rate=0.25, max_context=32))] == [0.0, 4.0]


def test_limits_end_it() -> None:
    trace = [TraceLine(float(at), 512, 32, (at,)) for at in range(10)]
    assert len(planned(trace, num_requests=4)) == 4
    assert [each.at_s for each in planned(trace, TraceScale(time=2.0), duration_s=6.0)] == [0.0, 2.0, 4.0, 6.0]


def test_what_is_too_long_is_left_out_and_counted() -> None:
    trace = [TraceLine(0.0, 512, 512, (1,)), TraceLine(1.0, 1024, 512, (1, 2)), TraceLine(3.0, 512, 32, (3,))]
    workload = TraceWorkload(trace, TraceScale(max_context=32), Measure(), 0)
    assert ([each.at_s for each in workload], workload.left_out) == ([0.0, 3.0], 1)
    assert (workload.num_requests, workload.duration_s) == (2, 3.0)
    with pytest.raises(BenchError, match="no request of the trace is left: 3 are longer"):
        TraceWorkload(trace, TraceScale(max_context=2), Measure(), 0)


def test_a_clock_that_ticks_slowly_is_spread_out(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, *[line(at) for at in (6000, 9000, 6000, 6000, 12000, 12000)]))
    assert [each.at_s for each in trace] == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": 1},
        [],
        line(input_length=0),
        line(output_length=0),
        line(ids=[1]),
        line(ids=["x", "y"]),
        line() | {"timestamp": None},
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(BenchError, match=r"trace.jsonl, line 2: needs"):
        read_trace(write(tmp_path, line(), wrong))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "trace.jsonl")
    with pytest.raises(BenchError, match="is empty"):
        read_trace(write(tmp_path))


def test_the_piece_of_mooncakes_trace_keeps_its_sharing() -> None:
    trace = read_trace(SLICE)
    assert len(trace) == 200
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(trace))
    found = planned(trace, TraceScale(block_tokens=16, max_context=2048))
    by_ids = {each.hash_ids: each for each in trace}
    assert len({request.prompt for request in found}) == len(found) <= len(by_ids)
    encoded = [text_model().encode(request.prompt, add_special=True) for request in found[:10]]
    for tokens, origin in zip(encoded, trace, strict=False):
        assert len(tokens) == pytest.approx(origin.input_len / 32, rel=0.05)
    assert len({tuple(tokens[:15]) for tokens in encoded}) == 1  # the block that all of them begin with
    assert len({tuple(tokens[:24]) for tokens in encoded}) == len(encoded)
