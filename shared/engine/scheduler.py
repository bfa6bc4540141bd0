"""Which rows the next step computes, and what its result means. Pure bookkeeping: no model, no thread, no event loop.

The three calls of a step: `schedule` returns a value, somebody executes it, `apply` takes the result in. Calls in
between (a ticket starts, a choice ends) never touch what a step under way uses: that is put off until `apply` or
`fail`.
"""

from shared.engine.api import EngineStats, GroupFailed, TokenOut
from shared.engine.batch import Arrival, CopyPage, CopySlot, Load, Row, Save, StepPlan, StepResult
from shared.engine.capacity import Capacity
from shared.engine.effects import StepEffects
from shared.engine.room import Room
from shared.engine.rows import choice_row, chunk_rows
from shared.engine.sampler import Sampled, SampleRow
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.settings import EngineSettings
from shared.engine.stash import Stash
from shared.engine.telling import Telling
from shared.protocol.messages import FirstToken
from shared.runtime.errors import EngineError, PoolExhausted
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.state.layout import PoolLayout
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import TicketKey


class Scheduler:
    """Owns all groups. `groups` are in the order of their reservation, `_active` in the order of their start, by which
    the youngest gives way; whose prompt has its turn, `turns.py` says."""

    def __init__(
        self,
        layout: PoolLayout,
        settings: EngineSettings,
        capacity: Capacity,
        stash: Stash,
        eos_token_ids: frozenset[int],
        stats: EngineStats,
    ) -> None:
        self.groups: dict[TicketKey, Group] = {}
        self._active: dict[TicketKey, Group] = {}
        self._settings = settings
        self._capacity = capacity
        self.room = Room(capacity, stash, self.groups, self._active, stats)
        self._telling = Telling(layout)
        self._eos_token_ids = eos_token_ids
        self._stats = stats

    # Calls from outside, at any time

    def reserve(self, group: Group) -> None:
        """Takes the group in, or raises what `Capacity.admit` raises. While preempted groups wait for room there is
        none for new ones."""
        self._capacity.check(group)
        if not group.decodes:
            self._capacity.prefixes.begin(group)
            self.room.admit(group)
        elif any(other.phase is Phase.PREEMPTED for other in self._active.values()):
            raise PoolExhausted("preempted requests wait for room")
        else:
            self._capacity.admit(group)
        self.groups[group.key] = group

    def start_prompt(self, group: Group, cut: Cut = BY_CHUNKS, held_len: int = 0, ready_len: int = 0) -> StepEffects:
        """Somebody waits for the prompt, and has `held_len` positions of it; `ready_len` were brought here by a link.
        What has its state already is told at once, if it is in the pool."""
        effects = StepEffects()
        if group.asked or (group.phase is not Phase.RESERVED and group.decodes):
            raise ValueError(f"{group.key} was started before")
        group.asked, group.optimistic, group.cut, group.told = True, False, cut, held_len
        group.claims = group.phase is Phase.PREEMPTED
        self._activate(group, Phase.PROMPT)
        if ready_len > group.computed:
            self._arrived(group, ready_len, ())
            group.computed = ready_len
        if not group.loading:
            self._tell_so_far(group, effects)
        return effects

    def compute_ahead(self, group: Group, attempts: int) -> None:
        """Nobody waits for the prompt yet."""
        group.optimistic, group.attempts = True, attempts
        self._activate(group, Phase.PROMPT)

    def start_prefilled(self, group: Group, first: tuple[FirstToken, ...], came_by: str = EXACT) -> None:
        """The trunk's state is there, what the pool had not held by that way. Choices whose first token ended them
        never decode; those that had one before go on after their last."""
        self._capacity.prefixes.begin(group, came_by)
        self._activate(group, Phase.DECODING)
        for token in first:
            choice = group.choices[token.choice]
            if not choice.outputs:
                choice.outputs.append(token.token)
                choice.done = choice.done or token.finish is not None
        assert group.trunk_slot is not None
        self._arrived(group, group.trunk_len, (group.trunk_slot,))
        self._stats.prompt_tokens_held += group.held.num_tokens
        self._begin_decoding(group)

    def start_local(self, group: Group, held_len: int = 0, came_by: str = EXACT) -> None:
        """The trunk is computed here, from position `held_len` on: what comes before has its state in the pages, where
        the pool had not held it by that way."""
        if not 0 <= held_len < group.trunk_len:
            raise ValueError(f"{group.key}: {held_len} of {group.trunk_len} positions are there")
        self._capacity.prefixes.begin(group, came_by)
        self.start_prompt(group, ready_len=held_len)

    def _arrived(self, group: Group, end: int, slots: tuple[int, ...]) -> None:
        """A link has brought the trunk's state up to there, from where the pool had held it on."""
        first, after = (self._capacity.num_pages(num_tokens) for num_tokens in (group.held.num_tokens, end))
        group.copies.append(Arrival(tuple(group.trunk_pages[first:after]), slots))

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
        self.room.begin()
        rows = self._decode_rows(effects)
        for group, error in self.room.readmit(effects):
            self._fail_group(group, error.code, error.message, effects)
        self.room.serve_claims(effects)
        rows += chunk_rows(self._active.values(), len(rows), self._settings, self._eos_token_ids)
        copies: list[CopyPage | CopySlot | Arrival] = []
        parts: tuple[Row | Save | Load, ...] = (*rows, *self.room.saves, *self.room.loads)
        for part in parts:
            group = self.groups[part.key]
            group.in_step = True
            copies += group.copies
            group.copies = []
        plan = StepPlan(tuple(copies), tuple(rows), tuple(self.room.saves), tuple(self.room.loads))
        return plan if parts else None, effects

    def is_wanted(self, plan: StepPlan) -> bool:
        """Whether a step that is under way is of any use to anybody."""
        return any(self.groups[key].phase is not Phase.ENDED for key in plan.keys)

    def layers_done(self, plan: StepPlan, num_layers: int) -> StepEffects:
        """So many of the model's layers are computed in a step that is under way."""
        effects = StepEffects()
        for row in plan.rows:
            if row.leaves_by and not self.groups[row.key].loading:  # what comes back is told first, when it is there
                self._telling.layers(self.groups[row.key], row.end, num_layers, effects)
        return effects

    def apply(self, plan: StepPlan, result: StepResult) -> StepEffects:
        effects = StepEffects()
        for load in plan.loads:
            self._tell_so_far(self.groups[load.key], effects)
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
        for key in plan.keys:
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
            able = [choice for choice in ready if self.room.make_room(group, choice, effects)]
            runs = [choice_row(group, choice, 1, self._eos_token_ids) for choice in able]
            if not runs and len(ready) == len(live) and self._capacity.holds_everything(group):
                message = f"the request holds all {self._capacity.pages.total} pages and needs more to go on"
                self._fail_group(group, PoolExhausted.code, message, effects)
            rows += runs
        return rows

    # Taking results in

    def _apply_prompt(self, group: Group, row: Row, sampled: tuple[Sampled, ...], effects: StepEffects) -> None:
        group.computed = row.end
        self._capacity.prefixes.note_trunk(group)
        self._stats.prompt_tokens_computed += len(row.tokens)
        if row.start == group.held.num_tokens:
            self._stats.prompt_tokens_held += row.start
        complete = row.end == group.trunk_len
        if not group.decodes:
            if row.samples:
                first = (self._first_token(group, s, token) for s, token in zip(row.samples, sampled, strict=True))
                group.first = tuple(first)
            if group.asked:
                self._tell_chunk(group, effects)
            elif complete:
                group.phase = Phase.PARKED
                effects.parked.append(group.key)
            return
        if not complete:
            return
        for sample, token in zip(row.samples, sampled, strict=True):
            self._take_token(group, group.choices[sample.choice], token, effects)
        group.phase = Phase.DECODING
        self._begin_decoding(group)

    def _tell_so_far(self, group: Group, effects: StepEffects) -> None:
        """To somebody who takes chunks: what was computed before it did, or before it came back."""
        if group.asked and not group.decodes and group.computed and group.phase in (Phase.PROMPT, Phase.PARKED):
            self._tell_chunk(group, effects)

    def _tell_chunk(self, group: Group, effects: StepEffects) -> None:
        if self._telling.chunk(group, effects):
            self._end(group)

    def _apply_choice(
        self, group: Group, choice: Choice, row: Row, sampled: tuple[Sampled, ...], effects: StepEffects
    ) -> None:
        choice.computed = row.end
        self._capacity.prefixes.note_choice(group, choice)
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
        if group.key in self._active and not group.decodes:  # it was computed ahead
            return
        if group.phase is Phase.RESERVED:
            group.phase = phase
        elif group.phase is not Phase.PREEMPTED or group.decodes:
            raise ValueError(f"{group.key} was started before")
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
        for load in plan.loads:
            self.room.forget(self.groups[load.key])
        for save in plan.saves:
            group = self.groups[save.key]
            self._capacity.drop(group)
            if group.phase is Phase.ENDED:
                self.room.forget(group)
        for key in plan.keys:
            group = self.groups[key]
            group.in_step = group.loading = False
            if group.retiring:
                self._release(group)
                effects.released.append(key)
            else:
                self._capacity.drop_finished(group)

    def _release(self, group: Group) -> None:
        self.room.forget(group)
        self._capacity.drop(group)
        del self.groups[group.key]
