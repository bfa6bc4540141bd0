"""`baton bench` as a person starts it, at a real cluster."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support_cluster import REPO, RealCluster


def bench(cluster: RealCluster, json_file: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    argv = [sys.executable, "-m", "services.cli", "bench", "--url", cluster.url, "--json", str(json_file), *flags]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120.0, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, json.loads(json_file.read_text())


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
