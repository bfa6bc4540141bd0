"""`make bench-handoff`: what a client waits for a prompt's state, and how much of its way computing hides.

The gap between the first two tokens of a 2k-token prompt over shared memory, in a cluster; then, without a cluster,
when all of a prompt's state is there by how it is cut into transfers, over shared memory and over a slow link between
two hosts. `docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from benchmarks.first import load
from benchmarks.handoff_ends import Handoff, HandoffEnds, handoff_ends
from benchmarks.local_cluster import LocalCluster
from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from benchmarks.two_hosts import NoLink, TwoHosts
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from shared.runtime.overlap import Cut
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, PrefillSettings, load_settings

_ROWS = ("handoff-gap", "shm", "link")
_LONG = 2048
_REQUESTS, _ANSWER = 6, 16
_SLACK_MS = 3.0
_OVERLAP_GOAL, _LANDED_GOAL = 0.8, 0.5
_CUTS = {"one-piece": Cut(by_chunks=False), "chunks": Cut(), "layers": Cut(layers=8)}
_SHORT = (16, 32, 64, 128, 256, 512, 1024)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    rows: list[Row] = []
    missing: list[str] = []
    if "handoff-gap" in args.rows:
        rows += gap_rows(console)
    if "shm" in args.rows:
        rows += asyncio.run(_cut_rows(args, console, "shm", None))
    if "link" in args.rows:
        try:
            with TwoHosts(args.link) as hosts:
                rows += asyncio.run(_cut_rows(args, console, args.link, hosts))
        except NoLink as why:
            missing.append(f"link: {why}")
    print_rows(console, f"bench-handoff: link of {args.link}, {args.threads} compute threads", rows, machine)
    for text in missing:
        console.print(f"not measured: {text}", style="yellow", soft_wrap=True)
    console.print(f"written to {write_rows('handoff', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-handoff", description=__doc__)
    parser.add_argument("--rows", default=",".join(_ROWS), help=f"of {', '.join(_ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", default="200mbit", help="rate of the link between the two hosts, as tc has it")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="of the prompt's computing")
    args = parser.parse_args(argv)
    args.rows = [name for name in args.rows.split(",") if name]
    if unknown := set(args.rows) - set(_ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    return args


def gap_rows(console: Console) -> list[Row]:
    """At most one ordinary step, the last chunk's bytes at the speed of memcpy, and 3 ms."""
    console.print(f"prompts of {_LONG - 1} tokens in a cluster, one at a time …")
    with LocalCluster("--set", "prefill.overlap=chunks") as cluster:
        result = load(cluster.url, 1, requests=_REQUESTS, prompt_len=_LONG - 1, answer_len=_ANSWER, seed=1)
    records = result.records[1:]  # the first one finds pages that nobody has touched
    ordinary = 1000 * median(gap for record in records for gap in record.gaps_s[1:])
    chunk = load_settings(PrefillSettings).prefill_chunk
    directory = prepare(DEFAULT_MODEL, load_settings(GatewaySettings).cache_dir).directory
    components = load_model(directory).components(16)
    last = sum(one.row_bytes * one.num_layers for one in components) * ((_LONG - 1) % chunk or chunk)
    copied_ms = 1000 * last / _memcpy_bytes_per_s()
    gaps = [1000 * gap for record in records if (gap := record.handoff_gap_s) is not None]
    return [
        figure("handoff-gap", "ms", gaps, against=ordinary + copied_ms + _SLACK_MS, goal=1.0),
        figure("handoff-gap-step", "ms", [ordinary]),
        figure("handoff-gap-last-chunk-memcpy", "ms", [copied_ms]),
    ]


def _memcpy_bytes_per_s() -> float:
    source, target = np.ones(1 << 27, np.uint8), np.zeros(1 << 27, np.uint8)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        spent.append(time.perf_counter() - began)
    return len(source) / median(spent)


async def _cut_rows(args: argparse.Namespace, console: Console, name: str, hosts: TwoHosts | None) -> list[Row]:
    """Each length and cut in turns. What the shortest way is compared with: all in one piece at the end."""
    directory = prepare(DEFAULT_MODEL, load_settings(GatewaySettings).cache_dir).directory
    with tempfile.TemporaryDirectory() as here:
        placed = {} if hosts is None else {"inside": hosts.inside, "hosts": hosts.addresses}
        transfer = "shm" if hosts is None else "tcp"
        ends_of = handoff_ends(directory, Path(here), transfer, threads=args.threads, longest=_LONG, **placed)
        async with ends_of as ends:
            found = await _measured(ends, args.rounds, console, name)
    rows = []
    for length in (*_SHORT, _LONG):
        totals = {cut: [1000 * one.total_s for one in found[length, cut]] for cut in _CUTS}
        for cut, runs in totals.items():
            against = None if cut == "one-piece" else median(totals["one-piece"])
            rows.append(figure(f"there-{name}-{length}-{cut}", "ms", runs, against=against))
    longest = found[_LONG, "chunks"]
    goals = (1.0, 1.0) if hosts is not None else (None, None)
    overlap, landed = [one.overlap for one in longest], [one.landed for one in longest]
    return [
        *rows,
        figure(f"overlap-{name}", "of 1", overlap, less_is_better=False, against=_OVERLAP_GOAL, goal=goals[0]),
        figure(f"landed-{name}", "of 1", landed, less_is_better=False, against=_LANDED_GOAL, goal=goals[1]),
        figure(f"overlap-{name}-layers", "of 1", [one.overlap for one in found[_LONG, "layers"]], less_is_better=False),
        figure(f"compute-{name}", "ms", [1000 * one.compute_s for one in longest]),
        figure(f"moved-{name}", "ms", [1000 * one.moved_s for one in longest]),
        figure(f"exposed-{name}", "ms", [1000 * one.exposed_s for one in longest]),
    ]


async def _measured(
    ends: HandoffEnds, rounds: int, console: Console, name: str
) -> dict[tuple[int, str], list[Handoff]]:
    found: dict[tuple[int, str], list[Handoff]] = {}
    await ends.run(_LONG, 0, Cut())  # touches every page
    for number in range(rounds):
        console.print(f"{name}: prompts of {_SHORT[0]} to {_LONG} tokens, round {number + 1} of {rounds} …")
        for length in (*_SHORT, _LONG):
            for cut, how in _CUTS.items():
                found.setdefault((length, cut), []).append(await ends.run(length, length + number, how))
    return found


if __name__ == "__main__":
    main()
