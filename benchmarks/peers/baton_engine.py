"""Baton's own engine, in-process: the scheduler, the compute thread and all, without network.

Where only steps count the prompts' state is noise: what it holds does not change what a step costs.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.lines import prompt, serve
from benchmarks.peers.messages import message_load
from kernels.cpu.ops import warm_up
from shared.engine import sampler
from shared.engine.api import StepOutput
from shared.engine.engine import BatchEngine
from shared.engine.executor import ThreadExecutor
from shared.engine.models.base import Model
from shared.engine.models.registry import load_model
from shared.engine.pool import StatePool
from shared.engine.sampler import sample
from shared.engine.settings import EngineSettings, plan_layout
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.runtime.process import WORKER_SWITCH_INTERVAL_S
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey

_PAGE_TOKENS = 16
_OPS = ("linear", "rms_norm", "add_rms_norm", "rotary_and_store", "paged_attention", "silu_mul")
_MESSAGES_PER_S = 2000
_SOME_PAGES = 256


class _Timed:
    """Ops whose time is added up. An op's own few lines of Python count as the kernel's."""

    def __init__(self, ops: Any) -> None:
        self.spent_s = 0.0
        for name in _OPS:
            setattr(self, name, self.timed(getattr(ops, name)))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.spent_s += time.perf_counter() - began
            return result

        return run


class Engine:
    def __init__(self, directory: Path, num_threads: int, formats: dict[str, str]) -> None:
        """formats: for `load_model`; what they leave open is a worker's default."""
        chosen: dict[str, Any] = {"weights": None, "kv_dtype": "float32"} | formats
        self._executor = ThreadExecutor(num_threads)
        self._executor.submit(lambda: warm_up(chosen["kv_dtype"])).result()
        self._model: Any = self._executor.submit(lambda: load_model(directory, **chosen)).result()

    def measure(self, kind: str, **arguments: Any) -> Any:
        return asyncio.run(getattr(self, f"_{kind}")(**arguments))

    async def _decode(self, batch: int, context: int, steps: int) -> float:
        """tokens/s of `batch` sequences in one batch, from the first step on that follows another."""
        gaps = await self._steps(batch, context, steps)
        return batch * len(gaps) / sum(gaps)

    async def _step_ms(self, batch: int, context: int, steps: int) -> float:
        return 1000 * float(np.median(await self._steps(batch, context, steps)))

    async def _prefill(self, length: int, seed: int) -> float:
        async with self._running(1, length, 1, lambda output: None) as engine:
            key = TicketKey(1, 1)
            engine.reserve(key, tuple(prompt(length, seed)), _sampling(0, 1), decodes=False)
            began = time.perf_counter()
            async for _ in engine.prefill(key):
                pass
            took = time.perf_counter() - began
            await engine.retire(key)
        return length / took

    async def _outside(self, batch: int, context: int, steps: int) -> float:
        """Share of the time of steps that is spent in none of the model's ops nor in the sampling pass."""
        ops, pick = self._model._ops, sampler.pick
        self._model._ops = timed = _Timed(ops)
        sampler.pick = timed.timed(pick)
        spent: list[float] = []
        try:
            gaps = await self._steps(batch, context, steps, lambda: spent.append(timed.spent_s))
        finally:
            self._model._ops, sampler.pick = ops, pick
        return 1 - (spent[-1] - spent[0]) / sum(gaps)

    async def _p99_ms(self, batch: int, context: int, steps: int, messages: bool) -> float:
        if not messages:
            return 1000 * float(np.percentile(await self._steps(batch, context, steps), 99))
        async with message_load(_MESSAGES_PER_S):
            return 1000 * float(np.percentile(await self._steps(batch, context, steps), 99))

    async def _steps(
        self, batch: int, context: int, steps: int, at_each: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Seconds of each step after the first."""
        ends: list[float] = []
        finished = asyncio.Event()

        def listen(output: StepOutput) -> None:
            ends.append(time.perf_counter())
            at_each()
            if any(token.finish for token in output.tokens):
                finished.set()

        async with self._running(batch, context, steps, listen) as engine:
            keys = [TicketKey(number + 1, 1) for number in range(batch)]
            for seed, key in enumerate(keys):
                engine.reserve(key, tuple(prompt(context, seed)), _sampling(seed, steps + 2), decodes=True)
            for key in keys:
                engine.start_prefilled(key, (FirstToken(choice=0, token=5),))
            await finished.wait()
            for key in keys:
                await engine.retire(key)
        return np.diff(ends).tolist()

    def _running(self, batch: int, context: int, steps: int, listen: Callable[[StepOutput], None]) -> "_RunningEngine":
        return _RunningEngine(self._model, self._executor, batch, context + steps + 2, listen)


class _RunningEngine:
    """An engine with a pool for this load, while the block lasts. The compute thread stays."""

    def __init__(
        self, model: Model, executor: ThreadExecutor, batch: int, max_len: int, listen: Callable[[StepOutput], None]
    ) -> None:
        num_pages = batch * (-(-max_len // _PAGE_TOKENS) + 5)
        settings = EngineSettings(page_tokens=_PAGE_TOKENS, num_pages=num_pages, max_running=batch)
        self._pool: StatePool = executor.submit(lambda: _filled_pool(plan_layout(model, settings))).result()
        self._engine = BatchEngine(model, self._pool, settings, _Shared(executor), listen, sample_rows=sample)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> BatchEngine:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._engine.run())
        return self._engine

    async def __aexit__(self, *failure: Any) -> None:
        await self._engine.close()
        await self._tasks.__aexit__(*failure)
        self._pool.close()


def _filled_pool(layout: PoolLayout) -> StatePool:
    """In the compute thread: threads that torch starts elsewhere would compete with its own."""
    pool = StatePool(layout)
    random = np.random.default_rng(0)
    for tensor in pool.tensors:
        if tensor.is_floating_point():
            some = tensor.new_tensor(random.standard_normal((_SOME_PAGES, *tensor.shape[2:]), dtype=np.float32))
            for layer in tensor:
                for part in layer.split(_SOME_PAGES):
                    part.copy_(some[: len(part)])
    return pool


class _Shared:
    """The compute thread outlives each engine."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self.run, self.tell = executor.run, executor.tell

    def close(self) -> None:
        pass


def _sampling(seed: int, max_tokens: int) -> SamplingSpec:
    """Greedy, as the other engines are asked to."""
    return SamplingSpec(seed=seed, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def main() -> None:
    """Arguments: the prepared model's directory, threads, and formats as NAME=VALUE for `load_model`."""
    directory, num_threads, *formats = sys.argv[1:]
    sys.setswitchinterval(WORKER_SWITCH_INTERVAL_S)
    chosen = dict(each.split("=", 1) for each in formats)
    serve(lambda: Engine(Path(directory), int(num_threads), chosen).measure)


if __name__ == "__main__":
    main()
