"""`make bench-reuse`: how long the first token takes where the state of the prompt is in a worker's pool already, with
another worker, or in the store, beside computing it.

A real cluster with the default model, one worker of each role. To make one forget, it is killed and comes back.
`docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import json
import random
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.local_cluster import LocalCluster
from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from shared.runtime.settings import DEFAULT_MODEL

_LENGTHS = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096}
_QUESTION = 48
"""Tokens of a second turn's own, behind prompt and answer of the first."""
_ANSWER = 32
_WAIT_S = 120.0
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    rows: list[Row] = []
    flags = ("--kvstore", "1", "--set", f"kvstore.memory_mib={args.memory_mib}")
    with LocalCluster(*flags, reuse=True) as cluster:
        for name in args.lengths:
            measured: dict[str, list[float]] = defaultdict(list)
            for seed in range(args.rounds):
                console.print(f"{name} tokens, round {seed + 1} of {args.rounds} …")
                _measure(cluster, _LENGTHS[name], seed, measured)
            rows += _rows(name, measured)
    print_rows(console, "bench-reuse", rows, machine)
    console.print(f"written to {write_rows('reuse', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-reuse", description=__doc__)
    parser.add_argument("--lengths", default=",".join(_LENGTHS), help=f"prompts, of {', '.join(_LENGTHS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mib", type=int, default=1024, help="of the kvstore")
    args = parser.parse_args(argv)
    args.lengths = [one for one in args.lengths.split(",") if one]
    if unknown := set(args.lengths) - set(_LENGTHS):
        parser.error(f"unknown lengths: {', '.join(sorted(unknown))}")
    return args


def _measure(cluster: LocalCluster, length: int, seed: int, measured: dict[str, list[float]]) -> None:
    """One prompt by every way there is, then a second turn behind it."""
    prompt = _tokens(length, seed)
    first = _ask(cluster, prompt, "remote")
    _note(measured, "computed", first, expect_cached=range(1))
    _note(measured, "held", _ask(cluster, prompt, "local"), expect_cached=range(length - 64, length))
    _forget(cluster, "decode-0")
    _note(measured, "direct", _ask(cluster, prompt, "remote"), expect_cached=range(length - 64, length))
    _wait_stored(cluster, length // 64)
    _forget(cluster, "prefill-0")
    loaded = _ask(cluster, prompt, "remote")
    _note(measured, "store", loaded, expect_cached=range(length - 64, length))
    turn = [*prompt, *first["token_ids"], *_tokens(_QUESTION, seed + 1000)]
    second = _ask(cluster, turn, "remote")
    _note(measured, "turn", second, expect_cached=range(length - 64, len(turn)))
    measured["turn-bytes"].append(sum(second["timings"]["bytes"].values()) / _MIB)
    alone = _ask(cluster, turn, "remote", salt=f"alone-{seed}")
    _note(measured, "turn-computed", alone, expect_cached=range(1))
    measured["turn-computed-bytes"].append(sum(alone["timings"]["bytes"].values()) / _MIB)


def _note(measured: dict[str, list[float]], name: str, seen: dict[str, Any], expect_cached: range) -> None:
    if seen["timings"]["cached_tokens"] not in expect_cached:
        raise RuntimeError(f"{name}: {seen['timings']['cached_tokens']} tokens were there, and not {expect_cached}")
    measured[name].append(1000 * seen["timings"]["first_token_s"])


def _rows(name: str, measured: dict[str, list[float]]) -> list[Row]:
    computed, turn = figure(f"reuse-{name}-computed", "ms", measured["computed"]), measured["turn-computed"]
    anew = figure(f"reuse-{name}-turn-computed", "ms", turn)
    whole = figure(f"reuse-{name}-turn-computed-bytes", "MiB", measured["turn-computed-bytes"])
    ways = ("held", "direct", "store")
    return [
        computed,
        *(figure(f"reuse-{name}-{way}", "ms", measured[way], against=computed.value) for way in ways),
        figure(f"reuse-{name}-turn", "ms", measured["turn"], against=anew.value),
        anew,
        figure(f"reuse-{name}-turn-bytes", "MiB", measured["turn-bytes"], against=whole.value),
        whole,
    ]


def _ask(cluster: LocalCluster, prompt: Sequence[int], path: str, salt: str = "reuse") -> dict[str, Any]:
    """`token_ids` of the answer, and `timings`."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": list(prompt),
        "max_tokens": _ANSWER,
        "temperature": 0.0,
        "ignore_eos": True,
        "baton": {"timings": True, "token_ids": True, "cache_salt": salt, "path": path, "strict": path == "remote"},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600.0) as reply:
        answer = json.load(reply)
    return {"token_ids": answer["choices"][0]["token_ids"], "timings": answer["baton"]["timings"]}


def _forget(cluster: LocalCluster, name: str) -> None:
    """Kills a worker, and waits until it is there again; a first prompt of another kind makes its connections."""
    process = cluster.processes()[name]
    process.kill()
    _wait(lambda: _is_back(cluster, name, process.pid), f"{name} did not come back")
    _ask(cluster, _tokens(100, time.monotonic_ns()), "remote", salt="warm")


def _is_back(cluster: LocalCluster, name: str, pid: int) -> bool:
    return any(one["id"] == name and one["pid"] != pid and one["state"] == "ready" for one in _workers(cluster))


def _wait_stored(cluster: LocalCluster, blocks: int) -> None:
    """Until the store takes no more for a moment: there is the whole prompt by then."""
    known = lambda: sum(one["counters"].get("blocks_known", 0) for one in _workers(cluster))  # noqa: E731
    last = -1.0
    while known() != last or last < blocks:
        last = known()
        time.sleep(1.5)


def _workers(cluster: LocalCluster) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{cluster.url}/cluster", timeout=30.0) as answer:
        workers: list[dict[str, Any]] = json.load(answer)["workers"]
    return workers


def _wait(until: Any, otherwise: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.2)


def _tokens(length: int, seed: int) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(100, 40_000) for _ in range(length)]


if __name__ == "__main__":
    main()
