"""`make bench-engine`: our engine beside others on this machine, and what a step of ours costs beside its kernels.

All engines stay loaded and are asked in turns, so that whatever else the machine does meets all of them alike.
`docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.report import RESULTS, Machine, Row, figure, print_rows, write_rows
from benchmarks.rivals import MAKERS, NotThere, Rival, baton
from shared.engine.weights.catalog import prepare
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, load_settings

CONTEXT = 512
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
_FORMATS = (
    {"weights": "float16", "kv_dtype": "float16"},
    {"weights": "int4", "kv_dtype": "float16"},
)
"""The narrowest ones that give the golden answers, and the fastest."""
_EXACT_PEERS = ("llamacpp-F16", "vllm", "hf")
_GOALS = {
    "decode-b1-exact": 1.0,
    "decode-b8-exact": 2.0,
    "decode-b32-exact": 2.0,
    "decode-b8-fast": 1.5,
    "decode-b32-fast": 1.5,
    "prefill-512": 1.3,
    "prefill-2048": 1.3,
}
_OUTSIDE_AIM, _P99_AIM = 0.10, 1.2
_MESSAGES_BATCH, _MESSAGES_STEPS = 8, 150
_LENGTHS = (128, 512, 2048, 8192)
_COST_BATCHES = (1, 8, 32, 64)
_COST_TOKEN_BYTES = 23_040
_COST_MEMORY = 0.6
"""Of the memory that is free: what does not fit is left out of the cost plot."""

Runs = dict[tuple[str, str, int], list[float]]
"""(engine, kind, batch or length) -> tokens/s of each round."""


@dataclass
class Entrants:
    """ours: by the formats it was opened with; the first is the golden-exact one. missing: what was not measured, and
    why."""

    ours: list[Rival] = field(default_factory=list)
    peers: list[Rival] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def drop(self, rival: Rival, why: object) -> None:
        self.missing.append(f"{rival.name}: {why}")
        rival.end()
        self.peers = [peer for peer in self.peers if peer is not rival]


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    cache_dir = load_settings(GatewaySettings).cache_dir
    directory = prepare(DEFAULT_MODEL, cache_dir).directory
    home = cache_dir / "peers"
    home.mkdir(parents=True, exist_ok=True)
    entrants = Entrants()
    with ExitStack() as stack:
        for formats in args.formats:
            entrants.ours.append(stack.enter_context(baton(directory, args.threads, formats, home)))
        _enter_peers(args, home, cache_dir, entrants, stack, console)
        rows = _compared(entrants, args, console)
    with baton(directory, args.threads, args.formats[0], home) as alone:
        rows += _overhead_rows(alone, args.rounds, console)
        rows.append(_messages_row("step-p99-under-2000-messages-no-core-left", alone, args.rounds, console))
        rows += _cost_rows(alone, console) if args.cost else []
    with baton(directory, max(args.threads - 1, 1), args.formats[0], home) as roomy:
        row = _messages_row("step-p99-under-2000-messages", roomy, args.rounds, console, goal=1.0)
        rows.append(row)
    print_rows(console, f"bench-engine: {args.threads} threads, context {CONTEXT}", rows, machine)
    for text in entrants.missing:
        console.print(f"not measured: {text}", style="yellow", soft_wrap=True)
    console.print(f"written to {write_rows('engine', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__)
    parser.add_argument("--peers", default=",".join(MAKERS), help="of hf, llamacpp, vllm; empty for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of each measurement")
    parser.add_argument(
        "--formats",
        type=_formats,
        action="append",
        help="NAME=VALUE,… for load_model, as in weights=float16,kv_dtype=float16; several times: the first is the "
        "golden-exact one, the fastest of all counts as fast. Default: float16 and int4 weights, with a float16 cache",
    )
    parser.add_argument("--no-cost", dest="cost", action="store_false", help="leave out step cost by context and batch")
    args = parser.parse_args(argv)
    args.formats = args.formats or list(_FORMATS)
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := set(args.peers) - set(MAKERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    return args


def _formats(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split(",") if each)


def _enter_peers(
    args: argparse.Namespace, home: Path, cache_dir: Path, entrants: Entrants, stack: ExitStack, console: Console
) -> None:
    gguf = next(iter(sorted((cache_dir / "sources").glob("*.gguf"))), cache_dir / "no.gguf")
    for name in args.peers:
        console.print(f"{name} (made the first time, which takes minutes) …")
        try:
            for rival in MAKERS[name](home, args.threads, gguf):
                entrants.peers.append(stack.enter_context(rival))
        except NotThere as reason:
            entrants.missing.append(f"{name}: {reason}")


def _compared(entrants: Entrants, args: argparse.Namespace, console: Console) -> list[Row]:
    runs: Runs = {}
    for number in range(args.rounds + 1):  # the first one warms up and does not count
        for batch in BATCHES:
            console.print(f"round {number} of {args.rounds}: decode, batch {batch} …")
            asked = {"batch": batch, "context": CONTEXT, "steps": args.steps}
            _round(entrants, runs, "decode", batch, asked, keep=number > 0)
        for length in PROMPTS:
            console.print(f"round {number} of {args.rounds}: prefill, {length} tokens …")
            _round(entrants, runs, "prefill", length, {"length": length, "seed": number}, keep=number > 0)
    rows = [
        figure(f"{kind}-{'b' if kind == 'decode' else ''}{size}-{name}", "tokens/s", values, less_is_better=False)
        for (name, kind, size), values in runs.items()
    ]
    return [*rows, *_ratios(entrants, runs)]


def _round(entrants: Entrants, runs: Runs, kind: str, size: int, asked: dict[str, int], *, keep: bool) -> None:
    for rival in (*entrants.ours, *entrants.peers):
        try:
            value = rival.ask(kind, **asked)
        except NotThere as reason:
            if rival in entrants.ours:
                raise
            entrants.drop(rival, reason)
        else:
            if keep:
                runs.setdefault((rival.name, kind, size), []).append(value)


def _ratios(entrants: Entrants, runs: Runs) -> list[Row]:
    """Ours against the best of the others that were measured; no `against` where there was none."""
    exact = entrants.ours[0].name
    names = [rival.name for rival in entrants.ours]

    def best(kind: str, size: int, of: Sequence[str]) -> tuple[float, ...]:
        found = [runs[name, kind, size] for name in of if (name, kind, size) in runs]
        return tuple(max(found, key=median, default=()))

    peers = sorted({name for name, _, _ in runs} - set(names))
    llama = [name for name in peers if name.startswith("llamacpp")]
    compared = [(f"decode-b{b}-exact", "decode", b, [exact], list(_EXACT_PEERS)) for b in BATCHES]
    compared += [(f"decode-b{b}-fast", "decode", b, names, llama) for b in BATCHES if b > 1]
    compared += [(f"prefill-{n}", "prefill", n, names, peers) for n in PROMPTS]
    rows = []
    for name, kind, size, mine, others in compared:
        theirs = best(kind, size, others)
        against = median(theirs) if theirs else None
        ours = best(kind, size, mine)
        rows.append(figure(name, "tokens/s", ours, less_is_better=False, against=against, goal=_GOALS[name]))
    return rows


def _overhead_rows(ours: Rival, rounds: int, console: Console) -> list[Row]:
    rows = []
    for batch in BATCHES:
        console.print(f"outside kernels, batch {batch} …")
        asked = {"batch": batch, "context": CONTEXT, "steps": 32}
        shares = [ours.ask("outside", **asked) for _ in range(rounds)]
        goal = 1.0 if batch == 32 else None
        rows.append(figure(f"outside-kernels-b{batch}", "share", shares, against=_OUTSIDE_AIM, goal=goal))
    return rows


def _messages_row(name: str, ours: Rival, rounds: int, console: Console, goal: float | None = None) -> Row:
    """`baton up` leaves the event loop a core: one thread less than cores, or less."""
    console.print("steps while messages arrive …")
    ratios = []
    asked = {"batch": _MESSAGES_BATCH, "context": CONTEXT, "steps": _MESSAGES_STEPS}
    for _ in range(rounds):
        idle = ours.ask("p99_ms", messages=False, **asked)
        ratios.append(ours.ask("p99_ms", messages=True, **asked) / idle)
    return figure(name, "× idle", ratios, against=_P99_AIM, goal=goal)


def _cost_rows(ours: Rival, console: Console) -> list[Row]:
    costs: dict[tuple[int, int], float] = {}
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_tokens = int(_COST_MEMORY * free_bytes / _COST_TOKEN_BYTES)
    for batch in _COST_BATCHES:
        for length in _LENGTHS:
            if batch * length <= num_tokens:
                console.print(f"a step of {batch} at context {length} …")
                context = min(length, _LENGTHS[-1] - 16)
                costs[batch, length] = ours.ask("step_ms", batch=batch, context=context, steps=8)
    plot = _plot(costs)
    console.print(f"plotted to {plot}" if plot else "no plot: matplotlib is not installed", soft_wrap=True)
    return [figure(f"step-b{batch}-context-{length}", "ms", [cost]) for (batch, length), cost in costs.items()]


def _plot(costs: dict[tuple[int, int], float]) -> Path | None:
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure_, axes = pyplot.subplots(figsize=(7, 5))
    for batch in _COST_BATCHES:
        points = [(length, cost) for (b, length), cost in costs.items() if b == batch]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch}")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="step, ms", title="Cost of a decode step")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "engine-step-cost.png"
    figure_.savefig(path, dpi=120, bbox_inches="tight")
    return path


if __name__ == "__main__":
    main()
