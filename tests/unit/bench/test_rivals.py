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


def is_running(pid: int) -> bool:
    """A zombie that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_it_answers_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    with rival(tmp_path) as other:
        child = int(other.ask("pid", more=0))
        assert int(other.ask("pid", more=1)) == child + 1
        assert is_running(child)
    assert ends(child)


def test_one_that_is_dropped_is_ended_at_once(tmp_path: Path) -> None:
    with rival(tmp_path) as other:
        child = int(other.ask("pid", more=0))
        entrants = Entrants(peers=[other])
        with pytest.raises(NotThere, match=r"other ended: out of words \(see .*other\.log\)") as reason:
            other.ask("end")
        entrants.drop(other, reason.value)
        assert ends(child)
        assert entrants.peers == []
        assert entrants.missing == [f"other: {reason.value}"]


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotThere, match="other ended: no room"), rival(tmp_path, "import sys; sys.exit('no room')"):
        pass
