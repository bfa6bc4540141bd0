"""Where an engine's model and its state live: on the CPU as they are, on a GPU with a staged pool, and everything that
steps will need rehearsed before the worker says that it is ready."""

import torch

from kernels.ops import Ops
from shared.engine.buffers import table_width
from shared.engine.graphs import DeviceModel, Record, graph_sizes, record_cuda
from shared.engine.models.base import Batch, Model
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings, plan_layout
from shared.engine.staged_pool import StagedPool
from shared.runtime.settings import ConfigError


def place(model: Model, settings: EngineSettings, device: str, *, graphs: bool) -> tuple[Model, StatePool]:
    """What the engine is made of. In the compute thread. graphs: whether a GPU replays decode steps (graphs.py)."""
    if device == "cpu":
        return model, StatePool(plan_layout(model, settings))
    return on_device(model, settings, torch.device(device), record_cuda() if graphs else None)


def on_device(
    model: Model, settings: EngineSettings, device: torch.device, record: Record | None, ops: Ops | None = None
) -> tuple[Model, StatePool]:
    """With a recorder computes decode steps of every size, then a prompt as large as the largest step. So kernels are
    compiled, and memory that is too small for the pool beside the model shows now, as a ConfigError. The prompt is the
    last: before each recording all memory that is not in use goes back, and the prompt's must be there beside them."""
    layout = plan_layout(model, settings)
    longest = min(model.max_model_len, settings.max_model_len or model.max_model_len)
    largest = {"chunked": settings.step_tokens, "colocated": longest}.get(settings.mode, settings.max_step_tokens)
    width = table_width(-(-longest // layout.page_tokens))
    try:
        pool = StagedPool(layout, device, ops)
        placed = DeviceModel(model, device, pool.tensors, graph_sizes(settings.max_running), width, record)
        prompt = one_prompt(min(largest, longest, layout.num_pages * layout.page_tokens), layout.page_tokens)
        placed.forward(prompt, pool.tensors).cpu()
        return placed, pool
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"kv_bytes: a pool of {layout.total_bytes / (1 << 30):.1f} GiB and what steps need do not fit into the GPU "
            "beside the model; lower kv_bytes, max_step_tokens, max_running or (colocated) max_model_len"
        ) from error


def one_prompt(num_tokens: int, page_tokens: int) -> Batch:
    """A prompt in the first pages of a pool."""
    ends = torch.tensor([num_tokens], dtype=torch.int32)
    return Batch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        query_start=torch.cat((torch.zeros(1, dtype=torch.int32), ends)),
        context_lens=ends,
        block_tables=torch.arange(-(-num_tokens // page_tokens), dtype=torch.int32).unsqueeze(0),
        slots=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.tensor([num_tokens - 1]),
    )
