"""How many cores there are to compute with."""

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def host_cores() -> int:
    """Cores this process may use: its affinity, and its container's share where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here, so no such limit
    return cores
