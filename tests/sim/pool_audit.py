"""Who holds and who touches each page and slot of one simulated worker, checked whenever that changes."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from shared.engine.batch import Arrival, CopyPage, StepPlan
from shared.engine.effects import StepEffects
from shared.state.components import IndexKind
from shared.state.pages import PageAllocator
from tests.sim.processes import Worker


class Observer(Protocol):
    """Who is told."""

    def fail(self, invariant: str, detail: str) -> None: ...
    def event(self, what: str) -> None: ...
    def pool_changed(self, audit: "PoolAudit") -> None: ...


class _Audited(PageAllocator):
    """Tells when something changed, and at once what came free."""

    def __init__(self, num_units: int, changed: Callable[[], None], freed: Callable[[list[int]], None]) -> None:
        super().__init__(num_units)
        self._changed, self._freed = changed, freed

    def take(self, count: int, owner: Hashable) -> list[int]:
        self._changed()
        return super().take(count, owner)

    def share(self, units: Sequence[int], owner: Hashable) -> None:
        self._changed()
        super().share(units, owner)

    def adopt(self, units: Sequence[int], owner: Hashable) -> None:
        self._changed()
        super().adopt(units, owner)

    def give_back(self, units: Iterable[int], owner: Hashable) -> None:
        self._changed()
        given = list(units)
        super().give_back(given, owner)
        self._freed([unit for unit in given if not self.is_held(unit)])


class PoolAudit:
    """Invariants: free + held is the pool; a unit has one owner, but for those that have a name, into which nobody
    writes; what a step under way computes in, what an open door
    lets others write and what a transfer reads is held by its ticket, and none of it comes free."""

    def __init__(self, worker: Worker, observer: Observer) -> None:
        self.worker = worker
        self._observer = observer
        self._fail = observer.fail
        self._in_step: list[tuple[bool, int, Hashable]] = []
        self._written: set[int] = set()
        self._paged = [c.index is IndexKind.PAGE for c in worker.pool.layout.components]
        capacity: Any = worker.engine._capacity
        self.pages = capacity.pages = capacity.prefixes._pages = _Audited(
            capacity.pages.total, self._changed, lambda u: self._freed(True, u)
        )
        self.slots = capacity.slots = _Audited(capacity.slots.total, self._changed, lambda u: self._freed(False, u))
        engine: Any = worker.engine
        compute = engine._step

        async def watched_step(plan: StepPlan) -> StepEffects:
            self._in_step = list(_units_of(plan))
            self._written = set(_written_by(plan, worker.pool.layout.page_tokens))
            observer.event(f"{worker.name} step of {plan.num_tokens}")
            self.check()
            try:
                effects: StepEffects = await self._computed(compute, plan)
            finally:
                self._in_step, self._written = [], set()
            return effects

        engine._step = watched_step

    async def _computed(self, compute: Callable[[StepPlan], Any], plan: StepPlan) -> StepEffects:
        """The step's own books are brought up to date as it ends: until then its units are in use."""
        scheduler: Any = self.worker.engine._scheduler
        apply, fail = scheduler.apply, scheduler.fail

        def over(call: Callable[..., StepEffects]) -> Callable[..., StepEffects]:
            def wrapped(*args: Any) -> StepEffects:
                self._in_step, self._written = [], set()
                return call(*args)

            return wrapped

        scheduler.apply, scheduler.fail = over(apply), over(fail)
        try:
            effects: StepEffects = await compute(plan)
            return effects
        finally:
            scheduler.apply, scheduler.fail = apply, fail

    def check(self) -> None:
        """Everything there is to know about the pool, now."""
        if not self.worker.alive:
            return
        for name, units in (("page", self.pages), ("slot", self.slots)):
            self._check_books(name, units)
        for unit in self._written:
            if unit in self.pages._names:
                self._fail("what others may have is not written to", f"{self.worker.name}: page {unit}")
        for paged, unit, owner in self._in_step:
            self._check_held(paged, unit, owner, "a step computes in it")
        for touch in self.worker.link.touched():
            why = "its door is open for writers" if touch.writes else "a transfer reads it"
            self._check_held(self._paged[touch.component], touch.unit, touch.key, why)

    def _check_books(self, name: str, units: PageAllocator) -> None:
        references: Counter[int] = Counter()
        owners: Counter[int] = Counter()
        for mine in units._owners.values():
            references.update(mine)
            owners.update(mine.keys())
        free, held = sorted((*units._free, *units._idle)), sorted(references)
        if sorted(free + held) != list(range(units.total)):
            self._fail("pages are conserved", f"{self.worker.name}: {name}s free {free}, held {held}")
        if any(count > 1 and unit not in units._names for unit, count in owners.items()):
            self._fail("no page is owned twice", f"{self.worker.name}: {name}s {owners}")

    def _check_held(self, paged: bool, unit: int, owner: Hashable, why: str) -> None:
        units = self.pages if paged else self.slots
        if not (mine := units._owners.get(owner)) or not mine[unit]:
            what = f"{self.worker.name}: {'page' if paged else 'slot'} {unit} is not {owner}'s, but {why}"
            self._fail("nothing is reused while in use", what)

    def _freed(self, paged: bool, freed: list[int]) -> None:
        """Still touched and free already: seen here although it may be taken again before the turn is over."""
        if not freed or not self.worker.alive:
            return
        touched = [(self._paged[t.component], t.unit, t.key) for t in self.worker.link.touched()]
        for kind, unit, owner in (*self._in_step, *touched):
            if kind is paged and unit in freed:
                what = f"{self.worker.name}: {'page' if paged else 'slot'} {unit} of {owner} came free while in use"
                self._fail("nothing is reused while in use", what)

    def _changed(self) -> None:
        self._observer.pool_changed(self)


def _written_by(plan: StepPlan, page_tokens: int) -> Iterator[int]:
    """Pages."""
    for row in plan.rows:
        yield from row.pages[row.start // page_tokens : -(-row.end // page_tokens)]
    for load in plan.loads:
        yield from (page for _, page in load.pages)
    for copy in plan.copies:
        if isinstance(copy, Arrival):
            yield from copy.pages
        elif isinstance(copy, CopyPage):
            yield copy.target


def _units_of(plan: StepPlan) -> Iterable[tuple[bool, int, Hashable]]:
    """(is it a page, the unit, whose) of all that a step reads or writes."""
    for row in plan.rows:
        for page in row.pages:
            yield True, page, row.key
        yield False, row.slot, row.key
    for save in plan.saves:
        yield from ((True, page, save.key) for page in save.pages)
        yield from ((False, slot, save.key) for slot in save.slots)
    for load in plan.loads:
        yield from ((True, page, load.key) for _, page in load.pages)
        yield from ((False, slot, load.key) for _, slot in load.slots)
    if len(plan.keys) == 1:  # whose a copy is, is only known where there is one
        for copy in plan.copies:
            if isinstance(copy, Arrival):
                yield from ((True, page, plan.keys[0]) for page in copy.pages)
                yield from ((False, slot, plan.keys[0]) for slot in copy.slots)
                continue
            for unit in (copy.source, copy.target):
                yield isinstance(copy, CopyPage), unit, plan.keys[0]
