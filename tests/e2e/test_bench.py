"""`baton bench` as a person starts it, at a real cluster, alone and beside a plain OpenAI-compatible server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support_cluster import REPO, RealCluster

TRACE = REPO / "benchmarks" / "traces" / "mooncake_conversation_200.jsonl"
OTHER_SERVER = """
import asyncio
from tests.unit.bench.stub_server import stub_server

async def main():
    async with stub_server() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def bench_campaign(url: str, json_file: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    argv = [sys.executable, "-m", "services.cli", "bench", "--url", url, "--json", str(json_file), *flags]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120.0, check=False)
    assert "Traceback" not in done.stderr
    written = json.loads(json_file.read_text())
    assert (written["format"], written["version"]) == ("baton-bench", 1)
    return done.returncode, done.stdout, written


def bench(cluster: RealCluster, json_file: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """One run."""
    status, printed, written = bench_campaign(cluster.url, json_file, *flags)
    (run,) = written["runs"]
    return status, printed, run


@pytest.fixture
def other_url() -> Iterator[str]:
    """A server that is not Baton, in a process of its own."""
    argv = [sys.executable, "-c", OTHER_SERVER]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize(
    "flags",
    [("--concurrency", "4"), ("--rate", "4"), ("--api", "chat", "--concurrency", "4")],
    ids=["closed", "open", "chat"],
)
def test_a_load(cluster: RealCluster, tmp_path: Path, flags: tuple[str, ...]) -> None:
    sizes = ("--requests", "6", "--prompt-tokens", "40-80", "--max-tokens", "4-8", "--path", "remote")
    status, printed, found = bench(cluster, tmp_path / "run.json", *flags, *sizes)
    cluster.settled()
    summary, requests = found["summary"], found["requests"]
    assert (status, found["target"]["is_baton"], found["stopped"]) == (0, True, False)
    assert (summary["succeeded"], summary["counted_by"], summary["paths"]) == (6, "usage", {"remote": 6})
    assert all(39 <= request["prompt_tokens"] <= 81 for request in requests)
    assert all(4 <= request["completion_tokens"] <= 8 for request in requests)
    assert summary["completion_tokens"] == sum(request["completion_tokens"] for request in requests)
    for request in requests:
        timings = request["timings"]
        assert 0 < timings["first_token_s"] <= request["ttft_s"] <= request["duration_s"]
        assert timings["handoff_gap_s"] == pytest.approx(request["gaps_s"][0], abs=0.25)
        assert sum(request["gaps_s"]) <= request["duration_s"]
    assert summary["handoff_gap_s"]["count"] == 6
    assert "handoff gap" in printed


def test_requests_that_the_cluster_refuses(cluster: RealCluster, tmp_path: Path) -> None:
    status, printed, found = bench(cluster, tmp_path / "run.json", "--requests", "2", "--prompt-tokens", "9000")
    assert status == 1
    assert found["summary"]["errors"] == {"400 context_length_exceeded": 2}
    assert "2 of 2 failed: 400 context_length_exceeded (2)" in printed


def test_a_trace(cluster: RealCluster, tmp_path: Path) -> None:
    flags = ("--trace", str(TRACE), "--rate", "4", "--requests", "4", "--block-tokens", "16", "--max-context", "300")
    limits = ("--ttft-limit", "60", "--gap-limit", "30", "--plots", str(tmp_path / "plots"))
    status, printed, found = bench(cluster, tmp_path / "run.json", *flags, *limits)
    cluster.settled()
    summary = found["summary"]
    assert (status, summary["succeeded"], summary["goodput"]["met"]) == (0, 4, 4)
    assert summary["goodput"]["share"] == 1.0
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()[:40]]
    expected = [
        (line["input_length"] / 32, max(1, round(line["output_length"] / 32)))
        for line in lines
        if (line["input_length"] + line["output_length"]) / 32 <= 300
    ]
    for request, (prompt_len, answer_len) in zip(found["requests"], expected, strict=False):
        assert request["prompt_tokens"] == pytest.approx(prompt_len, rel=0.05)
        assert request["completion_tokens"] == answer_len
    assert "goodput" in printed
    pools, moved = found["cluster"]["pools"], found["cluster"]["moved_bytes"]
    assert 0 < pools["prefill"]["busy_share"] <= 1.2
    assert pools["decode"]["tokens_generated"] == summary["completion_tokens"] - 4  # P made each first one
    assert pools["prefill"]["kv_use"]["max"] > 0
    assert sum(moved.values()) == summary["moved_bytes"] > 0
    assert 0 < found["client_cpu_share"] < 1
    assert sorted(path.suffix for path in (tmp_path / "plots").iterdir()) == [".png"] * 3


def test_a_comparison_with_another_server(cluster: RealCluster, other_url: str, tmp_path: Path) -> None:
    compare = ("--compare", f"baton={cluster.url}", "--compare", f"other={other_url}", "--rounds", "2")
    load = ("--requests", "3", "--prompt-tokens", "40", "--max-tokens", "4", "--rates", "4,8")
    status, printed, found = bench_campaign("http://127.0.0.1:1", tmp_path / "run.json", *compare, *load)
    cluster.settled()
    assert status == 0
    runs = [(run["round"], run["rate"], run["name"], run["summary"]["succeeded"]) for run in found["runs"]]
    expected = [(number, rate, name) for number in (1, 2) for rate in (4.0, 8.0) for name in ("baton", "other")]
    assert runs == [(*each, 3) for each in expected]
    by_cell = {(run["round"], run["rate"], run["name"]): run for run in found["runs"]}
    for number, rate, _ in expected:
        ours, theirs = by_cell[number, rate, "baton"], by_cell[number, rate, "other"]
        assert [request["planned_s"] for request in ours["requests"]] == [r["planned_s"] for r in theirs["requests"]]
        assert not ours["options"]["ignore_eos"]  # not every server knows it, so it is asked of none
        assert (ours["cluster"] is None, theirs["cluster"] is None) == (False, True)
    rows = {(row["metric"], row["rate"]): row for row in found["comparison"]}
    first_token = rows["first token p50", 4.0]
    assert len(first_token["runs"]["baton"]) == 2
    assert first_token["ratios"]["other"] == pytest.approx(
        first_token["values"]["baton"] / first_token["values"]["other"]
    )
    assert first_token["ratios"]["other"] > 1.0  # it computes nothing
    assert re.search(r"first token p50 +ms +\S+ +\S+ +\S+", printed)
