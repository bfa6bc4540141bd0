"""A ticket's share of the engine, as the scheduler sees it: one prompt (the trunk) and the choices that branch off it.

Positions: the prompt has 0..N-1. Output k of a choice, counted from the handoff token (k = 0), stands at position N
+ k and is *sampled under that position*; its state comes to be when it is fed, one step later. P and D both use
these numbers.

The *trunk* is what has its state before the choices branch off: the prompt, and where a single choice was interrupted
elsewhere also its outputs but for the last, which is fed again.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from shared.engine.batch import Arrival, CopyPage, CopySlot
from shared.engine.sharing import NOTHING, Held, Naming, Sharing
from shared.engine.stash import Saved
from shared.protocol.messages import FinishReason, FirstToken, SamplingSpec
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.transfer.link import TicketKey


class Phase(Enum):
    RESERVED = "reserved"
    """Holds its pages; its state is arriving, or nobody asked for it yet. Never preempted."""
    PROMPT = "prompt"
    """The prompt is being computed: for the first time, or again after preemption."""
    PARKED = "parked"
    """P: the prompt was computed ahead and nobody has asked for it yet."""
    DECODING = "decoding"
    PREEMPTED = "preempted"
    """Waits for room. Holds nothing, except that the step under way may still be copying its state away."""
    ENDED = "ended"
    """Finished, failed or stopped. Computes nothing more; holds what it has until it is retired."""


@dataclass(slots=True)
class Choice:
    """outputs: every token so far, the handoff token first. computed: positions whose state is in its pages."""

    index: int
    outputs: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    done: bool = False
    naming: Naming | None = None


@dataclass(slots=True)
class Group:
    """trunk: the tokens of the trunk, which is the prompt where nothing is said. trunk_pages and trunk_slot belong to
    it until the choices branch off; spare_pages and spare_slots are what was taken ahead for them then, with
    growth_tokens positions for each. computed: positions of the trunk with state. max_new: tokens a choice may
    generate, after clipping. deadline: the clock's time at which nobody waits for it any more. priority: the smaller
    comes first, whatever the deadlines. copies: still to be carried out, in the first step that runs a choice. ahead:
    chunks computed that the consumer has not taken. saved: its state in host memory, while it is preempted. gave_way:
    it was preempted and has not come back. loading: the step under way brings its state back. passed: tokens that
    groups behind it computed while this one had some to compute. begun_at: when the first step with a part of the
    prompt was dispatched. sharing: with
    whom it shares state; None: with nobody. held: what of the trunk was in the pool when it got its pages. naming: of
    the trunk's blocks.

    On P: asked: somebody takes its chunks. optimistic: it is computed though nobody does yet; attempts: how often
    that may still be begun. claims: others must give way to it. first: the handoff tokens, once they are drawn. cut:
    how its state leaves. told: positions whose state the consumer has in all layers; told_layers: in how many of the
    model's layers it also has that of the step under way."""

    key: TicketKey
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    decodes: bool
    max_new: int
    choices: list[Choice]
    trunk: tuple[int, ...] = ()
    deadline: float = inf
    priority: int = 0
    phase: Phase = Phase.RESERVED
    trunk_pages: list[int] = field(default_factory=list)
    trunk_slot: int | None = None
    spare_pages: list[int] = field(default_factory=list)
    spare_slots: list[int] = field(default_factory=list)
    growth_tokens: int = 1
    computed: int = 0
    copies: list[CopyPage | CopySlot | Arrival] = field(default_factory=list)
    ahead: int = 0
    saved: Saved | None = None
    gave_way: bool = False
    loading: bool = False
    passed: int = 0
    begun_at: float | None = None
    in_step: bool = False
    retiring: bool = False
    sharing: Sharing | None = None
    held: Held = NOTHING
    naming: Naming | None = None
    asked: bool = False
    optimistic: bool = False
    attempts: int = 0
    claims: bool = False
    first: tuple[FirstToken, ...] = ()
    cut: Cut = BY_CHUNKS
    told: int = 0
    told_layers: int = 0

    def __post_init__(self) -> None:
        self.trunk = self.trunk or self.prompt

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def trunk_len(self) -> int:
        return len(self.trunk)

    @property
    def live(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.done]

    @property
    def is_preemptible(self) -> bool:
        return self.decodes and self.phase in (Phase.PROMPT, Phase.DECODING)

    @property
    def is_yieldable(self) -> bool:
        """P: what it holds is anybody's who needs it."""
        return self.optimistic and self.phase in (Phase.PROMPT, Phase.PARKED)

    @property
    def is_complete(self) -> bool:
        """The trunk is computed."""
        return (self.saved.computed if self.saved else self.computed) == self.trunk_len

    def known_len(self, choice: Choice) -> int:
        """Positions whose token is known."""
        return self.prompt_len + len(choice.outputs)

    def pending_len(self, choice: Choice) -> int:
        """Known tokens without state: 1 in plain decoding, more while an interrupted choice catches up."""
        return self.known_len(choice) - choice.computed

    def finish_reason(self, token: int, num_outputs: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether `token`, as the last of `num_outputs`, ends a choice."""
        if token in eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs >= self.max_new else None
