"""A load that is cut off leaves no door that nobody knows of, and no lease."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.engine.sharing import NOTHING, Sharing
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.store.keys import Lineage
from shared.store.runs import BlockRun, Found
from shared.transfer.link import TicketKey
from shared.worker.loading import Loading, load_blocks

KEY = TicketKey(7, 1)
BLOCK = 8


class World:
    """Link, stores and deps of one worker, of which `stuck` names the call that never ends."""

    def __init__(self, stuck: str) -> None:
        self.stuck = stuck
        self.calls: list[str] = []
        self.spawned: list[str] = []
        self.address = SimpleNamespace()
        self.client = self
        self.engine = SimpleNamespace(unit_tables=lambda key: ((0, 1),))
        self.block_tokens = BLOCK
        self.clock, self.counters = LoopClock(), Counters()

    def lineage(self, salt: str, lossiest: str) -> Any:
        return Lineage("", salt, lossiest, BLOCK)

    def spawn(self, coroutine: Any, name: str) -> None:
        coroutine.close()
        self.spawned.append(name)

    async def lookup(self, run: BlockRun, answer_s: float | None = None) -> Found:
        await self._call("lookup")
        return Found("s", "s-1", 5, run, 64, (), 9.0)

    async def open(self, *_: Any) -> None:
        await self._call("open")

    async def load(self, *_: Any, **__: Any) -> Any:
        await self._call("load")
        return SimpleNamespace(num_blocks=1, components=())

    async def check(self, *_: Any) -> None:
        await self._call("check")

    async def fence(self, key: TicketKey) -> None:
        assert key == KEY
        await self._call("fence")

    async def release(self, _found: Found) -> None: ...

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.stuck:
            await asyncio.Event().wait()


def loading() -> Loading:
    return Loading(KEY, b"s", tuple(range(10)), Sharing("us"), NOTHING, 9.0, 0)


@pytest.mark.parametrize(
    ("stuck", "left_open"), [("open", False), ("load", False), ("check", False), ("fence", True), ("lookup", False)]
)
async def test_what_may_still_be_open_is_known_to_the_tickets_owner(stuck: str, left_open: bool) -> None:
    world, asked = World(stuck), loading()
    anything = cast(Any, world)
    task = asyncio.get_running_loop().create_task(load_blocks(anything, anything, anything, asked))
    while world.calls[-1:] != [stuck]:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert asked.doors == ([KEY] if left_open else [])
    assert world.calls.count("fence") == (stuck != "lookup")
    assert len(world.spawned) == (stuck != "lookup"), "the lease is given back"


async def test_a_load_that_comes_to_its_end_leaves_nothing() -> None:
    world, asked = World(""), loading()
    anything = cast(Any, world)
    loaded = await load_blocks(anything, anything, anything, asked)
    assert (loaded.num_tokens, asked.doors) == (BLOCK, [])
    assert world.calls == ["lookup", "open", "load", "check", "fence"]
