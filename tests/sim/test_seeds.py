"""A short run of the simulation (`make sim` is the long one), and what makes its word worth something: a seed repeats
exactly, and with any one protection taken away it finds a violation."""

import pytest

from shared.runtime.mode import Mode
from tests.sim.simulation import run_seed
from tests.sim.table import FAULTS, PAIRS, STATES, impossible

_A_GROUP = 6


@pytest.mark.parametrize("first", range(0, 60, _A_GROUP))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + _A_GROUP):
        result = run_seed(seed)
        assert result.violation is None, f"seed {seed}: {result.violation}; python -m tests.sim --seed {seed}"
        assert sum(result.outcomes.values()) >= 20


@pytest.mark.parametrize("mode", ["colocated", "chunked"])
def test_no_seed_breaks_an_invariant_without_prefill_workers(mode: Mode) -> None:
    paths = 0
    for seed in range(_A_GROUP):
        result = run_seed(seed, mode)
        assert result.violation is None, f"{result.violation}; python -m tests.sim --seed {seed} --mode {mode}"
        assert sum(result.outcomes.values()) >= 20
        paths += sum(count for (_, role, _), count in result.hits.items() if role == "prefill")
    assert paths == 0, "a prefill worker had a part in it"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_repeats_exactly(seed: int) -> None:
    first = run_seed(seed)
    run_seed(seed + 100)
    again = run_seed(seed)
    assert again.num_events == first.num_events > 500
    assert again.trace == first.trace
    assert (again.outcomes, again.hits) == (first.outcomes, first.hits)
    assert run_seed(seed + 3).trace != first.trace


def test_every_pair_of_a_fault_and_a_state_is_aimed_at_or_has_a_reason_why_it_cannot_be() -> None:
    assert {state for state, _ in STATES} == {"gateway", "prefill", "decode"}
    for fault in FAULTS:
        for role, state in STATES:
            assert ((fault, (role, state)) in PAIRS) == (impossible(fault, role, state) is None)
    assert len(PAIRS) > 300
