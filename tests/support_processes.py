"""The processes of a real cluster as the operating system sees them."""

import psutil

from tests.support_cluster import RealCluster

CHANNELS_PER_PEER = 2
"""Connections a sidecar keeps open to a peer for the next transfer."""

Files = dict[tuple[str, int], int]


def launcher_of(cluster: RealCluster) -> psutil.Process:
    found = psutil.Process(cluster.workers("gateway")[0]["pid"]).parent()
    assert found is not None
    return found


def open_files(cluster: RealCluster) -> Files:
    """By name and pid: of all that report, of nats-server and of `baton` itself."""
    launcher = launcher_of(cluster)
    pids = [(worker["id"], worker["pid"]) for worker in cluster.workers()] + [("baton", launcher.pid)]
    pids += [("nats-server", child.pid) for child in launcher.children() if child.name() == "nats-server"]
    return {(name, pid): psutil.Process(pid).num_fds() for name, pid in pids}


def more_files(cluster: RealCluster, before: Files) -> list[str]:
    """What the processes of `before` that still live have open beyond that, and beyond what sidecars may keep."""
    may_keep = CHANNELS_PER_PEER * max(cluster.num_prefill, cluster.num_decode)
    return [
        f"{name} ({pid}) has {now} open files, {before[name, pid]} before"
        for (name, pid), now in open_files(cluster).items()
        if now > before.get((name, pid), now) + (may_keep if name.endswith("-sidecar") else 0)
    ]
