"""The engine: a loop that schedules, has the step computed in the compute thread, and tells everybody what came of it.

Steps never overlap. All books are kept on the event loop; the compute thread sees values and the pool only.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from math import inf

from shared.engine.api import NEW, ChunkDone, EngineStats, Past, StepListener, StepOutput
from shared.engine.batch import StepPlan
from shared.engine.capacity import Capacity
from shared.engine.census import queue_lengths
from shared.engine.effects import StepEffects
from shared.engine.executor import Executor, device_is_lost
from shared.engine.intake import Intake
from shared.engine.lending import Lending, Loan
from shared.engine.models.base import Model
from shared.engine.pool import StatePool
from shared.engine.runner import Runner, SampleFunction
from shared.engine.sampler import sample
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Group
from shared.engine.settings import EngineSettings
from shared.engine.sharing import NOTHING, Held, Sharing
from shared.engine.stash import Stash
from shared.engine.streams import ChunkStreams
from shared.engine.watch import StepUnwanted, StepWatch
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.protocol.reports import Geometry
from shared.runtime.clock import Clock, LoopClock
from shared.runtime.errors import BatonError, Cancelled, EngineError
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.state.components import IndexKind
from shared.state.pages import PageAllocator
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import TicketKey

log = logging.getLogger(__name__)
_NOBODY = TicketKey(1, 1)


class BatchEngine:
    """Implements `shared.engine.api.Engine`. `run` must run as a vital task while the engine is used: it ends with the
    error where a GPU is lost. Whoever made the pool closes it after `close` has returned."""

    def __init__(
        self,
        model: Model,
        pool: StatePool,
        settings: EngineSettings,
        executor: Executor,
        listener: StepListener,
        clock: Clock | None = None,
        sample_rows: SampleFunction = sample,
    ) -> None:
        self.identity = model.identity
        self.layout = pool.layout
        self.max_model_len = min(model.max_model_len, settings.max_model_len or model.max_model_len)
        self.stats = EngineStats()
        components = pool.layout.components
        names, sizes = tuple(c.name for c in components), tuple(c.unit_bytes for c in components)
        pages, ranks = pool.layout.page_tokens, pool.layout.tp_size
        self.geometry = Geometry(page_tokens=pages, components=names, unit_bytes=sizes, tp_size=ranks)
        self._intake = Intake(model.vocab_size, self.max_model_len, model.eos_token_ids)
        self._settings = settings
        self._executor = executor
        self._listener = listener
        self._clock = clock or LoopClock()
        self._runner = Runner(model, pool, sample_rows)
        blocks = self.identity, settings.block_tokens
        self._capacity = Capacity(pool.layout, settings.growth_tokens, pool.clear_slot, *blocks)
        self._stash = Stash(pool.layout, settings.stash_bytes)
        self._scheduler = Scheduler(pool.layout, settings, self._capacity, self._stash, model.eos_token_ids, self.stats)
        self._streams = ChunkStreams()
        self._released: dict[TicketKey, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._lending = Lending(self._capacity, pool.layout.page_tokens, self._wake.set)
        self._ended: asyncio.Event | None = None
        self._closing = False
        self._dispatched_at: float | None = None
        self._under_way: tuple[StepPlan, StepWatch] | None = None

    # Tickets

    def wanted(
        self, prompt: tuple[int, ...], sampling: SamplingSpec, *, decodes: bool, past: Past = NEW
    ) -> tuple[int, int]:
        return self._capacity.check(self._intake.group(_NOBODY, prompt, sampling, past, decodes=decodes))

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
        if key in self._scheduler.groups:
            raise ValueError(f"{key} is reserved already")
        group = self._intake.group(key, prompt, sampling, past, decodes=decodes)
        group.deadline, group.priority, group.sharing = deadline, priority, sharing
        self._scheduler.reserve(group)
        self._wake.set()  # others may have to give way

    def unit_tables(self, key: TicketKey) -> tuple[tuple[int, ...], ...]:
        group = self._group(key)
        if group.trunk_slot is None:
            raise ValueError(f"{key} has been started; its units are no destination any more")
        pages, slot = tuple(group.trunk_pages), (group.trunk_slot,)
        return tuple(pages if c.index is IndexKind.PAGE else slot for c in self.layout.components)

    def compute_ahead(self, key: TicketKey, attempts: int) -> None:
        self._check_open()
        self._scheduler.compute_ahead(self._group(key), attempts)
        self._wake.set()

    async def prefill(
        self, key: TicketKey, cut: Cut = BY_CHUNKS, held_len: int = 0, ready_len: int = 0
    ) -> AsyncGenerator[ChunkDone, None]:
        group = self._group(key)
        self._check_open()
        parts = 1 + (self.layout.model_layers if cut.layers else 0)  # others in its steps may have them told one by one
        with self._streams.opened(key, (self._settings.prefill_lead + 1) * parts) as queue:
            try:
                self._tell(self._scheduler.start_prompt(group, cut, held_len, ready_len))
                last = False
                while not last:
                    self._wake.set()
                    done = await queue.get()
                    if isinstance(done, BatonError):
                        raise done
                    group.ahead -= not done.partial
                    last = done.last
                    yield done
            finally:
                self._scheduler.stop(group)
                self._note_ends()

    def start_prefilled(self, key: TicketKey, first: tuple[FirstToken, ...], came_by: str = EXACT) -> None:
        group = self._group(key)
        if [token.choice for token in first] != list(range(len(group.choices))):
            raise ValueError(f"{key}: one handoff token for each of {len(group.choices)} choices is needed, in order")
        if not all(0 <= token.token < self._intake.vocab_size for token in first):
            raise EngineError(f"token ids must be 0 to {self._intake.vocab_size - 1}")
        self._check_open()
        self._scheduler.start_prefilled(group, first, came_by)
        self._wake.set()

    def start_local(self, key: TicketKey, held_len: int = 0, came_by: str = EXACT) -> None:
        self._check_open()
        self._scheduler.start_local(self._group(key), held_len, came_by)
        self._wake.set()

    def lend(self, key: TicketKey, start: int, end: int) -> Loan | None:
        group = self._scheduler.groups.get(key)
        return None if group is None or group.loading else self._lending.lend(group, start, end)

    @property
    def block_tokens(self) -> int | None:
        """Of the blocks by which it finds state again; None: it does not."""
        return self._settings.block_tokens if self._capacity.prefixes.are_kept else None

    def held(self, key: TicketKey) -> Held:
        group = self._scheduler.groups.get(key)
        return NOTHING if group is None else group.held

    def begun_at(self, key: TicketKey) -> float | None:
        group = self._scheduler.groups.get(key)
        return None if group is None else group.begun_at

    def finish_choice(self, key: TicketKey, choice: int) -> None:
        group = self._scheduler.groups.get(key)
        if group is not None and group.decodes and choice < len(group.choices):
            self._scheduler.finish_choice(group, choice)
            self._note_ends()
            self._wake.set()

    async def retire(self, key: TicketKey) -> None:
        if (group := self._scheduler.groups.get(key)) is None:
            return
        if not group.retiring:
            self._streams.fail(key, Cancelled("the ticket was retired"))
        released = self._released.setdefault(key, asyncio.Event())
        if self._scheduler.retire(group):
            self._set_released(key)
            self._wake.set()
        self._note_ends()
        await released.wait()

    # Reports

    def pages(self) -> tuple[int, int, int]:
        total, free, retiring = self._counts(self._capacity.pages)
        return total, free, retiring + self._lending.num_orphaned

    def slots(self) -> tuple[int, int, int]:
        return self._counts(self._capacity.slots)

    def left(self) -> tuple[int, int]:
        return self._scheduler.room.left()

    def queues(self) -> dict[str, int]:
        return queue_lengths(self._scheduler.groups.values())

    @property
    def stashed_bytes(self) -> int:
        return self._stash.used_bytes

    @property
    def last_progress_age_s(self) -> float:
        return 0.0 if self._dispatched_at is None else self._clock.now() - self._dispatched_at

    # The loop

    async def run(self) -> None:
        """Computes steps until `close`; an error that leaves it, a bug of ours or a lost GPU, ends the process."""
        if self._ended is not None:
            raise RuntimeError("an engine runs once")
        self._ended = asyncio.Event()
        try:
            while not self._closing:
                self._wake.clear()
                plan, effects = self._scheduler.schedule()
                self._tell(effects)
                if plan is None:
                    await self._wake.wait()
                else:
                    self._tell(await self._step(plan))
        finally:
            self._closing = True
            self._streams.fail_all(EngineError("the engine was closed"))
            self._ended.set()

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._ended is not None:
            await self._ended.wait()
        self._executor.close()

    async def _step(self, plan: StepPlan) -> StepEffects:
        self._dispatched_at = started = self._clock.now()
        for row in plan.rows:
            if row.choice is None and (group := self._scheduler.groups[row.key]).begun_at is None:
                group.begun_at = started
        watch = StepWatch(lambda num_layers: self._executor.tell(lambda: self._on_layers(plan, num_layers)))
        self._under_way = plan, watch
        try:
            result = await self._executor.run(lambda: self._runner.execute(plan, watch))
        except asyncio.CancelledError:
            # The executor has waited for the step: it uses nothing any more.
            self._tell(self._scheduler.fail(plan, EngineError.code, "the engine was closed"))
            raise
        except StepUnwanted:
            return self._scheduler.fail(plan, Cancelled.code, "nobody wants the step any more")
        except Exception as error:
            log.exception("a step failed", extra={"rows": len(plan.rows), "tokens": plan.num_tokens})
            effects = self._scheduler.fail(plan, EngineError.code, f"{type(error).__name__}: {error}")
            if not device_is_lost(error):
                return effects
            self._tell(effects)
            raise
        finally:
            self._dispatched_at = self._under_way = None
            self.stats.step_s += self._clock.now() - started
        effects = self._scheduler.apply(plan, result)
        self.stats.steps += 1
        self.stats.busy_s += self._clock.now() - started
        return effects

    def _on_layers(self, plan: StepPlan, num_layers: int) -> None:
        if self._under_way is not None and self._under_way[0] is plan:
            self._tell(self._scheduler.layers_done(plan, num_layers))

    def _note_ends(self) -> None:
        """A step under way that nobody wants any more ends between two layers."""
        if self._under_way is not None:
            plan, watch = self._under_way
            watch.unwanted = not self._scheduler.is_wanted(plan)

    def _tell(self, effects: StepEffects) -> None:
        for key, chunk in effects.chunks:
            self._streams.put(key, chunk)
        listened = []
        for failure in effects.failed:
            if failure.key in self._streams:
                self._streams.fail(failure.key, EngineError(failure.message))
            else:
                listened.append(failure)
        effects.failed = listened
        for key in effects.released:
            self._set_released(key)
        output = effects.output()
        if output != StepOutput():
            self._listener(output)

    def _set_released(self, key: TicketKey) -> None:
        if (event := self._released.pop(key, None)) is not None:
            event.set()

    def _group(self, key: TicketKey) -> Group:
        if (group := self._scheduler.groups.get(key)) is None:
            raise EngineError(f"{key} is not reserved")
        return group

    def _check_open(self) -> None:
        if self._closing:
            raise EngineError("the engine is closed")

    def _counts(self, units: PageAllocator) -> tuple[int, int, int]:
        retiring = sum(units.held_by(key) for key, group in self._scheduler.groups.items() if group.retiring)
        return units.total, units.free, retiring
