"""Which rows the next step computes, and what its result means. Pure bookkeeping: no model, no thread, no event loop.

The three calls of a step: `schedule` returns a value, somebody executes it, `apply` takes the result in. Calls in
between (a ticket starts, a choice ends) never touch what a step under way uses: that is put off until `apply` or
`fail`.
"""

from collections.abc import Iterator

from shared.engine.api import ChunkDone, EngineStats, GroupFailed, TokenOut
from shared.engine.batch import Row, StepPlan, StepResult
from shared.engine.capacity import Capacity
from shared.engine.effects import StepEffects
from shared.engine.pieces import chunk_pieces
from shared.engine.sampler import Sampled, SampleRow
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.settings import EngineSettings
from shared.protocol.messages import FirstToken
from shared.runtime.errors import EngineError, PoolExhausted
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey


class Scheduler:
    """Owns all groups. `groups` are in the order of their reservation, `_active` in the order of their start: the
    order in which prompts are computed, and by which the youngest gives way."""

    def __init__(
        self,
        layout: PoolLayout,
        settings: EngineSettings,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
        stats: EngineStats,
    ) -> None:
        self.groups: dict[TicketKey, Group] = {}
        self._active: dict[TicketKey, Group] = {}
        self._layout = layout
        self._settings = settings
        self._capacity = capacity
        self._eos_token_ids = eos_token_ids
        self._stats = stats

    # Calls from outside, at any time

    def reserve(self, group: Group) -> None:
        """Takes the group in, or raises what `Capacity.admit` raises. While preempted groups wait for room there is
        none for new ones."""
        self._capacity.check(group)
        if group.decodes and any(other.phase is Phase.PREEMPTED for other in self._active.values()):
            raise PoolExhausted("preempted requests wait for room")
        self._capacity.admit(group)
        self.groups[group.key] = group

    def start_prompt(self, group: Group) -> None:
        self._activate(group, Phase.PROMPT)

    def start_prefilled(self, group: Group, first: tuple[FirstToken, ...]) -> None:
        """The prompt's state is there. Choices whose first token ended them never decode."""
        self._activate(group, Phase.DECODING)
        for token in first:
            choice = group.choices[token.choice]
            choice.outputs.append(token.token)
            choice.done = choice.done or token.finish is not None
        self._begin_decoding(group)

    def finish_choice(self, group: Group, index: int) -> None:
        group.choices[index].done = True
        if group.phase is Phase.RESERVED:
            return
        if not group.live:
            self._end(group)
        self._capacity.drop_finished(group)

    def stop(self, group: Group) -> None:
        """Nothing more of it is computed; it holds what it has."""
        self._end(group)

    def retire(self, group: Group) -> bool:
        """True: gone. False: a step uses it; `apply` or `fail` will release it."""
        self._end(group)
        group.retiring = True
        if group.in_step:
            return False
        self._release(group)
        return True

    # The three calls of a step

    def schedule(self) -> tuple[StepPlan | None, StepEffects]:
        """The next step, or None where nothing can be computed now. Must not be called while a step is under way."""
        effects = StepEffects()
        rows = self._decode_rows(effects)
        self._readmit(effects)
        rows += self._chunk_rows(len(rows))
        if not rows:
            return None, effects
        copies = []
        for row in rows:
            group = self.groups[row.key]
            group.in_step = True
            if row.choice is not None:
                copies += group.copies
                group.copies = []
        return StepPlan(tuple(copies), tuple(rows)), effects

    def apply(self, plan: StepPlan, result: StepResult) -> StepEffects:
        effects = StepEffects()
        for row, sampled in zip(plan.rows, result.sampled, strict=True):
            group = self.groups[row.key]
            if group.phase is Phase.ENDED:
                continue
            if isinstance(sampled, EngineError):
                self._fail_group(group, sampled.code, sampled.message, effects)
            elif row.choice is None:
                self._apply_prompt(group, row, sampled, effects)
            else:
                self._apply_choice(group, group.choices[row.choice], row, sampled, effects)
        self._settle(plan, effects)
        return effects

    def fail(self, plan: StepPlan, code: str, message: str) -> StepEffects:
        """The step could not be computed: ends its groups, and only them."""
        effects = StepEffects()
        for key in {row.key: None for row in plan.rows}:
            self._fail_group(self.groups[key], code, message, effects)
        self._settle(plan, effects)
        return effects

    # Choosing rows

    def _decode_rows(self, effects: StepEffects) -> list[Row]:
        rows: list[Row] = []
        for group in list(self._active.values()):
            if group.phase is not Phase.DECODING:
                continue
            live = group.live
            ready = [choice for choice in live if group.pending_len(choice) == 1]
            runs = [self._choice_row(group, choice, 1) for choice in ready if self._make_room(group, choice, effects)]
            if not runs and len(ready) == len(live) and self._capacity.holds_everything(group):
                message = f"the request holds all {self._capacity.pages.total} pages and needs more to go on"
                self._fail_group(group, PoolExhausted.code, message, effects)
            rows += runs
        return rows

    def _make_room(self, group: Group, choice: Choice, effects: StepEffects) -> bool:
        """A page for the choice's next position. The youngest group that started later gives way; where there is none,
        the choice sits this step out and keeps what it has."""
        while not self._capacity.try_grow(group, choice):
            victim = next((other for other in reversed(self._active.values()) if other.is_preemptible), None)
            if victim is None or victim is group:
                return False
            victim.phase = Phase.PREEMPTED
            self._capacity.drop(victim)
            self._stats.preemptions += 1
            effects.preempted.append(victim.key)
        return True

    def _readmit(self, effects: StepEffects) -> None:
        """Preempted groups come back oldest first. Each running choice may soon want a page: that many stay free, or
        the group would soon be sent away again."""
        for group in list(self._active.values()):
            if group.phase is not Phase.PREEMPTED:
                continue
            headroom = sum(len(g.live) for g in self._active.values() if g.phase is Phase.DECODING)
            try:
                if not self._capacity.try_readmit(group, headroom):
                    return
            except PoolExhausted as error:
                self._fail_group(group, error.code, error.message, effects)
                continue
            group.phase = Phase.PROMPT
            effects.resumed.append(group.key)

    def _chunk_rows(self, num_decodes: int) -> list[Row]:
        """Prompts first come, first served. Beside decoding at most one chunk, so that token intervals stay short."""
        rows: list[Row] = []
        num_tokens = num_decodes
        for row in self._chunk_candidates():
            if rows and (num_decodes or num_tokens + len(row.tokens) > self._settings.max_step_tokens):
                break
            rows.append(row)
            num_tokens += len(row.tokens)
        return rows

    def _chunk_candidates(self) -> Iterator[Row]:
        chunk = self._settings.prefill_chunk
        for group in self._active.values():
            if group.phase is Phase.PROMPT and group.ahead < self._settings.prefill_lead:
                yield self._prompt_row(group, min(chunk, group.prompt_len - group.computed))
            elif group.phase is Phase.DECODING:
                for choice in group.live:
                    if (pending := group.pending_len(choice)) > 1:
                        yield self._choice_row(group, choice, min(chunk - choice.computed % chunk, pending))

    def _prompt_row(self, group: Group, count: int) -> Row:
        start, end = group.computed, group.computed + count
        samples: tuple[SampleRow, ...] = ()
        if end == group.prompt_len:
            samples = tuple(self._sample_row(group, choice) for choice in group.live if not choice.outputs)
        assert group.trunk_slot is not None
        tokens, pages = group.prompt[start:end], tuple(group.trunk_pages)
        return Row(group.key, None, tokens, start, pages, group.trunk_slot, samples)

    def _choice_row(self, group: Group, choice: Choice, count: int) -> Row:
        start, end, prompt_len = choice.computed, choice.computed + count, group.prompt_len
        tokens = tuple(choice.outputs[start - prompt_len : end - prompt_len])
        samples = (self._sample_row(group, choice),) if end == group.known_len(choice) else ()
        assert choice.slot is not None
        return Row(group.key, choice.index, tokens, start, tuple(choice.pages), choice.slot, samples)

    def _sample_row(self, group: Group, choice: Choice) -> SampleRow:
        return SampleRow(
            sampling=group.sampling,
            choice=choice.index,
            position=group.known_len(choice),
            prompt_ids=group.prompt,
            output_ids=tuple(choice.outputs),
            eos_token_ids=self._eos_token_ids,
        )

    # Taking results in

    def _apply_prompt(self, group: Group, row: Row, sampled: tuple[Sampled, ...], effects: StepEffects) -> None:
        group.computed = row.end
        self._stats.prompt_tokens_computed += len(row.tokens)
        complete = row.end == group.prompt_len
        if not group.decodes:
            first = tuple(self._first_token(group, s, token) for s, token in zip(row.samples, sampled, strict=True))
            pieces = chunk_pieces(self._layout, row.start, row.end, complete, row.pages, row.slot)
            effects.chunks.append((group.key, ChunkDone(row.start, row.end, pieces, first)))
            group.ahead += 1
            if complete:
                self._end(group)
            return
        if not complete:
            return
        for sample, token in zip(row.samples, sampled, strict=True):
            self._take_token(group, group.choices[sample.choice], token, effects)
        group.phase = Phase.DECODING
        self._begin_decoding(group)

    def _apply_choice(
        self, group: Group, choice: Choice, row: Row, sampled: tuple[Sampled, ...], effects: StepEffects
    ) -> None:
        choice.computed = row.end
        for token in sampled:
            self._take_token(group, choice, token, effects)
        if not group.live:
            self._end(group)

    def _take_token(self, group: Group, choice: Choice, sampled: Sampled, effects: StepEffects) -> None:
        if choice.done:
            return
        index = len(choice.outputs)
        choice.outputs.append(sampled.token)
        finish = group.finish_reason(sampled.token, index + 1, self._eos_token_ids)
        choice.done = finish is not None
        self._stats.tokens_generated += 1
        effects.tokens.append(TokenOut(group.key, choice.index, index, sampled.token, sampled.logprob, finish))

    def _first_token(self, group: Group, sample: SampleRow, sampled: Sampled) -> FirstToken:
        finish = group.finish_reason(sampled.token, 1, self._eos_token_ids)
        self._stats.tokens_generated += 1
        return FirstToken(choice=sample.choice, token=sampled.token, logprob=sampled.logprob, finish=finish)

    # Phases

    def _activate(self, group: Group, phase: Phase) -> None:
        if group.phase is not Phase.RESERVED:
            raise ValueError(f"{group.key} was started before")
        group.phase = phase
        self._active[group.key] = group
        if not group.live:
            self._end(group)

    def _begin_decoding(self, group: Group) -> None:
        if group.phase is Phase.ENDED:
            return
        if not group.live:
            self._end(group)
            return
        self._capacity.branch(group)

    def _end(self, group: Group) -> None:
        group.phase = Phase.ENDED
        if self._active.get(group.key) is group:
            del self._active[group.key]

    def _fail_group(self, group: Group, code: str, message: str, effects: StepEffects) -> None:
        if group.phase is not Phase.ENDED:
            self._end(group)
            effects.failed.append(GroupFailed(group.key, code, message))

    def _settle(self, plan: StepPlan, effects: StepEffects) -> None:
        """The step is over: what was put off because of it is done now."""
        for key in {row.key: None for row in plan.rows}:
            group = self.groups[key]
            group.in_step = False
            if group.retiring:
                self._release(group)
                effects.released.append(key)
            else:
                self._capacity.drop_finished(group)

    def _release(self, group: Group) -> None:
        self._capacity.drop(group)
        del self.groups[group.key]
