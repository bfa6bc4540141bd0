"""What groups hold of the pool: taking it, branching, growing, giving it back. Bookkeeping on the loop only; the
copies that branching needs are noted on the group and carried out by the step that first runs its choices.
"""

from collections.abc import Callable

from shared.engine.batch import CopyPage, CopySlot, Load
from shared.engine.prefixes import Prefixes
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.sharing import NOTHING
from shared.engine.stash import Place
from shared.runtime.errors import InvalidRequest, PoolExhausted
from shared.state.layout import PoolLayout
from shared.state.pages import PageAllocator


class Capacity:
    """Pages and slots of one pool. Everything is held under the group's key, so that retiring gives all of it back."""

    def __init__(
        self,
        layout: PoolLayout,
        growth_tokens: int,
        clear_slot: Callable[[int], None],
        identity: str = "",
        block_tokens: int | None = None,
    ) -> None:
        self.pages = PageAllocator(layout.num_pages)
        self.prefixes = Prefixes(self.pages, layout, identity, block_tokens)
        self.slots = PageAllocator(layout.num_slots)
        self._page_tokens = layout.page_tokens
        self._growth_tokens = growth_tokens
        self._clear_slot = clear_slot

    def check(self, group: Group) -> tuple[int, int]:
        """(pages, slots) that the group would take; InvalidRequest where even the whole pool would not do."""
        group.growth_tokens = self._growth_tokens
        num_pages, num_slots = self.wanted(group)
        if num_pages > self.pages.total and any(choice.outputs for choice in group.choices):
            group.growth_tokens = 1  # it got so far in a pool like this one, page by page
            num_pages, num_slots = self.wanted(group)
        if num_pages > self.pages.total:
            raise InvalidRequest(
                f"the prompt has {group.prompt_len} tokens; with {group.sampling.n} choices and the first steps "
                f"it needs {num_pages} pages of {self._page_tokens} tokens, and this worker has {self.pages.total}"
            )
        if num_slots > self.slots.total:
            raise InvalidRequest(
                f"{group.sampling.n} choices are wanted; this worker runs {self.slots.total}", param="n"
            )
        return num_pages, num_slots

    def wanted(self, group: Group) -> tuple[int, int]:
        """(pages, slots) for the prompt and, where the group decodes here, its live choices' next positions."""
        trunk = self.num_pages(group.trunk_len)
        if not group.decodes:
            return trunk, 1
        live = group.live
        num_pages = trunk
        for rank, choice in enumerate(live):
            shared = trunk if rank == 0 else group.trunk_len // self._page_tokens
            num_pages += self.num_pages(self._target(group, choice)) - shared
        return num_pages, max(1, len(live))

    def admit(self, group: Group) -> None:
        """Takes what a checked group wants, all or nothing: PoolExhausted where there is not so much free."""
        self._take(group, *self.wanted(group))

    def try_readmit(self, group: Group, headroom: int) -> bool:
        """Takes what a preempted group needs to go on, if that and `headroom` pages are free. PoolExhausted where the
        whole pool would not do."""
        group.growth_tokens = self._growth_tokens
        num_pages, num_slots = self.wanted(group)
        if num_pages + headroom > self.pages.total:
            group.growth_tokens = 1
            num_pages, num_slots = self.wanted(group)
            if num_pages > self.pages.total:
                raise PoolExhausted(f"{num_pages} pages are needed to go on; the whole pool has {self.pages.total}")
            headroom = min(headroom, self.pages.total - num_pages)
        if num_pages + headroom > self.pages.free or num_slots > self.slots.free:
            return False
        self._take(group, num_pages, num_slots)
        return True

    def branch(self, group: Group) -> None:
        """The trunk is complete: its first live choice takes it over, the others share its full pages and get copies of
        the rest. What was taken for choices that have ended is given back."""
        key, trunk_len = group.key, group.trunk_len
        full = trunk_len // self._page_tokens
        trunk, trunk_slot = group.trunk_pages, group.trunk_slot
        for rank, choice in enumerate(group.live):
            if rank == 0:
                choice.pages, choice.slot = list(trunk), trunk_slot
            else:
                assert trunk_slot is not None
                self.pages.share(trunk[:full], key)
                choice.pages, choice.slot = trunk[:full], group.spare_slots.pop()
                group.copies.append(CopySlot(trunk_slot, choice.slot))
            missing = self.num_pages(self._target(group, choice)) - len(choice.pages)
            choice.pages += group.spare_pages[:missing]
            del group.spare_pages[:missing]
            if rank > 0 and trunk_len % self._page_tokens:
                group.copies.append(CopyPage(trunk[full], choice.pages[full]))
            choice.computed = trunk_len
            choice.naming = self.prefixes.fork(group)
        self.pages.give_back(group.spare_pages, key)
        self.slots.give_back(group.spare_slots, key)
        group.trunk_pages, group.trunk_slot, group.spare_pages, group.spare_slots = [], None, [], []

    def state_of(self, group: Group) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Place, ...]]:
        """Pages and slots that carry state, each once, and which sequence has which of them. Spare ones carry none."""
        sequences: list[tuple[int | None, list[int], int, int]]
        if group.trunk_slot is not None:
            sequences = [(None, group.trunk_pages, group.trunk_slot, group.computed)]
        else:
            sequences = [(c.index, c.pages, c.slot, c.computed) for c in group.live if c.slot is not None]
        numbers: dict[int, int] = {}
        places = []
        for index, pages, _, computed in sequences:
            used = pages[: self.num_pages(computed)]
            places.append(Place(index, tuple(numbers.setdefault(page, len(numbers)) for page in used), computed))
        return tuple(numbers), tuple(slot for _, _, slot, _ in sequences), tuple(places)

    def restore(self, group: Group) -> Load:
        """Deals what was just taken out to the sequences as it lay before the group gave way, and says what has to be
        copied where. Of choices that have ended meanwhile nothing comes back."""
        assert group.saved is not None
        assert group.trunk_slot is not None
        places = group.saved.places
        if places[0].choice is None:
            group.computed = places[0].computed
            pages = tuple(zip(places[0].pages, group.trunk_pages, strict=False))
            return Load(group.key, group.saved, pages, ((0, group.trunk_slot),), leaves=not group.decodes)
        free_pages, free_slots = group.trunk_pages + group.spare_pages, [group.trunk_slot, *group.spare_slots]
        at: dict[int, int] = {}
        slots = []
        for number, place in enumerate(places):
            assert place.choice is not None
            choice = group.choices[place.choice]
            if choice.done:
                continue
            shared = [at[page] for page in place.pages if page in at]
            self.pages.share(shared, group.key)
            at |= {page: free_pages.pop(0) for page in place.pages if page not in at}
            choice.pages, choice.slot, choice.computed = [at[p] for p in place.pages], free_slots.pop(0), place.computed
            missing = self.num_pages(self._target(group, choice)) - len(choice.pages)
            choice.pages += free_pages[:missing]
            del free_pages[:missing]
            slots.append((number, choice.slot))
        self.pages.give_back(free_pages, group.key)
        self.slots.give_back(free_slots, group.key)
        group.trunk_pages, group.trunk_slot, group.spare_pages, group.spare_slots = [], None, [], []
        return Load(group.key, group.saved, tuple(at.items()), tuple(slots))

    def try_grow(self, group: Group, choice: Choice) -> bool:
        """Makes sure that the choice's next position has a page; False where none is free."""
        if choice.computed < len(choice.pages) * self._page_tokens:
            return True
        if not self.pages.free:
            return False
        choice.pages += self.pages.take(1, group.key)
        return True

    def holds_everything(self, group: Group) -> bool:
        return self.pages.held_by(group.key) == self.pages.total

    def drop_finished(self, group: Group) -> None:
        """Gives back what finished choices of a running group hold, unless a step or a pending copy needs it."""
        if group.in_step or group.copies or group.phase is not Phase.DECODING:
            return
        for choice in group.choices:
            if choice.done and choice.slot is not None:
                self.pages.give_back(choice.pages, group.key)
                self.slots.give_back([choice.slot], group.key)
                choice.pages, choice.slot = [], None

    def drop(self, group: Group) -> None:
        """Gives everything back. No step may be using it."""
        self.pages.give_back_all(group.key)
        self.slots.give_back_all(group.key)
        group.trunk_pages, group.trunk_slot, group.spare_pages, group.spare_slots = [], None, [], []
        group.copies, group.computed = [], 0
        for choice in group.choices:
            choice.pages, choice.slot, choice.computed = [], None, 0

    def _take(self, group: Group, num_pages: int, num_slots: int) -> None:
        if num_slots > self.slots.free:
            raise PoolExhausted(f"{num_slots} slots wanted, {self.slots.free} of {self.slots.total} are free")
        if num_pages > self.pages.free:
            raise PoolExhausted(f"{num_pages} pages wanted, {self.pages.free} of {self.pages.total} are free")
        held, group.held = ([], NOTHING) if group.saved is not None else self.prefixes.find(group)
        self.pages.adopt(held, group.key)
        pages = held + self.pages.take(num_pages - len(held), group.key)
        group.computed = group.held.num_tokens
        slots = self.slots.take(num_slots, group.key)
        num_trunk = self.num_pages(group.trunk_len)
        group.trunk_pages, group.spare_pages = pages[:num_trunk], pages[num_trunk:]
        group.trunk_slot, group.spare_slots = slots[0], slots[1:]
        self._clear_slot(slots[0])  # the others are copied over

    def _target(self, group: Group, choice: Choice) -> int:
        """Positions to have pages for: some beyond what is known, but never the last token's, which gets no state."""
        known = group.prompt_len + max(len(choice.outputs), 1) - 1
        return min(known + group.growth_tokens, group.prompt_len + group.max_new - 1)

    def num_pages(self, num_tokens: int) -> int:
        """That hold so many positions."""
        return -(-num_tokens // self._page_tokens)
