"""Medians over rounds and ratios against the first server; and who is asked when."""

import math
from dataclasses import replace

import pytest

from services.bench.campaign import turns
from services.bench.errors import BenchError
from services.bench.figures.compare import Measured, compare, ratio
from services.bench.figures.records import RequestRecord
from services.bench.figures.summary import Summary, summarize
from services.bench.options import BenchOptions, CampaignOptions, NamedTarget, parse_rates, parse_targets


def summary(ttft_s: float, gap_s: float) -> Summary:
    """One request: a token at ttft_s, another gap_s later; sent at 0, so that output is 2 ÷ the sum."""
    record = RequestRecord(0, 0.0, 0.0, outcome="ok", ended_s=ttft_s + gap_s, chunk_s=[ttft_s, ttft_s + gap_s])
    return summarize([record])


def test_medians_and_ratios() -> None:
    rounds = {"one": [(1.0, 1.0), (2.0, 2.0), (9.0, 7.0)], "two": [(1.0, 0.25), (0.5, 0.5), (0.25, 0.25)]}
    runs = [Measured(name, None, summary(*times)) for name, found in rounds.items() for times in found]
    rows = {row.metric: row for row in compare(runs)}
    ttft = rows["first token p50"]
    assert ttft.values == {"one": 2000.0, "two": 500.0}
    assert ttft.ratios == {"two": 4.0}  # less is better
    assert ttft.runs == {"one": [1000.0, 2000.0, 9000.0], "two": [1000.0, 500.0, 250.0]}
    output = rows["output"]
    assert output.values == {"one": 0.5, "two": 2.0}
    assert output.ratios == {"two": 4.0}  # more is better
    assert rows["largest gap p99"].ratios == {"two": 8.0}
    assert "handoff gap p50" not in rows  # nobody has it


def test_each_rate_has_rows_of_its_own() -> None:
    runs = [
        Measured(name, rate, summary(ttft_s, 1.0))
        for name, rate, ttft_s in (("a", 1.0, 1.0), ("b", 1.0, 2.0), ("a", 2.0, 3.0), ("b", 2.0, 1.0))
    ]
    ratios = [(row.rate, row.ratios["b"]) for row in compare(runs) if row.metric == "first token p50"]
    assert ratios == [(1.0, 0.5), (2.0, 3.0)]


def test_a_server_that_lacks_a_figure() -> None:
    failed = summarize([RequestRecord(0, 0.0, 0.0, outcome="error", ended_s=1.0)])
    rows = {row.metric: row for row in compare([Measured("a", None, failed), Measured("b", None, summary(1.0, 1.0))])}
    assert rows["first token p50"].values == {"a": None, "b": 1000.0}
    assert rows["first token p50"].ratios == {"b": None}
    assert rows["output"].ratios == {"b": math.inf}
    assert rows["output"].as_dict()["ratios"] == {"b": None}  # JSON knows no infinity


def test_ratios_of_nothing() -> None:
    assert ratio(0.0, 0.0, less_is_better=True) == 1.0
    assert ratio(0.0, 5.0, less_is_better=True) == math.inf
    assert ratio(5.0, 0.0, less_is_better=True) == 0.0


def test_who_is_asked_when() -> None:
    targets = (NamedTarget("a", "http://a"), NamedTarget("b", "http://b"), NamedTarget("c", "http://c"))
    found = list(turns(CampaignOptions(BenchOptions(rate=1.0), targets, rates=(1.0, 4.0), rounds=2)))
    assert [(turn.round, turn.rate, turn.target.name) for turn in found] == [
        *((1, 1.0, name) for name in "abc"),
        *((1, 4.0, name) for name in "abc"),
        *((2, 1.0, name) for name in "bca"),
        *((2, 4.0, name) for name in "bca"),
    ]
    cells = {(turn.round, turn.rate) for turn in found}
    seeds = {cell: {turn.options.seed for turn in found if (turn.round, turn.rate) == cell} for cell in cells}
    assert all(len(each) == 1 for each in seeds.values())  # the same requests for each server
    assert len(set.union(*seeds.values())) == len(cells)  # and others in each round and at each rate
    assert {(turn.options.url, turn.options.rate) for turn in found} == {
        (t.url, r) for t in targets for r in (1.0, 4.0)
    }


def test_one_server_without_rates_is_one_turn() -> None:
    options = CampaignOptions(BenchOptions(url="http://x"))
    (turn,) = turns(options)
    assert (turn.options, options.is_single) == (options.base, True)
    assert not replace(options, rounds=2).is_single


def test_targets_and_rates_of_the_flags() -> None:
    assert parse_targets(["a=http://x:1", "b=y c=z"]) == (
        NamedTarget("a", "http://x:1"),
        NamedTarget("b", "y"),
        NamedTarget("c", "z"),
    )
    assert parse_rates("0.5,1, 2") == (0.5, 1.0, 2.0)
    for text in ("", "0", "1,1", "x", "1,,2", "nan"):
        with pytest.raises(BenchError, match="write different requests a second"):
            parse_rates(text)
    for texts in (["http://x"], ["=x"], ["a="]):
        with pytest.raises(BenchError, match="write NAME=URL"):
            parse_targets(texts)
    with pytest.raises(BenchError, match="a name of its own"):
        parse_targets(["a=x", "a=y"])
