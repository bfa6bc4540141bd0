"""What is told of blocks that have several homes, which need not agree."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.engine.api import Engine
from shared.engine.lending import Loan
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.errors import StoreUnavailable
from shared.store.client import StoreClient
from shared.store.keys import Lineage
from shared.store.runs import BlockRun, PutOutcome
from shared.transfer.link import TicketKey
from shared.worker.checkpoint import Checkpoint
from shared.worker.stores import Stores

BLOCK = 4
AWAY = None
"""A home that does not answer."""
Held = int | None


@dataclass
class Homes:
    """A client whose puts end as the script says: for each put, how many leading blocks of the run each home has then.
    runs: blocks [start, end) of each put. meanwhile: called while the first one is under way."""

    script: list[Sequence[Held]]
    runs: list[tuple[int, int]] = field(default_factory=list)
    block_tokens: int = BLOCK
    are_there: bool = True
    meanwhile: Callable[[], None] = lambda: None

    async def put(self, run: BlockRun, pages: Sequence[int], tenant: str) -> tuple[PutOutcome, ...]:
        self.runs.append((run.first_block, run.first_block + len(run.keys)))
        if len(self.runs) == 1:
            self.meanwhile()
        found = self.script[len(self.runs) - 1]
        return tuple(
            PutOutcome(name, error=StoreUnavailable()) if held is AWAY else PutOutcome(name, held, held)
            for name, held in zip("ab", found, strict=True)
        )


async def puts(
    script: list[Sequence[Held]], ends: Iterable[int], meanwhile: int = 0
) -> tuple[list[tuple[int, int]], list[int]]:
    """The runs that are put as so many blocks complete, one after the other, and what was told, in blocks. meanwhile:
    so many complete during the first put."""
    homes, told, tasks = Homes(script), list[int](), list[asyncio.Task[None]]()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        return tasks[-1]

    deps = Deps("w", cast(Any, None), LoopClock(), spawn, spawn, lambda: None, Counters())
    lend = lambda key, start, end: Loan(tuple(range(start // BLOCK, end // BLOCK)), lambda: None)  # noqa: E731
    engine = SimpleNamespace(pages=lambda: (100, 0, 0), lend=lend, layout=SimpleNamespace(page_tokens=BLOCK))
    stores = Stores(deps, cast(Engine, engine), cast(StoreClient, homes))
    lineage = Lineage("model", block_tokens=BLOCK)
    checkpoint = Checkpoint(deps, stores, TicketKey(1, 1), lineage, range(100), "t", told.append)
    homes.meanwhile = lambda: checkpoint.reach(meanwhile * BLOCK)
    for end in ends:
        checkpoint.reach(end * BLOCK)
        await asyncio.gather(*tasks)
        stores._paused_until = 0.0
    assert stores.num_lent == 0
    return homes.runs, [position // BLOCK for position in told]


@pytest.mark.parametrize(
    ("script", "runs", "told"),
    [
        ([(2, 2), (1, 1)], [(0, 2), (2, 3)], [2, 3]),
        ([(2, 0), (3, 3)], [(0, 2), (0, 3)], [2, 3]),
        ([(0, AWAY), (0, 3)], [(0, 2), (0, 3)], [3]),
        ([(AWAY, AWAY), (1, AWAY)], [(0, 2), (0, 3)], [1]),
        ([(2, 1), (1, 2), (4, AWAY)], [(0, 2), (0, 3), (0, 4)], [2, 4]),
        ([(2, 2), (0, 0), (1, 2)], [(0, 2), (2, 3), (0, 4)], [2]),
        ([(2, AWAY), (AWAY, 3), (1, 1)], [(0, 2), (0, 3), (0, 4)], [2, 3]),
    ],
    ids=["both", "one lags", "one is away", "both are away", "they part", "both have lost it", "they take turns"],
)
async def test_a_block_counts_once_one_home_has_it_and_all_before(
    script: list[Sequence[Held]], runs: list[tuple[int, int]], told: list[int]
) -> None:
    """What some home lacks is offered again from the chain's beginning on, and what is told only rises."""
    assert await puts(script, range(2, 2 + len(script))) == (runs, told)


async def test_what_completes_while_nobody_takes_what_comes_before_counts_for_nothing() -> None:
    runs, told = await puts([(0, 0), (0, 0), (4, 4)], (2, 4), meanwhile=3)
    assert (runs, told) == ([(0, 2), (2, 3), (0, 4)], [4])
