"""From reservation to free pages, by every way a ticket can go."""

import asyncio
import math
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from shared.engine.api import ChunkDone, GroupFailed
from shared.engine.engine import BatchEngine
from shared.engine.executor import ThreadExecutor
from shared.engine.models.base import Batch
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings, plan_layout
from shared.engine.watch import LayerDone
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import Cancelled, EngineError
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, running, undivided

T = TypeVar("T")
KEY, OTHER = TicketKey(1, 1), TicketKey(2, 1)
PROMPT = tuple(range(30, 51))
GREEDY = SamplingSpec(temperature=0.0, max_tokens=20, ignore_eos=True)


class HeldExecutor:
    """Steps wait at a gate, so that a test can act while one is under way."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def run(self, work: Callable[[], T]) -> T:
        self.begun.set()
        await self.gate.wait()
        return work()

    def tell(self, call: Callable[[], None]) -> None:
        call()

    def close(self) -> None:
        self.gate.set()


class BrokenFor(Toy):
    """Fails each step that computes a certain token of a prompt, several tokens at once."""

    def __init__(self, token: int, error: Exception | None = None) -> None:
        super().__init__()
        self._token, self._error = token, error or RuntimeError("the device fell over")

    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        lengths = batch.query_start.diff().repeat_interleave(batch.query_start.diff())
        if ((batch.tokens == self._token) & (lengths > 1)).any():
            raise self._error
        return super().forward(batch, state, layer_done)


def start(bench: EngineBench, key: TicketKey, sampling: SamplingSpec = GREEDY) -> None:
    bench.engine.reserve(key, PROMPT, sampling, decodes=True)
    bench.engine.start_local(key)


async def test_retire_waits_for_the_step_that_uses_the_pages() -> None:
    executor = HeldExecutor()
    async with running(executor=executor, prefill_chunk=64) as bench, asyncio.timeout(10):
        start(bench, KEY)  # one step brings the first token
        await executor.begun.wait()
        held = bench.engine.pages()
        retiring = asyncio.gather(bench.engine.retire(KEY), bench.engine.retire(KEY))
        await asyncio.sleep(0)
        assert not retiring.done()
        assert bench.engine.pages() == (held[0], held[1], held[0] - held[1])
        executor.gate.set()
        await retiring
        assert bench.is_empty()
        assert bench.tokens == []


async def test_retire_is_at_once_and_idempotent_where_no_step_runs() -> None:
    async with running() as bench, asyncio.timeout(10):
        bench.engine.reserve(KEY, PROMPT, GREEDY, decodes=True)
        await bench.engine.retire(KEY)
        await bench.engine.retire(KEY)
        await bench.engine.retire(OTHER)
        assert bench.is_empty()


async def test_progress_age_rises_only_while_a_step_hangs() -> None:
    executor = HeldExecutor()
    async with running(executor=executor) as bench, asyncio.timeout(10):
        assert bench.engine.last_progress_age_s == 0.0
        start(bench, KEY)
        await executor.begun.wait()
        await asyncio.sleep(0.01)
        assert bench.engine.last_progress_age_s >= 0.01
        executor.gate.set()
        await bench.finish(KEY)
        assert bench.engine.last_progress_age_s == 0.0


class CUDADriverError(RuntimeError):
    """As CuPy names its own, which launches our kernels."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@pytest.mark.parametrize("error", [torch.AcceleratorError("illegal address"), CUDADriverError("illegal address", 700)])
async def test_a_lost_gpu_ends_the_engine_once_all_are_told(error: Exception) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await _until_it_ends(BrokenFor(250, error))
    assert caught.value.exceptions == (error,)


async def _until_it_ends(model: Toy) -> None:
    async with asyncio.timeout(10), running(model=model) as bench:
        bench.engine.reserve(OTHER, (1, 250, 3), GREEDY, decodes=False)
        with pytest.raises(EngineError, match="illegal address"):
            await anext(aiter(bench.engine.prefill(OTHER)))
        await asyncio.Event().wait()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), CUDADriverError("no memory", 2)])
async def test_memory_that_is_too_small_fails_one_step_only(error: Exception) -> None:
    async with running(model=BrokenFor(250, error)) as bench, asyncio.timeout(10):
        bench.engine.reserve(OTHER, (1, 250, 3), GREEDY, decodes=False)
        with pytest.raises(EngineError, match="no memory"):
            await anext(aiter(bench.engine.prefill(OTHER)))
        start(bench, KEY)
        await bench.until(lambda: bool(bench.tokens))


async def test_a_failing_step_fails_its_groups_and_no_others() -> None:
    async with running(model=BrokenFor(token=250)) as bench:
        start(bench, KEY)
        await bench.until(lambda: bool(bench.tokens))
        bench.engine.reserve(OTHER, (1, 250, 3), GREEDY, decodes=False)
        with pytest.raises(EngineError, match="RuntimeError: the device fell over"):
            await anext(aiter(bench.engine.prefill(OTHER)))
        await bench.until(lambda: bench.is_finished(KEY) or any(o.failed for o in bench.outputs))
        # KEY shared the step, so it may have failed with it; whoever comes later is well.
        await bench.engine.retire(KEY)
        await bench.engine.retire(OTHER)
        assert bench.is_empty()
        assert await bench.local(TicketKey(3, 1), PROMPT, GREEDY) == undivided(PROMPT, GREEDY)


async def test_a_failed_group_is_told_once_and_keeps_its_pages_until_retired() -> None:
    async with running(model=BrokenFor(token=PROMPT[-1])) as bench:
        start(bench, KEY)
        await bench.until(lambda: any(o.failed for o in bench.outputs))
        failed = [f for o in bench.outputs for f in o.failed]
        assert failed == [GroupFailed(KEY, "engine_error", "RuntimeError: the device fell over")]
        assert not bench.is_empty()
        await bench.engine.retire(KEY)
        assert bench.is_empty()


async def test_a_request_that_forbids_every_token_fails_alone() -> None:
    impossible = GREEDY.model_copy(update={"logit_bias": tuple((token, -math.inf) for token in range(256))})
    async with running() as bench:
        start(bench, KEY)
        start(bench, OTHER, impossible)
        await bench.finish(KEY)
        assert bench.text_of(KEY) == undivided(PROMPT, GREEDY)[0]
        assert [f.key for o in bench.outputs for f in o.failed] == [OTHER]
        bench.engine.reserve(TicketKey(3, 1), PROMPT, impossible, decodes=False)
        with pytest.raises(EngineError):
            [chunk async for chunk in bench.engine.prefill(TicketKey(3, 1))]


async def test_prefill_computes_ahead_of_its_consumer_but_not_far() -> None:
    async with running(prefill_chunk=2, prefill_lead=2) as bench, asyncio.timeout(10):
        bench.engine.reserve(KEY, PROMPT, GREEDY, decodes=False)
        chunks = bench.engine.prefill(KEY)
        first = await anext(chunks)
        assert (first.start, first.end, first.first) == (0, 2, ())
        # A whole other request runs to its end meanwhile, so the engine had every chance to go further.
        await bench.local(OTHER, PROMPT, GREEDY)
        assert bench.engine._scheduler.groups[KEY].computed == 2 + 2 * 2
        ends = [chunk.end async for chunk in chunks]
        assert ends == [*range(4, 21, 2), 21]


async def test_ending_the_iteration_stops_the_computation() -> None:
    async with running(prefill_chunk=2, prefill_lead=2) as bench, asyncio.timeout(10):
        bench.engine.reserve(KEY, PROMPT, GREEDY, decodes=False)
        chunks = bench.engine.prefill(KEY)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        await bench.local(OTHER, PROMPT, GREEDY)
        assert bench.engine.queues()["prefilling"] == 0
        assert bench.engine._scheduler.groups[KEY].computed < len(PROMPT)
        await bench.engine.retire(KEY)
        assert bench.is_empty()


async def test_retiring_ends_a_prefill_that_somebody_waits_for() -> None:
    executor = HeldExecutor()
    async with running(executor=executor) as bench, asyncio.timeout(10):
        bench.engine.reserve(KEY, PROMPT, GREEDY, decodes=False)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_collect(bench))
            await executor.begun.wait()
            retiring = tasks.create_task(bench.engine.retire(KEY))
            assert isinstance(await waiting, Cancelled)
            assert not retiring.done()
            executor.gate.set()
        assert bench.is_empty()


async def _collect(bench: EngineBench) -> BaseException | None:
    try:
        async for _ in bench.engine.prefill(KEY):
            pass
    except Cancelled as error:
        return error
    return None


async def test_closing_ends_a_prefill_that_somebody_waits_for() -> None:
    executor = HeldExecutor()
    async with running(executor=executor) as bench, asyncio.timeout(10):
        bench.engine.reserve(KEY, PROMPT, GREEDY, decodes=False)
        waiting = asyncio.gather(anext(bench.engine.prefill(KEY)), return_exceptions=True)
        await executor.begun.wait()
        closing = asyncio.gather(bench.engine.close())
        executor.gate.set()
        await closing
        [outcome] = await waiting
        assert isinstance(outcome, EngineError) or (isinstance(outcome, ChunkDone) and outcome.end == 16)
        bench.engine.reserve(OTHER, PROMPT, GREEDY, decodes=True)
        with pytest.raises(EngineError, match="closed"):
            bench.engine.start_local(OTHER)


async def test_steps_run_in_the_one_compute_thread() -> None:
    seen: set[tuple[int, int]] = set()

    class Watching(Toy):
        def forward(
            self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
        ) -> torch.Tensor:
            seen.add((threading.get_ident(), torch.get_num_threads()))
            return super().forward(batch, state, layer_done)

    async with running(model=Watching(), executor=ThreadExecutor(1)) as bench:
        assert await bench.local(KEY, PROMPT, GREEDY) == undivided(PROMPT, GREEDY)
    [(thread, num_threads)] = seen
    assert thread != threading.get_ident()
    assert num_threads == 1


async def test_a_cancelled_engine_waits_for_its_step() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Toy):
        def forward(
            self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
        ) -> torch.Tensor:
            entered.set()
            assert leave.wait(10)
            return super().forward(batch, state, layer_done)

    settings = EngineSettings(num_pages=32)
    pool = StatePool(plan_layout(Toy(), settings))
    engine = BatchEngine(Slow(), pool, settings, ThreadExecutor(1), lambda output: None)
    async with asyncio.TaskGroup() as tasks:
        running_engine = tasks.create_task(engine.run())
        engine.reserve(KEY, PROMPT, GREEDY, decodes=True)
        engine.start_local(KEY)
        await asyncio.to_thread(entered.wait, 10)
        running_engine.cancel()
        retiring = tasks.create_task(engine.retire(KEY))
        await asyncio.sleep(0)
        assert not running_engine.done()
        assert not retiring.done()
        leave.set()
    assert running_engine.cancelled()
    assert engine.pages() == (32, 32, 0)
    await engine.close()
    pool.close()
