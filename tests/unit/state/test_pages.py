from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from shared.runtime.errors import PoolExhausted
from shared.state.pages import PageAllocator


def test_the_lowest_free_units_come_first() -> None:
    pages = PageAllocator(6)
    assert pages.take(3, "a") == [0, 1, 2]
    pages.give_back([1], "a")
    assert pages.take(2, "b") == [1, 3]


def test_too_many_takes_nothing() -> None:
    pages = PageAllocator(4)
    pages.take(2, "a")
    with pytest.raises(PoolExhausted, match="3 units wanted, 2 of 4"):
        pages.take(3, "b")
    assert (pages.free, pages.held, pages.held_by("b")) == (2, 2, 0)


def test_a_shared_unit_is_free_after_its_last_reference() -> None:
    pages = PageAllocator(2)
    [unit] = pages.take(1, "a")
    pages.share([unit], "b")
    pages.give_back([unit], "a")
    assert pages.is_held(unit)
    pages.give_back([unit], "b")
    assert not pages.is_held(unit)
    assert pages.free == 2


@pytest.mark.parametrize("units", [[0, 0], [0, 1], [3]])
def test_giving_back_what_is_not_held_changes_nothing(units: list[int]) -> None:
    pages = PageAllocator(4)
    pages.take(1, "a")
    pages.take(1, "b")
    with pytest.raises(ValueError, match="gives back unit"):
        pages.give_back(units, "a")
    assert (pages.held_by("a"), pages.held_by("b"), pages.free) == (1, 1, 2)


def test_a_free_unit_cannot_be_shared() -> None:
    pages = PageAllocator(4)
    pages.take(1, "a")
    with pytest.raises(ValueError, match="unit 1 is not held"):
        pages.share([0, 1], "b")
    assert pages.held_by("b") == 0


class AllocatorRules(RuleBasedStateMachine):
    """Takes, shares and gives back in any order, against a plain count of references."""

    references = Bundle("references")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(8)
        self.model: Counter[tuple[str, int]] = Counter()

    @rule(target=references, count=st.integers(0, 5), owner=st.sampled_from("abc"))
    def take(self, count: int, owner: str) -> object:
        held = {unit for (_, unit), n in self.model.items() if n}
        if count > 8 - len(held):
            with pytest.raises(PoolExhausted):
                self.pages.take(count, owner)
            return multiple()
        units = self.pages.take(count, owner)
        assert held.isdisjoint(units)
        assert units == sorted(set(range(8)) - held)[:count]
        self.model.update((owner, unit) for unit in units)
        return multiple(*((owner, unit) for unit in units))

    @rule(target=references, reference=references, owner=st.sampled_from("abc"))
    def share(self, reference: tuple[str, int], owner: str) -> object:
        unit = reference[1]
        if not any(n for (_, other), n in self.model.items() if other == unit):
            with pytest.raises(ValueError, match="not held"):
                self.pages.share([unit], owner)
            return multiple()
        self.pages.share([unit], owner)
        self.model[owner, unit] += 1
        return owner, unit

    @rule(reference=consumes(references))
    def give_back(self, reference: tuple[str, int]) -> None:
        owner, unit = reference
        if not self.model[reference]:
            with pytest.raises(ValueError, match="gives back"):
                self.pages.give_back([unit], owner)
            return
        self.pages.give_back([unit], owner)
        self.model[reference] -= 1

    @rule(owner=st.sampled_from("abc"))
    def give_back_all(self, owner: str) -> None:
        self.pages.give_back_all(owner)
        for key in [key for key in self.model if key[0] == owner]:
            del self.model[key]

    @invariant()
    def counts_agree(self) -> None:
        totals: Counter[int] = Counter()
        for (_, unit), n in self.model.items():
            totals[unit] += n
        assert [self.pages.num_references(unit) for unit in range(8)] == [totals[unit] for unit in range(8)]
        assert self.pages.free + self.pages.held == self.pages.total == 8
        assert self.pages.held == sum(n > 0 for n in totals.values())


TestAllocatorRules = AllocatorRules.TestCase
