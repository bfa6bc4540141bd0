"""The command line of the simulation: runs seeds in several processes, adds up what they did, and shows what broke."""

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from shared.runtime.mode import Mode
from tests.sim.simulation import SeedResult, mode_of, run_seed
from tests.sim.table import missing, render

_BATCH = 8
_SAY_EVERY = 100


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of names must repeat, too
        arguments = sys.argv[1:] if argv is None else argv
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *arguments], os.environ | {"PYTHONHASHSEED": "0"})
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    began = time.monotonic()
    total = Total()
    for result in _results([(seed, options.mode or mode_of(seed)) for seed in seeds], options.jobs):
        total.add(result)
        if total.seeds % _SAY_EVERY == 0:
            print(f"{total.seeds} of {len(seeds)} seeds, {time.monotonic() - began:.0f} s", flush=True)
        if result.violation is not None:
            _show_failure(result)
            if total.failures >= options.max_failures:
                break
        elif options.seed is not None:
            print("\n".join((*result.last_events, f"trace {result.trace}")))
        if options.for_s is not None and time.monotonic() - began > options.for_s:
            print(f"{options.for_s} s are over")
            break
    total.show(time.monotonic() - began, whole=options.seed is None)
    return 1 if total.failures or (options.whole_table and missing(total.hits)) else 0


class Total:
    def __init__(self) -> None:
        self.seeds = self.failures = self.num_events = 0
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.struck: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.work: Counter[str] = Counter()

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        self.failures += result.violation is not None
        self.num_events += result.num_events
        self.hits.update(result.hits)
        self.struck.update(result.struck)
        self.outcomes.update(result.outcomes)
        self.work.update(result.work)

    def show(self, wall_s: float, *, whole: bool) -> None:
        print("\n".join(render(self.hits)))
        if whole and (left := missing(self.hits)):
            print(f"never hit: {', '.join(f'{fault} in {role}:{state}' for fault, role, state in left)}")
        print(f"seeds {self.seeds}, requests {sum(self.outcomes.values())}, events {self.num_events}")
        for name, counts in (("outcomes", self.outcomes), ("faults", self.struck), ("work", self.work)):
            print(f"{name}: " + ", ".join(f"{what} {count}" for what, count in counts.most_common()))
        cpu_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(f"{wall_s:.0f} s, {cpu_s / max(1, self.seeds):.3f} CPU seconds a seed; violations: {self.failures}")


def _results(seeds: list[tuple[int, Mode]], jobs: int) -> Iterator[SeedResult]:
    if jobs <= 1 or len(seeds) < 2 * _BATCH:
        yield from map(_run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, seeds, chunksize=_BATCH)


def _run(seed: tuple[int, Mode]) -> SeedResult:
    return run_seed(*seed)


def _show_failure(result: SeedResult) -> None:
    assert result.violation is not None
    invariant, detail = result.violation
    print(f"seed {result.seed} ({result.mode}) broke: {invariant}\n  {detail}\nthe last events:")
    print("\n".join(f"  {event}" for event in result.last_events))
    print(
        f"again: {os.path.relpath(sys.executable)} -m tests.sim --seed {result.seed} --mode {result.mode}\n", flush=True
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--seed", type=int, help="only this one, and show its last events")
    parser.add_argument("--mode", choices=get_args(Mode), help="of all seeds (as the seed says: one in ten without P)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--for-s", type=float, help="stop after so many seconds, with what there is")
    parser.add_argument("--max-failures", type=int, default=3, help="stop after so many (3)")
    parser.add_argument("--whole-table", action="store_true", help="fail unless every pair was hit")
    return parser
