"""What the client has decides what the next attempt is asked for, and how much room it needs."""

from itertools import count

import pytest

from services.gateway.attempt import Attempt, orders_of
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.history import History
from services.gateway.inbox import Inbox
from services.gateway.router import Demand, Route, pages_wanted
from services.gateway.workers import Worker
from shared.machines import request as machine
from shared.protocol.messages import FinishReason, Prefill, Reserve, SamplingSpec
from shared.runtime.counters import Counters
from tests.unit.gateway.reports import report

PROMPT = (1, 2, 3)
DECODE, PREFILL = (Worker(report(role, role[0]), 0.0) for role in ("decode", "prefill"))


def history(*choices: str) -> History:
    """Of each choice its tokens as letters; a full stop ends it."""
    made = History.empty(len(choices))
    for choice, letters in enumerate(choices):
        whole = letters.rstrip(".")
        for index, letter in zip(count(), whole, strict=False):
            ends = index == len(whole) - 1 and letters.endswith(".")
            made.add([TokenEvent(choice, index, ord(letter), finish=FinishReason.STOP if ends else None)])
    return made


def asked(told: History, prefill: Worker | None = PREFILL) -> list[Reserve | Prefill]:
    sampling = SamplingSpec(n=len(told.tokens), seed=9, max_tokens=50)
    attempt = Attempt(machine.Attempt(5, 2), Inbox(Counters()).open(5, 2, told), told, 0.0, 3)
    request = GenerationRequest("req", PROMPT, sampling)
    orders = orders_of(request, attempt, Route(DECODE, prefill), "gateway", 10.0, 3.0)
    assert {order.message.sampling for order in orders} == {sampling}  # type: ignore[attr-defined]
    return [order.message for order in orders]  # type: ignore[misc]


def ids(letters: str) -> tuple[int, ...]:
    return tuple(map(ord, letters))


def test_a_new_request_has_no_history() -> None:
    reserve, prefill = asked(History.empty(2))
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    assert (reserve.history, reserve.finished, reserve.prompt) == ((), (), PROMPT)
    assert (prefill.prompt, prefill.resumed) == (PROMPT, False)


@pytest.mark.parametrize(("letters", "computed"), [("a", ""), ("abc", "ab")])
def test_of_one_choice_p_computes_all_but_the_last_token(letters: str, computed: str) -> None:
    reserve, prefill = asked(history(letters))
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    assert (reserve.history, reserve.finished, reserve.prompt) == ((ids(letters),), (), PROMPT)
    assert (prefill.prompt, prefill.resumed) == (PROMPT + ids(computed), True)


def test_of_several_p_computes_the_prompt_and_d_learns_which_are_over() -> None:
    told = history("abc", "de.", "", "fghij")
    told.over[3] = True  # by a stop string
    reserve, prefill = asked(told)
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    assert reserve.history == (ids("abc"), ids("de"), (), ids("fghij"))
    assert reserve.finished == (1, 3)
    assert (prefill.prompt, prefill.resumed) == (PROMPT, True)


def test_where_d_computes_the_prompt_it_alone_is_asked() -> None:
    (reserve,) = asked(history("abc"), prefill=None)
    assert isinstance(reserve, Reserve)
    assert (reserve.prefill, reserve.prompt, reserve.history) == (None, PROMPT, (ids("abc"),))


@pytest.mark.parametrize(
    ("choices", "pages"),
    [
        (("",), (1, 1 + 1)),
        (("",) * 3, (1, 1 + 3)),
        (("x" * 30,), (2, 2 + 1)),  # 32 positions of 16 a page
        (("x" * 30, "x", "x."), (1, 1 + 2 + 1)),
    ],
)
def test_room_is_wanted_for_what_is_there_already(choices: tuple[str, ...], pages: tuple[int, int]) -> None:
    told = history(*choices)
    caught_up = told.caught_up()
    demand = Demand(
        prompt_len=len(told.prefix(PROMPT)),
        num_choices=len(caught_up),
        path="auto",
        strict=False,
        caught_up=caught_up,
    )
    assert (pages_wanted(PREFILL, demand), pages_wanted(DECODE, demand)) == pages
