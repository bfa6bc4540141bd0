"""Where a process may run, as settings say it: what is not there is refused in words, and what is there is applied."""

import os
import subprocess
import sys

import pytest

from shared.runtime.placement import Placement
from shared.runtime.settings import ConfigError, SidecarSettings, load_settings

OURS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cores": "x"}, "cores: 'x' is no core"),
        ({"cores": "0,,1"}, "cores: '' is no core"),
        ({"cores": "3-1"}, "cores: '3-1' is no range"),
        ({"cores": "-1"}, "is no core"),
        ({"cores": "0-99999"}, "is no range"),
        ({"cores": "1000"}, "cores: 1000 are not ours to use; there are"),
        ({"numa_node": "77"}, "numa_node: there is no node 77"),
        ({"niceness": "20"}, "niceness: "),
        ({"niceness": "-1"}, "niceness: "),
        ({"burst_bytes": "1KB"}, "burst_bytes (1000) must be between"),
        ({"background_bytes_per_s": "10KB"}, "background_bytes_per_s (10000) is so low"),
    ],
)
def test_what_cannot_be_is_refused_at_start(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(SidecarSettings, given)
    assert said in str(caught.value)


def test_a_cap_is_measured_by_the_bursts_of_what_it_caps() -> None:
    load_settings(SidecarSettings, {"background_bytes_per_s": "1MB"})
    with pytest.raises(ConfigError, match="its bursts of 4194304 bytes would come too"):
        load_settings(SidecarSettings, {"background_bytes_per_s": "1MB", "background_window_bytes": "0"})


def test_a_range_and_a_list_name_cores() -> None:
    text = f"{OURS[0]}, {OURS[-1]}"
    assert Placement.of(0, text, None).cores == {OURS[0], OURS[-1]}
    assert load_settings(SidecarSettings, {"cores": f"{OURS[0]}-{OURS[0]}"}).placement.cores == {OURS[0]}


def test_a_placement_is_applied_and_inherited_by_threads() -> None:
    program = f"""
import os, threading
from shared.runtime.placement import Placement
place = Placement(2, frozenset({{{OURS[-1]}}}))
place.apply()
def show():
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getaffinity(0))
def start():
    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
    return 5
start()
assert place.call_stepped_back(start) == 5
start()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    own, core = os.nice(0), f"{{{OURS[-1]}}}"
    assert result.stdout.splitlines() == [f"{own} {core}", f"{min(19, own + 2)} {core}", f"{own} {core}"]
