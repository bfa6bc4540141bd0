"""What the gateway thinks lies where, and what it makes of that."""

from collections import Counter
from dataclasses import replace

import pytest

from services.gateway.prefixes import STORES, Beginning, Prefixes
from services.gateway.router import DefaultPolicy, Demand, Fleet
from services.gateway.workers import Worker
from tests.unit.gateway.reports import AUTO, report

BLOCK = 8
TOKENS = list(range(100))


def worker(role: str, name: str, free: int = 100, **more: object) -> Worker:
    return Worker(report(role, name, free, **{"block_tokens": BLOCK, **more}), 0.0)


def holding(demand: Demand, near: int = 0, **held: int) -> Demand:
    return replace(demand, held={f"{name}-b0": tokens for name, tokens in held.items()}, near=near)


def keys_of(prefixes: Prefixes, salt: str, tokens: list[int]) -> tuple[bytes, ...]:
    chain = prefixes.chain(salt)
    chain.extend(tokens)
    return chain.keys


def chosen(demand: Demand, *workers: Worker) -> tuple[str, str | None]:
    prefills = [w for w in workers if w.report.role == "prefill"]
    decodes = [w for w in workers if w.report.role == "decode"]
    route = DefaultPolicy().choose(demand, Fleet(prefills, decodes))
    assert route is not None
    return route.decode.report.id, route.prefill and route.prefill.report.id


def test_the_longest_beginning_of_each_worker_is_known() -> None:
    prefixes = Prefixes(BLOCK)
    prefixes.note("p", keys_of(prefixes, "us", TOKENS[:30]))
    prefixes.note("d", keys_of(prefixes, "us", TOKENS))
    assert prefixes.held(keys_of(prefixes, "us", TOKENS[:50])) == {"p": 24, "d": 48}
    assert prefixes.held(keys_of(prefixes, "us", [*TOKENS[:20], 1, 2, 3, 4, 5, 6])) == {"p": 16, "d": 16}
    assert prefixes.held(keys_of(prefixes, "them", TOKENS)) == {}
    assert prefixes.held(keys_of(prefixes, "us", TOKENS[:7])) == {}


def test_what_lies_behind_a_gap_does_not_count() -> None:
    prefixes = Prefixes(BLOCK)
    keys = keys_of(prefixes, "us", TOKENS)
    prefixes.note("d", (*keys[:2], *keys[3:]))
    assert prefixes.held(keys) == {"d": 16}


def test_a_worker_that_is_gone_or_has_less_is_not_thought_of() -> None:
    prefixes = Prefixes(BLOCK)
    keys = keys_of(prefixes, "us", TOKENS)
    for peer in ("d-one", "e-one"):
        prefixes.note(peer, keys)
    prefixes.forget("d-one")
    assert prefixes.held(keys) == {"e-one": 96}
    prefixes.correct("e-one", keys)
    assert (prefixes.held(keys), len(prefixes)) == ({}, 0)


def test_what_nobody_asked_about_goes_first_and_ends_before_beginnings() -> None:
    prefixes = Prefixes(BLOCK, most_blocks=6)
    old, new = keys_of(prefixes, "us", TOKENS[:24]), keys_of(prefixes, "them", TOKENS[:32])
    prefixes.note("d", old)
    prefixes.note("d", new)
    assert (len(prefixes), prefixes.held(old), prefixes.held(new)) == (6, {"d": 16}, {"d": 32})
    prefixes.held(old)
    prefixes.note("d", keys_of(prefixes, "others", TOKENS[:8]))
    assert prefixes.held(old) == {"d": 16}
    assert prefixes.held(new) == {"d": 24}


def beginning(prefixes: Prefixes, tokens: list[int], *, is_there: bool = True) -> Beginning:
    begun = Beginning(prefixes, "us", lambda peer: is_there)
    begun.grow(tokens)
    return begun


@pytest.mark.parametrize(("blocks", "held"), [(BLOCK, 16), (2 * BLOCK, 0), (None, 0)])
def test_workers_that_find_nothing_again_or_by_other_blocks_hold_nothing(blocks: int | None, held: int) -> None:
    begun = beginning(Prefixes(BLOCK), TOKENS[:20])
    begun.sent(worker("decode", "d0", block_tokens=blocks), worker("prefill", "p0"))
    assert begun.held().get("d0-b0", 0) == held
    assert begun.held()["p0-b0"] == 16
    begun.gone("d0-b0")
    assert begun.held() == {"p0-b0": 16}


def test_a_worker_that_died_meanwhile_is_not_noted() -> None:
    begun = beginning(Prefixes(BLOCK), TOKENS[:20], is_there=False)
    begun.sent(worker("decode", "d0"))
    assert begun.held() == {}


def test_the_block_of_the_last_position_cannot_be_had() -> None:
    """A worker finds whole blocks, and never all of a prompt."""
    prefixes = Prefixes(BLOCK)
    beginning(prefixes, TOKENS).sent(worker("decode", "d0"))
    assert [beginning(prefixes, TOKENS[:n]).held() for n in (8, 9, 16, 17)] == [
        {"d0-b0": 0},
        {"d0-b0": 8},
        {"d0-b0": 8},
        {"d0-b0": 16},
    ]


def test_an_answer_that_has_grown_is_its_decode_workers() -> None:
    prefixes = Prefixes(BLOCK)
    begun = beginning(prefixes, TOKENS[:20])
    begun.sent(worker("decode", "d0"), worker("prefill", "p0"))
    begun.grow(TOKENS[:60])
    begun.sent(worker("decode", "d0"))
    begun.kept(35)
    assert beginning(prefixes, TOKENS[:70]).held() == {"p0-b0": 16, "d0-b0": 56, STORES: 32}


def test_a_beginning_outweighs_one_prompt_ahead_and_no_more() -> None:
    """However many ask for it, the load stays even."""
    workers = [worker("prefill", f"p{k}") for k in range(4)]
    decode = worker("decode", "d0")
    demand = holding(AUTO, p2=144)
    counts: Counter[str | None] = Counter()
    for room in range(24):
        name = chosen(demand, *workers, decode)[1]
        counts[name] += 1
        next(w for w in workers if w.report.id == name).pending[room] = 1
    assert counts["p2"] in (6, 7)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_decode_worker_with_most_of_the_prompt_is_chosen_while_it_has_room_enough() -> None:
    prefill, holds = worker("prefill", "p0"), holding(AUTO, d1=64, d2=96)
    for free, name in (((90, 60, 50), "d2"), ((90, 60, 40), "d1"), ((90, 44, 40), "d0")):
        decodes = [worker("decode", f"d{k}", pages) for k, pages in enumerate(free)]
        assert chosen(holds, prefill, *decodes)[0] == name


def test_little_of_a_prompt_counts_for_nothing() -> None:
    prefill, decodes = worker("prefill", "p0"), [worker("decode", "d0", 90), worker("decode", "d1", 60)]
    assert chosen(holding(AUTO, d1=39), prefill, *decodes)[0] == "d0"
    assert chosen(holding(AUTO, d1=40), prefill, *decodes)[0] == "d1"


def test_a_beginning_that_all_have_in_common_goes_round() -> None:
    """Those who hold it have no more under way than a quarter above the mean, and one; the others get it so."""
    workers = [worker("prefill", "p0"), *(worker("decode", f"d{k}") for k in range(3))]
    demand = holding(AUTO, near=40, d1=128)
    ways: Counter[tuple[str, str | None]] = Counter()
    for room in range(20):
        way = chosen(demand, *workers)
        ways[way] += 1
        next(w for w in workers if w.report.id == way[0]).pending[room] = 1
        if way[1] is None:  # nothing of it is free again
            continue
        demand = replace(demand, held={**demand.held, f"{way[0]}-b0": 128})
    assert {way[0] for way in ways} == {"d0", "d1", "d2"}
    by_decode = [sum(count for way, count in ways.items() if way[0] == f"d{k}") for k in range(3)]
    assert max(by_decode) - min(by_decode) <= 4


@pytest.mark.parametrize(("prompt_len", "near", "least"), [(160, 32, 128), (30, 64, 0)])
def test_what_it_must_have_is_never_less_than_nothing(prompt_len: int, near: int, least: int) -> None:
    demand = holding(replace(AUTO, prompt_len=prompt_len), near=near, d0=128)
    route = DefaultPolicy().choose(demand, Fleet([worker("prefill", "p0")], [worker("decode", "d0")]))
    assert route is not None
    assert (route.prefill, route.held_least) == (None, least)


def test_what_a_decode_worker_nearly_has_it_computes_itself() -> None:
    prefill, decode, other = worker("prefill", "p0"), worker("decode", "d0", 50), worker("decode", "d1")
    near = holding(AUTO, near=32, d0=128)
    assert chosen(near, prefill, decode, other) == ("d0", None)
    assert chosen(holding(AUTO, near=31, d0=128), prefill, decode, other) == ("d0", "p0")
    for refused in (replace(near, strict=True), replace(near, path="remote")):
        assert chosen(refused, prefill, decode, other) == ("d0", "p0")
    assert chosen(replace(near, avoid=frozenset({"d0-b0"})), prefill, decode, other) == ("d1", "p0")
    full = worker("decode", "d0", 5)
    assert chosen(near, prefill, full, other) == ("d1", "p0")


def test_a_short_prompt_that_nobody_has_is_not_near() -> None:
    short = replace(AUTO, prompt_len=20, near=64)
    assert chosen(short, worker("prefill", "p0"), worker("decode", "d0")) == ("d0", "p0")
