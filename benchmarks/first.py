"""`make bench-first`: the figures of a cluster of one prefill and one decode worker on this machine.

Start to ready, time to first token, handoff gap, tokens/s at 1 and 8 streams, memory of every process, and what a
second worker adds to it. `docs/benchmarks.md` says what each row means.
"""

import asyncio
from collections.abc import Iterator
from statistics import median

from rich.console import Console

from benchmarks.local_cluster import LocalCluster
from benchmarks.memory import memory_by_name, torch_process_without_weights
from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from services.bench.figures.records import RequestRecord
from services.bench.options import BenchOptions
from services.bench.run import BenchResult, run_bench
from shared.engine.weights.catalog import prepare
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, load_settings

_START_AIM_S = 20.0
_STARTS = 3
_PROMPTS = (64, 512)
_REQUESTS = 5
_ROUNDS = 3
_MIB = 1 << 20
_SHARE_GOAL = 5.0
"""The weights are at least so many times larger than what a second worker adds."""


def main() -> None:
    console, machine = Console(highlight=False), Machine.here()
    weights_bytes = prepare(DEFAULT_MODEL, load_settings(GatewaySettings).cache_dir).config.weights_bytes
    rows: list[Row] = []
    starts = [_start_s(console, f"start {number} of {_STARTS + 1}") for number in range(1, _STARTS + 1)]
    console.print(f"start {_STARTS + 1} of {_STARTS + 1}; this cluster then takes the load …")
    with LocalCluster() as cluster:
        starts.append(cluster.start_s)
        # The first start fills the caches of files and compiled kernels and does not count.
        rows.append(figure("start-to-ready", "s", starts[1:], against=_START_AIM_S, goal=1.0))
        seeds = iter(range(1000))
        for prompt_len in _PROMPTS:
            console.print(f"prompts of {prompt_len} tokens, one at a time …")
            rows += _latency_rows(cluster.url, prompt_len, next(seeds))
        console.print("1 stream and 8 streams, in turns …")
        rows += _throughput_rows(cluster.url, seeds)
        console.print("memory …")
        rows += _memory_rows(cluster, weights_bytes)
    print_rows(console, "bench-first: 1 prefill and 1 decode worker", rows, machine)
    console.print(f"written to {write_rows('first', rows, machine)}", soft_wrap=True)


def _start_s(console: Console, text: str) -> float:
    console.print(f"{text} …")
    with LocalCluster() as cluster:
        return cluster.start_s


def _latency_rows(url: str, prompt_len: int, seed: int) -> list[Row]:
    """The handoff gap against the ordinary gap between the tokens that follow it in the same answers."""
    result = load(url, streams=1, requests=_REQUESTS, prompt_len=prompt_len, answer_len=8, seed=seed)
    gaps = [_gaps(record) for record in result.records]
    ordinary = median(gap for each in gaps for gap in each[1:])
    at_gateway = [record.handoff_gap_s for record in result.records]
    return [
        figure(f"ttft-{prompt_len}", "ms", [_ms(record.ttft_s) for record in result.records]),
        figure(f"handoff-gap-{prompt_len}", "ms", [_ms(each[0]) for each in gaps], against=_ms(ordinary)),
        figure(f"handoff-gap-at-gateway-{prompt_len}", "ms", [_ms(gap) for gap in at_gateway], against=_ms(ordinary)),
    ]


def _throughput_rows(url: str, seeds: Iterator[int]) -> list[Row]:
    one: list[float] = []
    eight: list[float] = []
    for _ in range(_ROUNDS):
        for streams, rates in ((1, one), (8, eight)):
            result = load(url, streams, requests=streams, prompt_len=32, answer_len=64, seed=next(seeds))
            rates.append(result.summary.tokens_per_s)
    alone = figure("output-1-stream", "tokens/s", one, less_is_better=False)
    return [alone, figure("output-8-streams", "tokens/s", eight, less_is_better=False, against=alone.value)]


def _memory_rows(cluster: LocalCluster, weights_bytes: int) -> list[Row]:
    """The decode worker is the second that maps the weights."""
    memory, without = memory_by_name(cluster.processes()), torch_process_without_weights()
    rows = []
    for name, found in memory.items():
        rows.append(figure(f"resident-{name}", "MiB", [found.resident_bytes / _MIB]))
        rows.append(figure(f"private-{name}", "MiB", [found.private_bytes / _MIB]))
    total = sum(found.proportional_bytes for found in memory.values())
    added = memory["decode-0"].private_bytes - without.private_bytes
    return [
        *rows,
        figure("proportional-all", "MiB", [total / _MIB]),
        figure("private-torch-without-weights", "MiB", [without.private_bytes / _MIB]),
        figure("private-added-by-second-worker", "MiB", [added / _MIB], against=weights_bytes / _MIB, goal=_SHARE_GOAL),
    ]


def load(url: str, streams: int, requests: int, prompt_len: int, answer_len: int, seed: int) -> BenchResult:
    """RuntimeError where a request failed: figures of what is left would be of something else."""
    options = BenchOptions(
        url=url,
        concurrency=streams,
        num_requests=requests,
        prompt_tokens=str(prompt_len),
        max_tokens=str(answer_len),
        seed=seed,
        path="remote",
    )
    result = asyncio.run(run_bench(options))
    if result.summary.succeeded != requests:
        raise RuntimeError(f"requests failed: {result.summary.errors}")
    return result


def _gaps(record: RequestRecord) -> list[float]:
    if len(record.chunk_s) < 3:
        raise RuntimeError(f"an answer came in {len(record.chunk_s)} pieces, too few to tell gaps")
    return record.gaps_s


def _ms(seconds: float | None) -> float:
    if seconds is None:
        raise RuntimeError("a figure is missing: did the request take another path?")
    return seconds * 1000


if __name__ == "__main__":
    main()
