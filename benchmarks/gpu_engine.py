"""The whole engine on the device: prompts computed by one, handed over through host memory as sidecars do, decoded by
another. Each token it draws must be (nearly) the best by the reference on the CPU, given the tokens before it."""

import asyncio

import torch

from benchmarks.gpu_models import TINY, random_model
from benchmarks.gpu_speed import PAGE_TOKENS
from benchmarks.gpu_stages import Findings
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from shared.engine.api import ChunkDone, StepOutput
from shared.engine.device import on_device, one_prompt
from shared.engine.engine import BatchEngine
from shared.engine.executor import ThreadExecutor
from shared.engine.graphs import Record
from shared.engine.models.base import Model
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings
from shared.protocol.messages import SamplingSpec
from shared.transfer.link import TicketKey

_NEW_TOKENS = 24
_NEAR = 1e-3
_DEADLINE_S = 60.0
_LENGTHS = (1, 15, 16, 40, 130)
_SAMPLING = SamplingSpec(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)


def check_engine(findings: Findings, ops: Ops, device: torch.device, record: Record | None) -> None:
    model = random_model(TINY, ops, device, dtype="float32", kv_dtype="float32")
    prompts = [tuple((7 * k + 31 * number) % 300 for k in range(n)) for number, n in enumerate(_LENGTHS)]
    answers = asyncio.run(_answers(model, ops, device, record, prompts))
    cpu = torch.device("cpu")
    reference = random_model(TINY, ReferenceOps(), cpu, dtype="float32", kv_dtype="float32")
    for name, tensor in _tensors(model).items():
        _tensors(reference)[name].copy_(tensor)
    for prompt, answer in zip(prompts, answers, strict=True):
        for count, token in enumerate(answer):
            logits = _logits(reference, prompt + tuple(answer[:count]))
            short = float(logits.max() - logits[token])
            if not short <= _NEAR:
                findings.wrong.append(f"engine: token {count} after {len(prompt)} is {short:.2g} below the best")
                break


async def _answers(
    model: Model, ops: Ops, device: torch.device, record: Record | None, prompts: list[tuple[int, ...]]
) -> list[list[int]]:
    """All prompts at once; every token of each, the handoff token first."""
    settings = EngineSettings(page_tokens=PAGE_TOKENS, num_pages=128, max_running=8, prefill_chunk=32)
    executor = ThreadExecutor(1)
    tokens: dict[TicketKey, list[int]] = {}
    heard = asyncio.Event()

    def listen(output: StepOutput) -> None:
        for out in output.tokens:
            tokens[out.key].append(out.token)
        heard.set()

    pools, engines = [], []
    for _ in range(2):
        placed, pool = await executor.run(lambda: on_device(model, settings, device, record, ops))
        pools.append(pool)
        engines.append(BatchEngine(placed, pool, settings, _Shared(executor), listen))
    p, d = engines
    async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(engine.run())
        for number, prompt in enumerate(prompts, 1):
            key = TicketKey(number, 1)
            p.reserve(key, prompt, _SAMPLING, decodes=False)
            d.reserve(key, prompt, _SAMPLING, decodes=True)
            chunks = [chunk async for chunk in p.prefill(key)]
            _move(pools[0], pools[1], chunks, d.unit_tables(key))
            await p.retire(key)
            tokens[key] = [chunks[-1].first[0].token]
            d.start_prefilled(key, chunks[-1].first)
        while any(len(answer) < _NEW_TOKENS for answer in tokens.values()):
            heard.clear()
            await heard.wait()
        for engine in engines:
            await engine.close()
    executor.close()
    for pool in pools:
        pool.close()
    return list(tokens.values())


def _move(source: StatePool, target: StatePool, chunks: list[ChunkDone], tables: tuple[tuple[int, ...], ...]) -> None:
    for chunk in chunks:
        for piece in chunk.pieces:
            units = tables[piece.component][piece.first_unit :][: len(piece.units)]
            here = source.layout.view(source.buffer, piece.component)
            target.layout.view(target.buffer, piece.component)[:, list(units)] = here[:, list(piece.units)]


def _logits(model: Model, tokens: tuple[int, ...]) -> torch.Tensor:
    batch = one_prompt(len(tokens), PAGE_TOKENS)
    batch.tokens.copy_(torch.tensor(tokens))
    (component,) = model.components(PAGE_TOKENS)
    pages = -(-len(tokens) // PAGE_TOKENS)
    return model.forward(batch, (torch.zeros(component.num_layers, pages, *component.unit_shape),))[0]


def _tensors(model: Model) -> dict[str, torch.Tensor]:
    """Every weight of a random model, so that a twin on another device can be given the same."""
    found = {"embed": model._embed}  # type: ignore[attr-defined]
    for number, layer in enumerate(model._layers):  # type: ignore[attr-defined]
        found |= {f"{number}.{name}": getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
    return found


class _Shared:
    """One compute thread for both engines: it outlives either."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self.run, self.tell = executor.run, executor.tell

    def close(self) -> None:
        pass
