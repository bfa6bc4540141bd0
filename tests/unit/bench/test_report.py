"""Rows as other programs read them."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import Machine, figure, print_rows, write_rows

KEYS = {"name", "value", "unit", "against", "ratio", "goal", "runs", "machine"}


def test_the_value_is_the_median_and_a_larger_ratio_is_better() -> None:
    less = figure("start", "s", [12.0, 10.0, 30.0], against=24.0, goal=1.5)
    assert (less.value, less.ratio, less.reached) == (12.0, 2.0, True)
    more = figure("output", "tokens/s", [30.0], less_is_better=False, against=20.0, goal=2.0)
    assert (more.ratio, more.reached) == (1.5, False)


def test_a_row_without_comparison() -> None:
    row = figure("private", "MiB", [1.0, 2.0])
    assert (row.value, row.against, row.ratio, row.goal, row.reached) == (1.5, None, None, None, None)


def test_nothing_spent_reaches_every_goal() -> None:
    assert figure("added", "MiB", [-3.0], against=500.0, goal=5.0).reached


def test_the_file(tmp_path: Path) -> None:
    rows = [figure("start", "s", [12.0, 10.0], against=20.0, goal=1.0), figure("added", "MiB", [0.0], against=1.0)]
    path = write_rows("first", rows, Machine.here(), tmp_path / "results")
    entries = json.loads(path.read_text())
    assert path.name == "first.json"
    assert [set(entry) for entry in entries] == [KEYS, KEYS]
    assert entries[0]["runs"] == [12.0, 10.0]
    assert entries[1]["ratio"] is None
    assert entries[0]["machine"]["cores"] >= 1
    assert entries[0]["machine"]["torch"][0].isdigit()


@pytest.mark.parametrize("load", [0.0, 50.0])
def test_the_table_is_never_cut_and_says_when_the_machine_was_busy(
    load: float, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine("cpu", 2, 1 << 34, "Linux", "3.11", "2.13", "2.4", load)
    rows = [figure("private-added-by-second-worker", "MiB", [47.4], against=513.0, goal=20.0)]
    print_rows(Console(width=40, highlight=False), "title", rows, machine)
    printed = capsys.readouterr().out
    assert "private-added-by-second-worker" in printed
    assert "≥ 20 MISSED" in printed
    assert ("Provisional" in printed) == (load > 1)


def test_nothing_gained_on_either_side_is_equal() -> None:
    assert figure("x", "requests/s", [0.0], less_is_better=False, against=0.0).ratio == 1.0
    assert figure("x", "requests/s", [0.0], less_is_better=False, against=2.0).ratio == 0.0
