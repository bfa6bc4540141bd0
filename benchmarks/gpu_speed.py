"""Tokens/s of whole models on the device, decode with and without graphs, and whether the two say the same."""

import time

import torch

from benchmarks.gpu_models import Geometry, random_model
from benchmarks.gpu_stages import Findings
from benchmarks.report import figure
from kernels.ops import Ops
from shared.engine.device import one_prompt
from shared.engine.graphs import DeviceModel, Record, graph_sizes
from shared.engine.models.base import Batch, Model
from shared.state.components import StateComponent

PAGE_TOKENS = 16
_ROUNDS = 3


def compare_graphs(
    findings: Findings, geometry: Geometry, ops: Ops, device: torch.device, record: Record, sizes: tuple[int, ...]
) -> None:
    """Replayed steps against eager ones on pools that begin alike: the same logits, and nothing written beside them. In
    float32: in 16 bits a deep random model makes much of the last bit, and products of another size round otherwise."""
    model = random_model(geometry, ops, device, dtype="float32", kv_dtype="float32")
    largest = sizes[-1]
    pages = 6 * largest + 1
    state, twin = _noise(model, pages, device), _noise(model, pages, device)
    twin[0].copy_(state[0])
    width = 8
    eager, replayed = (DeviceModel(model, device, s, z, width, record) for s, z in ((state, ()), (twin, sizes)))
    for count in sorted({*sizes, max(1, largest - 1), 3 * largest // 4 or 1}, reverse=True):
        batch = decode_batch(count, [17 + 7 * (k % 11) for k in range(count)], pages_each=6, first_page=1)
        expected, found = eager.forward(batch, state).clone(), replayed.forward(batch, twin)
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= 1e-3:
            findings.wrong.append(f"graph of {geometry.name}, {count} rows: logits off by {error:.2g} of the largest")
        if not torch.equal(twin[0][:, 0], state[0][:, 0]):
            findings.wrong.append(f"graph of {geometry.name}, {count} rows: padding wrote into a page")


def measure_decode(
    findings: Findings, geometry: Geometry, ops: Ops, device: torch.device, record: Record, *, tiny: bool
) -> None:
    """The forward and the best token of each row, taken on the device; every row at the same context."""
    model = random_model(geometry, ops, device)
    context, steps, batches = (32, 2, (1, 2)) if tiny else (512, 32, (1, 8, 32, 128))
    pages_each = -(-(context + steps + 1) // PAGE_TOKENS)
    state = _noise(model, batches[-1] * pages_each, device)
    for graphs in (False, True):
        sizes = graph_sizes(batches[-1]) if graphs else ()
        placed = DeviceModel(model, device, state, sizes, pages_each + -pages_each % 8, record)
        for batch in batches:
            steady = [_decode_rate(placed, state, batch, context, steps, pages_each) for _ in range(_ROUNDS)]
            name = f"decode-{geometry.name}-b{batch}-{'graphs' if graphs else 'eager'}"
            findings.rows.append(figure(name, "tokens/s", steady, less_is_better=False))


def measure_prefill(
    findings: Findings, geometry: Geometry, ops: Ops, device: torch.device, record: Record, *, tiny: bool
) -> None:
    model = random_model(geometry, ops, device)
    lengths = (16, 32) if tiny else (512, 2048)
    state = _noise(model, -(-lengths[-1] // PAGE_TOKENS), device)
    placed = DeviceModel(model, device, state, (), 8, record)
    for length in lengths:
        batch = one_prompt(length, PAGE_TOKENS)
        rates = []
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            placed.forward(batch, state).argmax(dim=1).tolist()
            rates.append(length / (time.perf_counter() - began))
        findings.rows.append(figure(f"prefill-{geometry.name}-{length}", "tokens/s", rates[1:], less_is_better=False))


def decode_batch(count: int, context_lens: list[int], pages_each: int, first_page: int = 0) -> Batch:
    """One token a row, at the last position of its context."""
    ends = torch.tensor(context_lens, dtype=torch.int32)
    tables = first_page + torch.arange(count * pages_each, dtype=torch.int32).view(count, pages_each)
    return Batch(
        tokens=torch.arange(count) % 97,
        positions=ends.long() - 1,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        context_lens=ends,
        block_tables=tables,
        slots=torch.zeros(count, dtype=torch.int32),
        logit_rows=torch.arange(count),
    )


def _decode_rate(
    placed: DeviceModel, state: tuple[torch.Tensor, ...], batch: int, context: int, steps: int, pages_each: int
) -> float:
    """Each step knows the token of the one before, as a server's does. The first step does not count."""
    began = 0.0
    for step in range(steps + 1):
        if step == 1:
            began = time.perf_counter()
        rows = decode_batch(batch, [context + step] * batch, pages_each)
        placed.forward(rows, state).argmax(dim=1).tolist()
    return batch * steps / (time.perf_counter() - began)


def _noise(model: Model, num_pages: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    component: StateComponent
    (component,) = model.components(PAGE_TOKENS)
    shape = (component.num_layers, num_pages, *component.unit_shape)
    return (torch.empty(shape, dtype=getattr(torch, component.dtype), device=device).normal_(),)
