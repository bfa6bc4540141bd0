"""`make bench-transfer-isolation`: what transfers do to what is more urgent than they are.

Decode steps while two sidecars of the same host move state as fast as they may, and hand-offs over a slow link that a
background copy would fill. `docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from benchmarks.rivals import REPO, Rival, baton
from benchmarks.slow_link import link_rows
from benchmarks.storm import storm
from benchmarks.transfer_ends import Ends, Work
from benchmarks.two_hosts import NoLink, TwoHosts
from shared.engine.weights.catalog import prepare
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, load_settings

_ROWS = ("isolation-decode", "isolation-link")
_FORMATS = {"weights": "float16", "kv_dtype": "float16"}
_BATCH, _CONTEXT = 8, 512
_STORM = Work(64 << 10, 1024, 4096)
_IDLE_S = 3.0
_LEAST_RATE = 0.25
_IDLE_AIM, _NEIGHBOUR_AIM = 1.5, 1.2


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    rows: list[Row] = []
    missing: list[str] = []
    if "isolation-decode" in args.rows:
        rows += _decode_rows(args, console)
    if "isolation-link" in args.rows:
        try:
            with TwoHosts(args.link) as hosts:
                rows += asyncio.run(link_rows(hosts, args.rounds, args.handoffs, args.link, console))
        except NoLink as why:
            missing.append(f"isolation-link: {why}")
    print_rows(console, f"bench-transfer-isolation: link of {args.link}", rows, machine)
    for text in missing:
        console.print(f"not measured: {text}", style="yellow", soft_wrap=True)
    console.print(f"written to {write_rows('transfer_isolation', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-transfer-isolation", description=__doc__)
    parser.add_argument("--rows", default=",".join(_ROWS), help=f"of {', '.join(_ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, action="append", help="of decoding; several times. Default: cores less 1, and cores"
    )
    parser.add_argument("--steps", type=int, default=120, help="decode steps of each measurement")
    parser.add_argument("--streams", type=int, default=2, help="transfers of the storm at once")
    parser.add_argument("--sidecar", default="", help="settings of the storm's sidecars, as in niceness=10,cores=1")
    parser.add_argument("--link", default="200mbit", help="rate of the link between the two hosts, as tc has it")
    parser.add_argument("--handoffs", type=int, default=30, help="hand-offs of each measurement over it")
    args = parser.parse_args(argv)
    args.rows = [name for name in args.rows.split(",") if name]
    if unknown := set(args.rows) - set(_ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    args.sidecar = tuple(
        part
        for pair in args.sidecar.split(",")
        if pair
        for part in (f"--{pair.partition('=')[0].replace('_', '-')}", pair.partition("=")[2])
    )
    return args


@dataclass
class _Decode:
    """Of each round: p99 of a step alone, in the storm, and beside a neighbour; and the storm's rates."""

    idle: list[float] = field(default_factory=list)
    storm: list[float] = field(default_factory=list)
    neighbour: list[float] = field(default_factory=list)
    rate_alone: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)


def _decode_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    cache_dir = load_settings(GatewaySettings).cache_dir
    directory = prepare(DEFAULT_MODEL, cache_dir).directory
    home = cache_dir / "peers"
    home.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    rows = []
    for threads in args.threads or sorted({max(1, cores - 1), cores}):
        suffix = "" if threads < cores or cores == 1 else "-no-core-left"
        with baton(directory, threads, _FORMATS, home) as engine:
            found = asyncio.run(_storms(engine, args, console, threads))
        rows += _storm_rows(found, suffix)
    return rows


def _storm_rows(found: _Decode, suffix: str) -> list[Row]:
    """Goals only where decode leaves a core to others, as `baton up` has it."""
    goal = None if suffix else 1.0
    idle = [_IDLE_AIM * value for value in found.idle]
    neighbour = [_NEIGHBOUR_AIM * value for value in found.neighbour]
    rate = _LEAST_RATE * median(found.rate_alone)
    return [
        figure(f"isolation-decode{suffix}", "ms", found.storm, against=median(idle), goal=goal),
        figure(f"isolation-decode-neighbour{suffix}", "ms", found.storm, against=median(neighbour), goal=goal),
        figure(f"isolation-decode-rate{suffix}", "GiB/s", found.rate, less_is_better=False, against=rate, goal=goal),
        figure(f"step-p99-alone{suffix}", "ms", found.idle),
        figure(f"step-p99-neighbour{suffix}", "ms", found.neighbour),
        figure(f"storm-alone{suffix}", "GiB/s", found.rate_alone, less_is_better=False),
    ]


async def _storms(engine: Rival, args: argparse.Namespace, console: Console, threads: int) -> _Decode:
    found = _Decode()

    async def p99_ms() -> float:
        asked = {"batch": _BATCH, "context": _CONTEXT, "steps": args.steps, "messages": False}
        return await asyncio.to_thread(engine.ask, "p99_ms", **asked)

    with tempfile.TemporaryDirectory() as directory:
        async with await Ends.start(_STORM, "shm", Path(directory), args.sidecar) as ends:

            async def transfer(number: int) -> int:
                await ends.send_s(number)
                return _STORM.num_bytes

            for number in range(args.rounds):
                console.print(f"decode steps on {threads} threads in a storm, round {number + 1} of {args.rounds} …")
                async with storm(transfer, args.streams) as meter:
                    await asyncio.sleep(_IDLE_S)
                found.rate_alone.append(meter.rate())
                found.idle.append(await p99_ms())
                async with storm(transfer, args.streams) as meter:
                    found.storm.append(await p99_ms())
                found.rate.append(meter.rate())
                async with _neighbour(found.rate[-1]):
                    found.neighbour.append(await p99_ms())
    return found


@asynccontextmanager
async def _neighbour(rate: float) -> AsyncIterator[None]:
    """A process that copies as many bytes a second."""
    argv = (sys.executable, "-m", "benchmarks.neighbour", str(rate))
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, cwd=REPO)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield
        process.stdin.close()
        reached = float(await process.stdout.readline())
        if reached < 0.8 * rate:
            print(f"the neighbour copied {reached:.2f} GiB/s of {rate:.2f}", file=sys.stderr)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
