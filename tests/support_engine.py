"""Drives a real engine with the toy model: the small things that every engine test does with one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.engine.api import ChunkDone, StepOutput, TokenOut
from shared.engine.batch import Row
from shared.engine.engine import BatchEngine
from shared.engine.executor import Executor, InlineExecutor
from shared.engine.models.base import Model
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.runner import build_batch
from shared.engine.sampler import SampleRow, sample
from shared.engine.settings import EngineSettings, plan_layout
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey

DEADLINE_S = 120.0
"""Of what would otherwise hang; kernels may have to be compiled first, on a slow machine."""
_ANY = SampleRow(SamplingSpec(), 0, 0, (), (), frozenset())


@dataclass
class EngineBench:
    """A running engine and all that it told its listener."""

    engine: BatchEngine
    pool: StatePool
    tokens: list[TokenOut] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)
    finished: Counter[TicketKey] = field(default_factory=Counter)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def listen(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self.tokens += output.tokens
        self.finished.update(out.key for out in output.tokens if out.finish is not None)
        self.heard.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.heard.clear()
                await self.heard.wait()

    def text_of(self, key: TicketKey, choice: int = 0) -> list[int]:
        """Delivered tokens of a choice; each index once and in order."""
        mine = [out for out in self.tokens if out.key == key and out.choice == choice]
        assert [out.index for out in mine] == list(range(mine[0].index, mine[0].index + len(mine))) if mine else True
        assert all(out.finish is None for out in mine[:-1])
        return [out.token for out in mine]

    def is_finished(self, key: TicketKey, choices: int = 1) -> bool:
        return self.finished[key] == choices

    async def finish(self, key: TicketKey, choices: int = 1) -> None:
        await self.until(lambda: self.is_finished(key, choices))

    async def local(self, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec) -> list[list[int]]:
        """Runs a request from beginning to end on this engine; the tokens of each choice."""
        self.engine.reserve(key, prompt, sampling, decodes=True)
        self.engine.start_local(key)
        await self.finish(key, sampling.n)
        await self.engine.retire(key)
        return [self.text_of(key, choice) for choice in range(sampling.n)]

    async def prefill(self, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec) -> list[ChunkDone]:
        self.engine.reserve(key, prompt, sampling, decodes=False)
        async with asyncio.timeout(DEADLINE_S):
            return [chunk async for chunk in self.engine.prefill(key)]

    def is_empty(self) -> bool:
        pages, slots = self.engine.pages(), self.engine.slots()
        return pages[0] == pages[1] and slots[0] == slots[1] and pages[2] == slots[2] == 0


def deliver(source: EngineBench, target: EngineBench, key: TicketKey, chunks: list[ChunkDone]) -> None:
    """What the sidecars do: copies the rows that carry state into the units the target's own table names."""
    tables = target.engine.unit_tables(key)
    from_, to = as_sidecars_see_it(source.pool), as_sidecars_see_it(target.pool)
    for chunk in chunks:
        for piece in chunk.pieces:
            axis = 2 + len(source.pool.layout.components[piece.component].outer)
            rows = source.pool.layout.components[piece.component].unit_tokens
            whole = piece.layers(source.pool.layout.components[piece.component].num_layers)
            layers = slice(whole.start, whole.stop)
            for k, unit in enumerate(piece.units):
                count = piece.rows_in_last if k == len(piece.units) - 1 else rows
                there = to[piece.component][layers, tables[piece.component][piece.first_unit + k]]
                here = from_[piece.component][layers, unit]
                there.narrow(axis - 1, 0, count).copy_(here.narrow(axis - 1, 0, count))


def as_sidecars_see_it(pool: StatePool) -> list[torch.Tensor]:
    return [torch.from_numpy(pool.layout.view(pool.buffer, k)) for k in range(len(pool.layout.components))]


def first_tokens(chunks: list[ChunkDone]) -> tuple[FirstToken, ...]:
    assert all(not chunk.last for chunk in chunks[:-1])
    return chunks[-1].first


def undivided(prompt: tuple[int, ...], sampling: SamplingSpec, model: Model | None = None) -> list[list[int]]:
    """The oracle: the tokens of each choice when the model runs each alone, the prompt in one go and no engine at
    all."""
    model = model or Toy()
    texts = []
    for choice in range(sampling.n):
        layout = PoolLayout(model.components(len(prompt) + sampling.max_tokens), 1, 1)
        buffer = memoryview(bytearray(layout.total_bytes))
        state = tuple(torch.from_numpy(layout.view(buffer, index)) for index in range(len(layout.components)))
        outputs: list[int] = []
        fed, start = prompt, 0
        while True:
            logits = model.forward(build_batch((Row(TicketKey(1, 1), choice, fed, start, (0,), 0, (_ANY,)),)), state)
            start += len(fed)
            row = SampleRow(sampling, choice, start, prompt, tuple(outputs), model.eos_token_ids)
            outputs.append(sample(logits, [row])[0].token)
            ended = outputs[-1] in sampling.stop_token_ids or (
                outputs[-1] in model.eos_token_ids and not sampling.ignore_eos
            )
            if ended or len(outputs) == sampling.max_tokens:
                break
            fed = (outputs[-1],)
        texts.append(outputs)
    return texts


@asynccontextmanager
async def running(
    model: Model | None = None,
    executor: Executor | None = None,
    make_pool: Callable[[PoolLayout], StatePool] = StatePool,
    **settings: Any,
) -> AsyncIterator[EngineBench]:
    sizes = {"num_pages": 64, "page_tokens": 4, "prefill_chunk": 16} | settings
    chosen = EngineSettings(**sizes)
    model = model or Toy()
    pool = make_pool(plan_layout(model, chosen))
    for tensor in pool.tensors:
        tensor.fill_(99)  # what earlier requests left behind
    bench: EngineBench
    engine = BatchEngine(model, pool, chosen, executor or InlineExecutor(), lambda output: bench.listen(output))
    bench = EngineBench(engine, pool)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        try:
            yield bench
        finally:
            await engine.close()
            pool.close()
