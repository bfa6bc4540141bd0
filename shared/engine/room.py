"""Who gives way when pages run out, and who gets pages (again): in which order, and where the state stays meanwhile.

On D the youngest gives way to those who started before it, and comes back as soon as there is room. On P what was
computed ahead gives way to everybody: to a prompt that somebody waits for, and to a new one that would be refused
otherwise. Nobody holds pages while it waits for more, so nobody waits for ever.

The state goes to host memory with the next step, and the pages are free once that step is over. What finds no room
there is dropped at once, and computed again.
"""

from shared.engine.api import EngineStats
from shared.engine.batch import Load, Save
from shared.engine.capacity import Capacity
from shared.engine.effects import StepEffects
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.stash import Stash
from shared.runtime.errors import PoolExhausted
from shared.transfer.link import TicketKey


class Room:
    """groups, active: the scheduler's own. `begin` opens a step; saves and loads are what that step has to copy."""

    def __init__(
        self,
        capacity: Capacity,
        stash: Stash,
        groups: dict[TicketKey, Group],
        active: dict[TicketKey, Group],
        stats: EngineStats,
    ) -> None:
        self.saves: list[Save] = []
        self.loads: list[Load] = []
        self._capacity = capacity
        self._stash = stash
        self._groups = groups
        self._active = active
        self._stats = stats
        self._coming = 0

    def begin(self) -> None:
        self.saves, self.loads, self._coming = [], [], 0

    # D: choices that need one more page

    def make_room(self, group: Group, choice: Choice, effects: StepEffects) -> bool:
        """A page for the choice's next position. The youngest group that started later gives way; where there is none,
        and until its pages are free, the choice sits this step out and keeps what it has."""
        while not self._capacity.try_grow(group, choice):
            if self._coming:
                self._coming -= 1
                return False
            victim = next((other for other in reversed(self._active.values()) if other.is_preemptible), None)
            if victim is None or victim is group:
                return False
            self._coming += self._send_away(victim, effects)
        return True

    def readmit(self, effects: StepEffects) -> list[tuple[Group, PoolExhausted]]:
        """Preempted groups come back oldest first. Each running choice may soon want a page: that many stay free, or
        the group would soon be sent away again. Returns those for which the whole pool would not do."""
        hopeless = []
        for group in list(self._active.values()):
            if group.phase is not Phase.PREEMPTED or not group.decodes:
                continue
            headroom = sum(len(g.live) for g in self._active.values() if g.phase is Phase.DECODING)
            try:
                if group.in_step or not self._capacity.try_readmit(group, headroom):
                    break
            except PoolExhausted as error:
                hopeless.append((group, error))
            else:
                self._come_back(group, effects)
        return hopeless

    # P: prompts that are computed ahead give way to others

    def left(self) -> tuple[int, int]:
        """(pages, slots) that a new prompt may have: free ones and those that others would give up for it, but not
        what is promised to those who wait already."""
        pages, slots = self._capacity.pages.free, self._capacity.slots.free
        for group in self._groups.values():
            if group.decodes:
                continue
            if group.is_yieldable or (group.phase is Phase.PREEMPTED and group.in_step):
                pages += self._capacity.pages.held_alone_by(group.key)
                slots += self._capacity.slots.held_by(group.key)
            if group.phase is Phase.PREEMPTED and group.claims:
                num_pages, num_slots = self._capacity.wanted(group)
                pages, slots = pages - num_pages, slots - num_slots
        return max(0, pages), max(0, slots)

    def admit(self, group: Group) -> None:
        """Takes a new prompt's pages, or lets it wait for those that others will give up. Raises PoolExhausted where
        that would not be enough."""
        num_pages, num_slots = self._capacity.wanted(group)
        pages, slots = self.left()
        is_first = not any(g.phase is Phase.PREEMPTED and g.claims for g in self._groups.values())
        fits_now = num_pages <= self._capacity.pages.free and num_slots <= self._capacity.slots.free
        if num_pages > pages or num_slots > slots:
            raise PoolExhausted(f"{num_pages} pages and a slot wanted; {pages} pages and {slots} slots could be had")
        if is_first and fits_now:
            self._capacity.admit(group)
        else:
            group.phase, group.claims = Phase.PREEMPTED, True

    def serve_claims(self, effects: StepEffects) -> None:
        """Those somebody waits for come first, then new ones, each in the order of reservation; nobody is passed. What
        is left goes to those who may try once more ahead of time."""
        waiting = [g for g in self._groups.values() if g.phase is Phase.PREEMPTED and not g.decodes and not g.in_step]
        for group in sorted((g for g in waiting if g.claims), key=lambda g: not g.asked):
            if not self._capacity.try_readmit(group, headroom=0):
                self._demand(group, effects)
                if not self._capacity.try_readmit(group, headroom=0):
                    return
            self._come_back(group, effects)
        for group in waiting:
            is_away = group.phase is Phase.PREEMPTED  # or it was served just now
            if is_away and group.optimistic and group.attempts and not group.is_complete:
                if not self._capacity.try_readmit(group, headroom=0):
                    return
                self._come_back(group, effects)

    def _demand(self, group: Group, effects: StepEffects) -> None:
        """Sends away as many as are needed, parked ones first, then the youngest."""
        num_pages, num_slots = self._capacity.wanted(group)
        pages, slots = self._capacity.pages.free, self._capacity.slots.free
        victims = [other for other in reversed(self._active.values()) if other.is_yieldable and not other.in_step]
        for victim in sorted(victims, key=lambda g: g.phase is not Phase.PARKED):
            if num_pages <= pages and num_slots <= slots:
                return
            pages += self._capacity.pages.held_alone_by(victim.key)
            slots += self._capacity.slots.held_by(victim.key)
            self._send_away(victim, effects)

    # Both

    def forget(self, group: Group) -> None:
        """Its state in host memory is of no use any more."""
        if group.saved is not None:
            self._stash.give_back(group.saved)
            group.saved = None

    def _send_away(self, group: Group, effects: StepEffects) -> int:
        """Its state goes to host memory, or is dropped. The number of pages that come free with this step; what is
        free at once is not counted."""
        pages, slots, places = self._capacity.state_of(group)
        computed = sum(place.computed for place in places)
        group.saved = self._stash.try_take(len(pages), places) if computed else None
        group.phase, group.gave_way = Phase.PREEMPTED, True
        group.attempts = max(0, group.attempts - 1)
        self._stats.preemptions += 1
        effects.preempted.append(group.key)
        if group.saved is None:
            self._stats.preemptions_recomputed += 1
            self._stats.tokens_dropped += computed
            self._capacity.drop(group)
            return 0
        self._stats.preemptions_stashed += 1
        self.saves.append(Save(group.key, group.saved, pages, slots))
        group.in_step = True
        return self._capacity.pages.held_alone_by(group.key)

    def _come_back(self, group: Group, effects: StepEffects) -> None:
        """It has pages: its state is loaded, or it begins again."""
        group.claims = False
        if group.saved is not None:
            self.loads.append(self._capacity.restore(group))
            group.in_step = group.loading = True
        if group.trunk_slot is None:
            group.phase = Phase.DECODING
        elif group.key not in self._active:
            group.phase = Phase.RESERVED
        else:
            group.phase = Phase.PARKED if group.computed == group.trunk_len else Phase.PROMPT
        if group.gave_way:
            group.gave_way = False
            effects.resumed.append(group.key)
