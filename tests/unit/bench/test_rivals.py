"""Engines under measurement as processes: what they answer, and that nothing of them stays."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.engine import Entrants
from benchmarks.rivals import NotThere, Rival

SCRIPT = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["kind"] == "end":
        sys.exit("out of words")
    print(json.dumps({"value": child.pid + asked["more"]}), flush=True)
"""


def rival(tmp_path: Path, script: str = SCRIPT) -> Rival:
    return Rival("other", [sys.executable, "-c", script], tmp_path / "other.log")


def state_of(pid: int) -> str:
    """A letter as in /proc: T where it is stopped; Z too where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def becomes(pid: int, state: str) -> bool:
    deadline = time.monotonic() + 20
    while state_of(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) == state


def test_it_answers_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    with rival(tmp_path) as other:
        child = int(other.ask("pid", more=0))
        assert int(other.ask("pid", more=1)) == child + 1
        assert becomes(child, "T"), "who is not asked stands still, with all that it started"
    assert becomes(child, "Z")


def test_one_that_is_dropped_is_ended_at_once(tmp_path: Path) -> None:
    with rival(tmp_path) as other:
        child = int(other.ask("pid", more=0))
        entrants = Entrants(peers=[other])
        with pytest.raises(NotThere, match=r"other ended: out of words \(see .*other\.log\)") as reason:
            other.ask("end")
        entrants.drop(other, reason.value)
        assert becomes(child, "Z")
        assert entrants.peers == []
        assert entrants.missing == [f"other: {reason.value}"]


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotThere, match="other ended: no room"), rival(tmp_path, "import sys; sys.exit('no room')"):
        pass
