"""`make bench-recovery`: what the loss of a decode worker costs a stream, with a store and without, and what keeping
state in the store costs those that nobody disturbs.

A real cluster with the default model; the worker that streams is killed (SIGKILL) or told to end (SIGTERM).
`docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import json
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.first import load
from benchmarks.local_cluster import LocalCluster
from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from benchmarks.streams import Stream

_ROWS = ("recovery", "checkpoint-cost", "drain")
_LENGTHS = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8000}
_GOALS = ("2k", "4k", "8k")
_SHARE = 4
"""The store has to bring a stream back in so much less time than computing its state anew takes."""
_ANSWER, _BEFORE = 160, 72
"""Tokens of an answer, and of them those that there are when its worker is killed."""
_WAIT_S = 120.0
_STREAMS = 16
_LEAST_COST = 0.95
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    rows: list[Row] = []
    if "recovery" in args.rows:
        rows += _recovery_rows(args, console)
    if "drain" in args.rows:
        rows += _drain_rows(args, console)
    if "checkpoint-cost" in args.rows:
        rows += _cost_rows(args, console)
    print_rows(console, "bench-recovery", rows, machine)
    console.print(f"written to {write_rows('recovery', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-recovery", description=__doc__)
    parser.add_argument("--rows", default=",".join(_ROWS), help=f"of {', '.join(_ROWS)}")
    parser.add_argument("--lengths", default=",".join(_LENGTHS), help=f"prompts, of {', '.join(_LENGTHS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mib", type=int, default=1024, help="of the kvstore")
    args = parser.parse_args(argv)
    for name, known in (("rows", _ROWS), ("lengths", tuple(_LENGTHS))):
        wanted = [one for one in getattr(args, name).split(",") if one]
        if unknown := set(wanted) - set(known):
            parser.error(f"unknown {name}: {', '.join(sorted(unknown))}")
        setattr(args, name, wanted)
    return args


# A stream whose worker is killed


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream that lost its decode worker once, and when that was killed (`time.monotonic()`)."""

    stream: Stream
    killed_at: float

    @property
    def recovery(self) -> Mapping[str, Any]:
        return self.stream.recovery

    @property
    def detection_ms(self) -> float:
        """Until the gateway knew."""
        return 1000 * (self.stream.sent_at + self.recovery["detected_s"] - self.killed_at)

    @property
    def resumed_ms(self) -> float:
        """From then to the next token."""
        return float(1000 * (self.recovery["resumed_s"] - self.recovery["detected_s"]))


def _recovery_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """All lengths with a store, then all without one: there a prefill worker computes prompt and answer anew."""
    stored: dict[str, list[Loss]] = {}
    computed: dict[str, list[Loss]] = {}
    with LocalCluster("--decode", "2", "--kvstore", "1", "--set", f"kvstore.memory_mib={args.memory_mib}") as cluster:
        for name in args.lengths:
            console.print(f"{name} tokens, with a store …")
            stored[name] = [_lose(cluster, _LENGTHS[name], seed) for seed in range(args.rounds)]
    with LocalCluster("--decode", "2", "--kvstore", "0") as cluster:
        for name in args.lengths:
            console.print(f"{name} tokens, computed anew …")
            computed[name] = [_lose(cluster, _LENGTHS[name], seed) for seed in range(args.rounds)]
    rows: list[Row] = []
    for name in args.lengths:
        losses, anew = stored[name], [loss.resumed_ms for loss in computed[name]]
        paths = {loss.recovery["path"] for loss in losses}
        if paths != {"store"}:
            raise RuntimeError(f"prompts of {name}: not all recoveries came from the store but from {sorted(paths)}")
        goal = 1.0 if name in _GOALS else None
        against = median(anew) / (_SHARE if name in _GOALS else 1)
        rows += [
            figure(f"recovery-{name}", "ms", [loss.resumed_ms for loss in losses], against=against, goal=goal),
            figure(f"recovery-{name}-computed-anew", "ms", anew),
            figure(f"recovery-{name}-loaded", "tokens", [loss.recovery["loaded_tokens"] for loss in losses]),
            figure(f"recovery-{name}-recomputed", "tokens", [loss.recovery["recomputed_tokens"] for loss in losses]),
            figure(f"recovery-{name}-bytes", "MiB", [loss.recovery["loaded_bytes"] / _MIB for loss in losses]),
        ]
    every = [loss for losses in (*stored.values(), *computed.values()) for loss in losses]
    return [*rows, figure("recovery-detection", "ms", [loss.detection_ms for loss in every])]


def _lose(cluster: LocalCluster, prompt_len: int, seed: int) -> Loss:
    with Stream(cluster.url, _prompt(prompt_len, seed), _ANSWER) as stream:
        stream.wait_tokens(_BEFORE)
        victim = _serving(cluster, 1)
        process = cluster.processes()[victim]
        killed_at = time.monotonic()
        process.kill()
        stream.finish()
    _wait(lambda: len(_ready(cluster, "decode")) == 2, "the killed worker did not come back")
    return Loss(stream, killed_at)


# All streams of a worker that is told to end


def _drain_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """The largest gap of each stream, less the largest that it had had before."""
    added: list[float] = []
    paths: list[str] = []
    with LocalCluster("--decode", "2", "--kvstore", "1", "--set", f"kvstore.memory_mib={args.memory_mib}") as cluster:
        for number in range(args.rounds):
            console.print(f"drain of a worker with {_STREAMS} streams, round {number + 1} of {args.rounds} …")
            added_now, paths_now = _drain(cluster, number)
            added += added_now
            paths += paths_now
            _wait(lambda: len(_ready(cluster, "decode")) == 2, "the drained worker did not come back")
    from_store = 100 * paths.count("store") / len(paths)
    return [
        figure("drain-largest-added-gap", "ms", [1000 * max(added)]),
        figure("drain-added-gap", "ms", [1000 * gap for gap in added]),
        figure("drain-moved", "streams", [len(paths) / args.rounds]),
        figure("drain-from-store", "%", [from_store]),
    ]


def _drain(cluster: LocalCluster, number: int) -> tuple[list[float], list[str]]:
    """Twice as many streams as are wanted on one worker, as the gateway spreads them."""
    with ExitStack() as stack:
        seeds = range(2 * _STREAMS * number, 2 * _STREAMS * (number + 1))
        streams = [stack.enter_context(Stream(cluster.url, _prompt(128, seed), 3 * _ANSWER)) for seed in seeds]
        for stream in streams:
            stream.wait_tokens(_BEFORE)
        victim = cluster.processes()[_serving(cluster, _STREAMS)]
        told_at = time.monotonic()
        victim.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.finish()
    moved = [stream for stream in streams if stream.timings.get("recovery")]
    added = []
    for stream in moved:
        before = [gap for gap, came_at in zip(stream.gaps_s, stream.came_at, strict=False) if came_at + gap < told_at]
        added.append(max(stream.gaps_s) - max(before))
    return added, [stream.recovery["path"] for stream in moved]


# What it costs


def _cost_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """Tokens a second of eight streams, with and without decode workers that put their blocks into the store."""
    rates: dict[str, list[float]] = {"true": [], "false": []}
    for number in range(args.rounds):
        for store in ("true", "false") if number % 2 else ("false", "true"):
            console.print(f"8 streams, decode.store={store}, round {number + 1} of {args.rounds} …")
            with LocalCluster("--kvstore", "1", "--set", f"decode.store={store}") as cluster:
                load(cluster.url, 8, requests=8, prompt_len=32, answer_len=32, seed=1)  # touches pages
                result = load(cluster.url, 8, requests=16, prompt_len=32, answer_len=256, seed=2)
            rates[store].append(result.summary.tokens_per_s)
    without = figure("checkpoint-none", "tokens/s", rates["false"], less_is_better=False)
    return [
        figure(
            "checkpoint-cost",
            "tokens/s",
            rates["true"],
            less_is_better=False,
            against=without.value,
            goal=_LEAST_COST,
        ),
        without,
    ]


# The cluster


def _prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other seed or length begins with."""
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(100, 40_000) for _ in range(length)]


def _serving(cluster: LocalCluster, streams: int) -> str:
    """The decode worker with most streams under way; it has `streams` at least."""
    count = {one["id"]: one["tickets"].get("started", 0) for one in _ready(cluster, "decode")}
    name = max(count, key=lambda name: count[name], default="")
    if not name or count[name] < streams:
        raise RuntimeError(f"no decode worker has {streams} streams: {count}")
    return name


def _ready(cluster: LocalCluster, role: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{cluster.url}/cluster", timeout=30.0) as answer:
        workers = json.load(answer)["workers"]
    return [one for one in workers if one["role"] == role and one["state"] == "ready"]


def _wait(until: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
