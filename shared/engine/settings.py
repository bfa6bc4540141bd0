"""How large an engine is, and how it cuts work into steps."""

from dataclasses import dataclass

from shared.engine.models.base import Model
from shared.runtime.errors import PoolExhausted
from shared.runtime.mode import Mode, check_budget
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout

_COUNTS = (
    "page_tokens",
    "max_running",
    "prefill_chunk",
    "max_step_tokens",
    "step_tokens",
    "growth_tokens",
    "prefill_lead",
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """page_tokens: tokens a page. num_pages, or kv_bytes from which it follows: the pool.

    max_running: sequences that may have request-indexed state at once (slots); bounds the decode batch. mode: how
    prompts are cut into steps. separated: into chunks whose borders are multiples of prefill_chunk, whatever the load.
    colocated: not at all. chunked: so that no step has more than step_tokens tokens, running sequences included.
    max_step_tokens: where not chunked, several prompts share a step up to this many. growth_tokens: positions a
    reservation takes beyond the prompt, for each choice. prefill_lead: chunks computed ahead of what the consumer has
    taken. max_model_len: a limit below the model's own. stash_bytes: host memory for the state of those that gave way;
    what finds no room there is computed again. block_tokens: of the blocks by which the state of earlier requests is
    found again while it lies in the pool; None: it is not.
    """

    page_tokens: int = 16
    num_pages: int | None = None
    kv_bytes: int | None = None
    max_running: int = 32
    prefill_chunk: int = 256
    max_step_tokens: int = 512
    growth_tokens: int = 64
    prefill_lead: int = 2
    max_model_len: int | None = None
    stash_bytes: int = 0
    block_tokens: int | None = None
    mode: Mode = "separated"
    step_tokens: int = 256

    def __post_init__(self) -> None:
        if (self.num_pages is None) == (self.kv_bytes is None):
            raise ValueError("give either num_pages or kv_bytes")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stash_bytes < 0:
            raise ValueError(f"stash_bytes must not be negative, not {self.stash_bytes}")
        check_budget(self.mode, self.step_tokens, self.max_running)


def plan_layout(model: Model, settings: EngineSettings) -> PoolLayout:
    """The pool of `model` under these settings. Raises PoolExhausted where kv_bytes is not enough for one page."""
    components = model.components(settings.page_tokens)
    if settings.num_pages is not None:
        return PoolLayout(components, settings.num_pages, settings.max_running)
    assert settings.kv_bytes is not None
    paged = [c for c in components if c.index is IndexKind.PAGE]
    slotted = [c for c in components if c.index is not IndexKind.PAGE]
    page_bytes = sum(c.unit_bytes * c.num_layers for c in paged)
    slot_bytes = sum(c.unit_bytes * c.num_layers for c in slotted) * settings.max_running
    num_pages = (settings.kv_bytes - slot_bytes) // page_bytes if page_bytes else 1
    if num_pages < 1:
        raise PoolExhausted(f"{settings.kv_bytes} bytes hold no page: slots take {slot_bytes}, a page {page_bytes}")
    return PoolLayout(components, num_pages, settings.max_running)
