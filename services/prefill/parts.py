"""What a prompt's coroutine (`flow.py`) works with."""

from collections.abc import Callable
from dataclasses import dataclass

from services.prefill.loading import PromptLoading
from services.prefill.wire_choice import WireChoice
from shared.engine.api import Engine
from shared.protocol.messages import PrefillTimings
from shared.runtime.deps import Deps
from shared.runtime.overlap import Overlap
from shared.transfer.link import Link
from shared.worker.stores import Stores


@dataclass(frozen=True, slots=True)
class PrefillFlowSettings:
    """commit_s: how long the commit record is repeated at most, within the request's deadline. tell_s: how long a peer
    is told of a failure, and the gateway of token 0. optimistic_attempts: how often a prompt may be computed ahead of
    its destination. overlap, layers_per_send: when its state leaves (`shared/runtime/overlap.py`). probe_s: how long P
    waits in silence for a destination before it asks D whether the ticket lives there. answer_s: how long D may take to
    answer. unknown_asks: how often it may say that it has not heard of it."""

    commit_s: float = 30.0
    tell_s: float = 5.0
    optimistic_attempts: int = 0
    overlap: Overlap = "auto"
    layers_per_send: int = 8
    probe_s: float = 2.0
    answer_s: float = 10.0
    unknown_asks: int = 4


@dataclass(frozen=True, slots=True)
class PrefillFlow:
    """What the coroutine works with. observe: is told how each hand-off went."""

    deps: Deps
    engine: Engine
    link: Link
    wire: WireChoice
    settings: PrefillFlowSettings = PrefillFlowSettings()
    observe: Callable[[PrefillTimings], None] = lambda timings: None
    stores: Stores | None = None
    loading: PromptLoading | None = None
