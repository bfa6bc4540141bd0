"""Pages that hold still for somebody who reads them: a put into a store. Complete pages are never written again, so all
that is needed is that nobody else gets them; whoever they belonged to may be retired or give way meanwhile."""

from collections import Counter
from collections.abc import Callable
from itertools import count

from shared.engine.capacity import Capacity
from shared.engine.sequence import Group


class Loan:
    """`pages` hold still until `close`, which may be called more than once."""

    def __init__(self, pages: tuple[int, ...], give_back: Callable[[], None]) -> None:
        self.pages = pages
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()


class Lending:
    """The loans of one pool. on_return: called when pages may have come free."""

    def __init__(self, capacity: Capacity, page_tokens: int, on_return: Callable[[], None]) -> None:
        self._capacity = capacity
        self._page_tokens = page_tokens
        self._on_return = on_return
        self._numbers = count()
        self._lent: Counter[int] = Counter()

    def lend(self, group: Group, start: int, end: int) -> Loan | None:
        """The pages of positions [start, end), whole ones; None where nobody of the group has them computed now."""
        if start % self._page_tokens or end % self._page_tokens or start >= end:
            raise ValueError(f"positions {start} to {end} are no whole pages of {self._page_tokens}")
        pages = self._pages(group, end)
        if pages is None:
            return None
        own = tuple(pages[start // self._page_tokens : end // self._page_tokens])
        owner = ("loan", next(self._numbers))
        self._capacity.pages.share(own, owner)
        self._lent.update(own)

        def give_back() -> None:
            self._capacity.pages.give_back_all(owner)
            self._lent.subtract(own)
            self._lent = +self._lent
            self._on_return()

        return Loan(own, give_back)

    @property
    def num_orphaned(self) -> int:
        """Pages that loans alone keep."""
        return sum(self._capacity.pages.num_references(page) == number for page, number in self._lent.items())

    def _pages(self, group: Group, end: int) -> list[int] | None:
        """Of the trunk or, once the choices have branched off, of the first one that has got so far."""
        if group.trunk_slot is not None:
            return group.trunk_pages if group.computed >= end else None
        able = (choice.pages for choice in group.choices if choice.slot is not None and choice.computed >= end)
        return next(able, None)
