"""Several runs in one: every round goes to every server at every rate, with the same requests for each server."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from services.bench.errors import BenchError
from services.bench.figures.compare import Compared, Measured, compare
from services.bench.options import BenchOptions, CampaignOptions, NamedTarget
from services.bench.run import BenchResult, Prepared, prepare, run_prepared

FORMAT, VERSION = "baton-bench", 1
_SEED_STEP = 1009
"""Requests of another round or rate are others, or a cache would serve them."""


@dataclass(frozen=True, slots=True)
class Run:
    """round: from 1. rate: None where the load has none."""

    target: str
    rate: float | None
    round: int
    result: BenchResult

    @property
    def measured(self) -> Measured:
        return Measured(self.target, self.rate, self.result.summary)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.target, "rate": self.rate, "round": self.round} | self.result.as_dict()


@dataclass(frozen=True, slots=True)
class Turn:
    """What is next: which server gets which load."""

    target: NamedTarget
    rate: float | None
    round: int
    options: BenchOptions


@dataclass(frozen=True, slots=True)
class Campaign:
    options: CampaignOptions
    runs: list[Run]

    @property
    def stopped(self) -> bool:
        return any(run.result.stopped for run in self.runs)

    def compared(self) -> list[Compared]:
        """Runs that were stopped early are left out."""
        return compare([run.measured for run in self.runs if not run.result.stopped])

    def as_dict(self) -> dict[str, Any]:
        """The contents of --json. Another VERSION: a reader of this one must look again."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "runs": [run.as_dict() for run in self.runs],
            "comparison": [] if self.options.is_single else [row.as_dict() for row in self.compared()],
        }


def turns(options: CampaignOptions) -> Iterator[Turn]:
    """Rounds outside, rates, then servers, of which each round begins with another one."""
    rates = options.rates or (options.base.rate,)
    for number in range(options.rounds):
        for index, rate in enumerate(rates):
            seed = options.base.seed + _SEED_STEP * (number * len(rates) + index)
            shift = number % len(options.asked)
            for target in (*options.asked[shift:], *options.asked[:shift]):
                load = replace(options.base, url=target.url, rate=rate, seed=seed)
                yield Turn(target, rate, number + 1, load)


async def run_campaign(
    options: CampaignOptions,
    api_key: str | None = None,
    console: Console | None = None,
    stop: asyncio.Event | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Campaign:
    """Asks all servers before it sends any load. What prompts are made of, and which requests of a trace are left out,
    follows from the first server, so that all get the same."""
    stop = stop or asyncio.Event()
    asked = {target.name: await _prepare(options, target, api_key, console) for target in options.asked}
    base, prepared = _same_for_all(options.base, asked)
    found: list[Run] = []
    for turn in turns(replace(options, base=base)):
        title = describe(options, turn.target.name, turn.rate, turn.round)
        result = await run_prepared(turn.options, prepared[turn.target.name], console, stop, title)
        found.append(Run(turn.target.name, turn.rate, turn.round, result))
        on_run(found[-1])
        if stop.is_set():
            break
    return Campaign(options, _with_first(found, options))


def describe(options: CampaignOptions, target: str, rate: float | None, number: int) -> str:
    """Which run it is, as far as there are several."""
    told = [f"round {number} of {options.rounds}"] if options.rounds > 1 else []
    if len(options.rates) > 1:
        told.append(f"{rate:g}/s")
    return ", ".join([*told, target] if options.targets else told)


async def _prepare(
    options: CampaignOptions, target: NamedTarget, api_key: str | None, console: Console | None
) -> Prepared:
    try:
        return await prepare(replace(options.base, url=target.url), api_key, console)
    except BenchError as error:
        raise BenchError(f"{target.name}: {error}" if options.targets else str(error)) from error


def _same_for_all(base: BenchOptions, asked: dict[str, Prepared]) -> tuple[BenchOptions, dict[str, Prepared]]:
    """Answers of full length for all or for none: otherwise one server would be asked for more than another."""
    if base.ignore_eos is None:
        base = replace(base, ignore_eos=all(found.target.is_baton for found in asked.values()))
    measure = next(iter(asked.values())).measure
    longest = min((found.target.max_model_len for found in asked.values() if found.target.max_model_len), default=None)
    return base, {
        name: Prepared(replace(found.target, max_model_len=longest), measure) for name, found in asked.items()
    }


def _with_first(runs: list[Run], options: CampaignOptions) -> list[Run]:
    """In the order of rounds, rates and targets, whoever began a round."""
    order = {target.name: index for index, target in enumerate(options.asked)}
    rates = options.rates or (options.base.rate,)
    return sorted(runs, key=lambda run: (run.round, rates.index(run.rate), order[run.target]))
