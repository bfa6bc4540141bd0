"""The check of GPUs, as far as a machine without one can run it: everything up to the device, on the CPU's kernels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu_check
from benchmarks.gpu_engine import check_engine
from benchmarks.gpu_stages import Findings, Stage, run_stages
from benchmarks.report import figure
from kernels.cpu.ops import CpuOps, warm_up
from kernels.reference import ReferenceOps
from shared.engine.graphs import Replay

TRIAL = ["--device", "cpu", "--tiny"]
STAGES = [stage.name for stage in gpu_check.make_stages(torch.device("cpu"), tiny=True)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for kv_dtype in ("float32", "float16", "fp8"):
        warm_up(kv_dtype)


def test_a_whole_run_measures_everything_and_finds_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "gpu.md"
    docs.write_text("# GPUs\n\n## Results\n\nNone yet.\n\n## After\n\nText.\n")
    arguments = [*TRIAL, "--results", str(tmp_path), "--docs", str(docs), "--write"]
    assert gpu_check.main(arguments) == 0, capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())}
    for name in ("decode-tiny-b1-eager", "decode-tiny-b2-graphs", "prefill-tiny-32", "decode-tiny-large-b1-graphs"):
        assert rows[name]["unit"] == "tokens/s"
        assert rows[name]["value"] > 0
    kernels = [row for name, row in rows.items() if name.startswith("kernel-")]
    assert {row["against"] for row in kernels} == {rows["copy"]["value"]}
    assert len(kernels) == 3 + 3 * 2 + 2 * 2 + 2 * 2
    for way in ("gather", "scatter", "bring-out", "bring-in"):
        assert rows[f"{way}-64k"]["against"] > 0
    assert "trial run" in rows["copy"]["machine"]["gpu"]
    text = docs.read_text()
    assert text.startswith("# GPUs\n\n## Results\n\nno GPU: a trial run on the CPU")
    assert "| prefill-tiny-32 |" in text
    assert "None yet" not in text
    assert text.endswith("\n\n## After\n\nText.\n")
    gpu_check.write_section(docs, "Again.\n")
    assert docs.read_text() == "# GPUs\n\n## Results\n\nAgain.\n\n## After\n\nText.\n"


def _short_context(ops: Any) -> None:
    right = ops.paged_attention
    ops.paged_attention = lambda q, kv, tables, starts, contexts, scale: right(
        q, kv, tables, starts, torch.where(contexts > 20, contexts - 1, contexts), scale
    )


def _wrong_row(ops: Any) -> None:
    right = ops.rotary_and_store
    ops.rotary_and_store = lambda q, k, v, cos_sin, positions, *rest: right(q, k, v, cos_sin, positions ^ 1, *rest)


def _unrotated(ops: Any) -> None:
    right = ops.rotary_and_store

    def wrong(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        right(q, *rest)
        return q

    ops.rotary_and_store = wrong


def _no_scale(ops: Any) -> None:
    ops.rms_norm = lambda x, weight, eps: x * weight


def _no_bias(ops: Any) -> None:
    right = ops.linear
    ops.linear = lambda x, weight, bias=None: right(x, weight)


def _no_tail(ops: Any) -> None:
    right = ops.gather_units

    def wrong(state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        right(state, units, buffer)
        buffer[..., buffer.shape[2] // 16 * 16 :] = 0

    ops.gather_units = wrong


def _next_unit(ops: Any) -> None:
    right = ops.scatter_units
    ops.scatter_units = lambda state, units, buffer: right(state, units ^ 1, buffer)


@pytest.mark.parametrize(
    ("spoil", "stage", "what"),
    [
        (_short_context, "paged-ops", "attention float32 over float32"),
        (_wrong_row, "paged-ops", "store"),
        (_unrotated, "paged-ops", "rotary"),
        (_no_scale, "flat-ops", "rms_norm bfloat16"),
        (_no_bias, "packed-ops", "linear int4"),
        (_no_tail, "unit-ops", "gather units of 15"),
        (_next_unit, "unit-ops", "scatter units of 4096"),
        (_next_unit, "unit-ops", "brought in units of 4096"),
        (_unrotated, "engine", "engine: token"),
    ],
)
def test_a_wrong_kernel_is_named_and_fails_the_check(
    spoil: Any, stage: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ops: Any = CpuOps()
    spoil(ops)
    monkeypatch.setattr(gpu_check, "get_ops", lambda device: ops)
    assert gpu_check.main([*TRIAL, "--results", str(tmp_path), "--only", stage]) == 1
    assert f"WRONG: {what}" in capsys.readouterr().out


def test_the_engine_is_checked_with_graphs_where_padding_is_known() -> None:
    findings, sizes = Findings(), list[int]()

    def record(work: Replay) -> Replay:
        sizes.append(len(work()))
        return work

    check_engine(findings, ReferenceOps(), torch.device("cpu"), record)
    assert findings.wrong == []
    assert sizes == [8, 4, 2, 1] * 2


def test_no_gpu_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--device", "cuda"]) == 2
    assert "device: cuda is asked for" in capsys.readouterr().out


def test_stages_without_time_are_left_out_by_name_and_later_short_ones_run() -> None:
    at, ran = [0.0], []

    def stage(name: str, expected_s: float, takes_s: float) -> Stage:
        def run(findings: Findings) -> None:
            at[0] += takes_s
            ran.append(name)
            findings.rows.append(figure(name, "s", [takes_s]))

        return Stage(name, expected_s, run)

    stages = [stage("first", 10, 12), stage("long", 60, 60), stage("short", 5, 5)]
    kept: list[int] = []
    found = run_stages(stages, 60, Console(quiet=True), lambda f: kept.append(len(f.rows)), lambda: at[0])
    assert ran == ["first", "short"]
    assert found.skipped == ["long: takes about 60 s, 48 s are left"]
    assert kept == [1, 2]


def test_a_stage_that_breaks_is_wrong_and_the_others_run() -> None:
    def broken(findings: Findings) -> None:
        raise RuntimeError("the device fell over\nat length")

    ran: list[str] = []
    stages = [Stage("broken", 1, broken), Stage("next", 1, lambda f: ran.append("next"))]
    found = run_stages(stages, 60, Console(quiet=True), lambda f: None, lambda: 0.0)
    assert ran == ["next"]
    assert found.wrong == ["broken: RuntimeError: the device fell over"]


def test_correctness_comes_before_speed() -> None:
    assert STAGES[:6] == ["flat-ops", "paged-ops", "packed-ops", "unit-ops", "graphs", "engine"]
    whole = gpu_check.make_stages(torch.device("cpu"), tiny=False)
    assert sum(stage.expected_s for stage in whole) <= gpu_check.BUDGET_S
