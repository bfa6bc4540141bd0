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


def test_a_named_unit_is_found_until_it_is_taken_as_a_fresh_one() -> None:
    pages = PageAllocator(3)
    pages.take(2, "a")
    pages.name(0, "x")
    pages.name(1, "y")
    pages.give_back_all("a")
    assert (pages.free, pages.num_named) == (3, 2)
    assert pages.find("x") == 0
    pages.adopt([0], "b")
    assert (pages.free, pages.held_by("b")) == (2, 1)
    assert pages.take(1, "c") == [2], "one without a name first"
    assert (pages.find("x"), pages.find("y")) == (0, 1)
    assert pages.take(1, "c") == [1]
    assert (pages.find("x"), pages.find("y")) == (0, None)


def test_only_held_units_get_a_name_and_only_named_ones_are_adopted() -> None:
    pages = PageAllocator(3)
    with pytest.raises(ValueError, match="unit 0 is not held"):
        pages.name(0, "x")
    pages.take(2, "a")
    pages.name(0, "x")
    with pytest.raises(ValueError, match="unit 1 has no name"):
        pages.adopt([0, 1], "b")
    assert pages.held_by("b") == 0


class AllocatorRules(RuleBasedStateMachine):
    """Takes, shares, names, adopts and gives back in any order, against a plain count of references and a list of
    free units that have a name, in the order in which they go."""

    references = Bundle("references")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(8)
        self.model: Counter[tuple[str, int]] = Counter()
        self.names: dict[int, str] = {}
        self.idle: list[int] = []

    @rule(target=references, count=st.integers(0, 5), owner=st.sampled_from("abc"))
    def take(self, count: int, owner: str) -> object:
        held = {unit for (_, unit), n in self.model.items() if n}
        if count > 8 - len(held):
            with pytest.raises(PoolExhausted):
                self.pages.take(count, owner)
            return multiple()
        units = self.pages.take(count, owner)
        assert held.isdisjoint(units)
        assert units == sorted([*sorted(set(range(8)) - held - set(self.idle)), *self.idle][:count])
        self.idle = [unit for unit in self.idle if unit not in units]
        for unit in units:
            self.names.pop(unit, None)
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

    @rule(reference=references, name=st.sampled_from("xyz"))
    def name(self, reference: tuple[str, int], name: str) -> None:
        unit = reference[1]
        if not any(n for (_, other), n in self.model.items() if other == unit):
            with pytest.raises(ValueError, match="not held"):
                self.pages.name(unit, name)
            return
        self.pages.name(unit, name)
        if unit not in self.names and name not in self.names.values():
            self.names[unit] = name

    @rule(target=references, name=st.sampled_from("xyz"), owner=st.sampled_from("abc"))
    def adopt(self, name: str, owner: str) -> object:
        unit = self.pages.find(name)
        assert unit == next((unit for unit, found in self.names.items() if found == name), None)
        if unit is None:
            return multiple()
        self.pages.adopt([unit], owner)
        self.model[owner, unit] += 1
        if unit in self.idle:
            self.idle.remove(unit)
        return owner, unit

    def _note_idle(self, units: list[int]) -> None:
        """Those without a reference, the one whose turn comes first at the front."""
        gone = [unit for unit in units if not any(n for (_, other), n in self.model.items() if other == unit)]
        self.idle += [unit for unit in gone if unit in self.names]

    @rule(reference=consumes(references))
    def give_back(self, reference: tuple[str, int]) -> None:
        owner, unit = reference
        if not self.model[reference]:
            with pytest.raises(ValueError, match="gives back"):
                self.pages.give_back([unit], owner)
            return
        self.pages.give_back([unit], owner)
        self.model[reference] -= 1
        self._note_idle([unit])

    @rule(owner=st.sampled_from("abc"))
    def give_back_all(self, owner: str) -> None:
        before = set(self.idle)
        self.pages.give_back_all(owner)
        mine = [key for key, n in self.model.items() if key[0] == owner and n]
        for key in [key for key in self.model if key[0] == owner]:
            del self.model[key]
        self._note_idle([unit for _, unit in mine])
        # Which of them goes first is the allocator's to say; that they go behind those that were idle before is not.
        assert set(self.idle) >= before
        self.idle = list(self.pages._idle)
        assert self.idle[: len(before)] == [unit for unit in self.idle if unit in before]

    @invariant()
    def counts_agree(self) -> None:
        totals: Counter[int] = Counter()
        for (_, unit), n in self.model.items():
            totals[unit] += n
        assert [self.pages.num_references(unit) for unit in range(8)] == [totals[unit] for unit in range(8)]
        assert self.pages.free + self.pages.held == self.pages.total == 8
        assert self.pages.held == sum(n > 0 for n in totals.values())


TestAllocatorRules = AllocatorRules.TestCase
