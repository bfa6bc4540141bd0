"""What flows need of an engine. One engine implements it (`engine.py`); tests and the simulation run the same one with
the toy model and an inline executor.

A *group* is one ticket's share of the engine: one prompt and the n choices that continue it. Its pages belong to it
from `reserve` until `retire` has returned; a step already dispatched counts as a user of them.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from shared.engine.lending import Loan
from shared.engine.sharing import Held, Sharing
from shared.protocol.messages import FinishReason, FirstToken, SamplingSpec, TokenLogprob
from shared.protocol.reports import Geometry
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.state.layout import PoolLayout
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import Piece, TicketKey


@dataclass(frozen=True, slots=True)
class Past:
    """What the choices of a request have given out elsewhere: it is fed again and never sampled again.

    outputs: () or one entry for each choice, the handoff token first; a choice without any begins as in a new request.
    finished: choices that are over; they are not continued.
    """

    outputs: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()

    def trunk(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens whose state is handed over, or computed before the choices branch off. All that a single choice
        has given out is among them, but for the last token, which is fed again; several choices have only the prompt
        in common."""
        return prompt + self.outputs[0][:-1] if len(self.outputs) == 1 else prompt


NEW = Past()


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A part of a prompt is computed: positions [start, end) have their state in the pool.

    pieces: what may be sent now: whole pages below `end`, and with the last chunk the rest of the pages and the
    request-indexed state. first: the handoff tokens, one a choice, on the last chunk only. partial: some layers are
    computed; the chunk with what remains follows.
    """

    start: int
    end: int
    pieces: tuple[Piece, ...]
    first: tuple[FirstToken, ...] = ()
    partial: bool = False

    @property
    def last(self) -> bool:
        return bool(self.first)


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One generated token of one choice. index counts from 0, the handoff token. finish is set on the last one."""

    key: TicketKey
    choice: int
    index: int
    token: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """The engine gave a group up; its pages are still its own until `retire`."""

    key: TicketKey
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought for groups that were started: delivered to the listener on the loop, in step order.
    preempted: gave their pages up. resumed: have pages again."""

    tokens: tuple[TokenOut, ...] = ()
    failed: tuple[GroupFailed, ...] = ()
    preempted: tuple[TicketKey, ...] = ()
    resumed: tuple[TicketKey, ...] = ()
    parked: tuple[TicketKey, ...] = ()
    """Computed ahead; nobody has asked for them yet."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; they only rise. prompt_tokens_held: positions that the pool had. preemptions: groups
    that gave way, their state kept in host memory (stashed) or dropped (recomputed). tokens_dropped: positions that
    have to be computed again because of it."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_held: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    preemptions_stashed: int = 0
    preemptions_recomputed: int = 0
    tokens_dropped: int = 0
    step_s: float = 0.0
    busy_s: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class StepListener(Protocol):
    def __call__(self, output: StepOutput) -> None: ...


class Engine(Protocol):
    """All methods are called on the event loop and do not block it; compute runs in the engine's own thread."""

    identity: str
    layout: PoolLayout
    geometry: Geometry
    max_model_len: int
    stats: EngineStats

    def wanted(
        self, prompt: tuple[int, ...], sampling: SamplingSpec, *, decodes: bool, past: Past = NEW
    ) -> tuple[int, int]:
        """(pages, slots) that `reserve` would take. InvalidRequest where it could never fit."""

    def reserve(
        self,
        key: TicketKey,
        prompt: tuple[int, ...],
        sampling: SamplingSpec,
        *,
        decodes: bool,
        deadline: float = inf,
        priority: int = 0,
        past: Past = NEW,
        sharing: Sharing | None = None,
    ) -> None:
        """Takes everything the prompt needs, and with `decodes` also the n choices' first steps and slots, or raises
        PoolExhausted having taken nothing. InvalidRequest where it could never fit, or where the past is not that of
        such a request. deadline: by the engine's clock; with the priority it says whose prompt has its turn first
        (`turns.py`), and it ends nothing. past: with `decodes` only. All is counted from the prompt on as if the
        choices had been here from the start. sharing: with whom its state is shared; of what the pool has of the
        prompt's beginning the group gets the very pages (`held`), and what it adds is found by later ones. None: with
        nobody.

        P may say yes on the strength of prompts that were computed ahead: they give way, and `prefill` begins once
        their pages are free."""

    def unit_tables(self, key: TicketKey) -> tuple[tuple[int, ...], ...]:
        """Per component, the physical units of the group's trunk in logical order: the destination of a transfer. Only
        until the group is started."""

    def compute_ahead(self, key: TicketKey, attempts: int) -> None:
        """P: computes the prompt though nobody takes its chunks yet, beside prompts that somebody waits for only when
        these leave time. When it is complete the group is parked with its pages. It gives way, at any time, to whoever
        needs them; then it begins again while pages are free, `attempts` times in all, or when `prefill` is called."""

    def prefill(
        self, key: TicketKey, cut: Cut = BY_CHUNKS, held_len: int = 0, ready_len: int = 0
    ) -> AsyncGenerator[ChunkDone, None]:
        """P: computes the prompt chunk by chunk and yields what may leave by `cut`, after each chunk, after some of its
        layers, or all at the end; computing goes on meanwhile. Ends after the last chunk; raises EngineError. Ending
        the iteration early stops the computation between layers. held_len: units that have rows of these first
        positions only do not leave. ready_len: so many positions, not all, have their state in the group's units
        already, as exact as if it were computed here.

        What has its state already, because it was computed ahead, comes as the first chunk, once it has pages (again).
        From now on it gives way to nobody."""

    def start_prefilled(self, key: TicketKey, first: tuple[FirstToken, ...], came_by: str = EXACT) -> None:
        """D, prebuilt: the trunk's state is in the pool and `first` are the handoff tokens (index 0; they are not
        computed again and not delivered). Runs no forward; the choices decode from the next step on. Of a choice that
        has a past the handoff token means nothing. came_by: the lossiest format of what was not held."""

    def start_local(self, key: TicketKey, held_len: int = 0, came_by: str = EXACT) -> None:
        """D computes the prompt itself, then decodes; tokens from index 0 on, or from the end of the choice's past on,
        are delivered to the listener. held_len: so many positions of the trunk, not all, have their state in its units
        already, beyond what was held from the start by the way `came_by`."""

    def lend(self, key: TicketKey, start: int, end: int) -> Loan | None:
        """The pages of positions [start, end), which is in whole pages: of the trunk, or of a choice that has got so
        far. They hold still until the loan is closed, whatever becomes of the group. None where nobody has them now
        (the group gave way, or is gone)."""

    def held(self, key: TicketKey) -> Held:
        """What of the trunk the pool had when the group got its pages: whole blocks, and never all of it. On P a group
        may get them after `reserve`, but has them before its first chunk."""

    def begun_at(self, key: TicketKey) -> float | None:
        """When the prompt had its turn: the clock's time as the first step with a part of it was dispatched; None
        before, and for an unknown key."""

    def finish_choice(self, key: TicketKey, choice: int) -> None:
        """Stops one choice (a stop string, a client that left). Nothing of it is delivered afterwards."""

    async def retire(self, key: TicketKey) -> None:
        """Ends the group: nothing is delivered afterwards; returns when no step uses its pages, which are then free.
        Idempotent; an unknown key returns at once."""

    def pages(self) -> tuple[int, int, int]:
        """(total, free, held by groups that are being retired)."""

    def slots(self) -> tuple[int, int, int]: ...

    def left(self) -> tuple[int, int]:
        """(pages, slots) that a reservation may have now: the free ones, and on P also what prompts computed ahead
        would give up for it."""

    def queues(self) -> dict[str, int]:
        """Lengths: `waiting` (prompts not begun or without pages), `prefilling`, `parked` (computed ahead), `yielded`
        (gave their pages up before somebody asked for them), `running` (choices that decode), `preempted`."""

    @property
    def stashed_bytes(self) -> int:
        """Host memory that holds the state of groups without pages, now."""

    @property
    def last_progress_age_s(self) -> float:
        """Seconds since a step finished while work was waiting; 0 when idle. Feeds /health."""

    async def run(self) -> None:
        """Computes steps until `close`: the vital task of whoever owns the engine. What it raises is a bug, a
        lost GPU, or its cancellation; any other failing step fails the step's groups and no more."""

    async def close(self) -> None:
        """Returns when no step is under way and none will be. Groups then hold nothing that anybody computes in."""
