"""Circuit breakers: open after failures of their leg, open longer each time, half-open for one request, closed by a
success. Whose fault something is, and whose it never is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.breaker import Breakers, BreakerSettings, Health, blamed, usable
from shared.runtime import errors

LEG = ("d0-b0", "decode")
OTHER = ("d1-b0", "decode")
SETTINGS = BreakerSettings(in_a_row=3, latest=8, at_least=6, open_s=1.0, max_open_s=5.0)
LEGS = {"decode": "d0-b0", "prefill": "p0-b0"}


def breakers(failures: int = 0, now: float = 0.0) -> Breakers:
    made = Breakers(SETTINGS)
    for _ in range(failures):
        made.failed(LEG, now, began_at=now)
    return made


def test_it_opens_after_failures_in_a_row_and_lets_one_through_when_its_time_is_over() -> None:
    some = breakers(failures=2)
    assert some.shut(0.0) == {}
    some.failed(LEG, 0.0, began_at=0.0)
    assert list(some.shut(0.9)) == [LEG]
    assert some.report(0.9) == {LEG: Health.OPEN}
    assert some.shut(1.0) == {}
    assert some.report(1.0) == {LEG: Health.HALF_OPEN}
    some.began(LEG, room=7, now=1.0)
    assert list(some.shut(1.0)) == [LEG], "one at a time"
    some.began(LEG, room=8, now=1.0)
    some.released(LEG, room=8)
    assert list(some.shut(1.0)) == [LEG], "only the probe's own end makes way for another"
    some.released(LEG, room=7)
    assert some.shut(1.0) == {}, "it was cancelled or refused: that says nothing"
    some.began(LEG, room=9, now=1.1)
    some.succeeded(LEG)
    assert some.report(1.1) == {}


def test_each_time_in_a_row_it_stays_open_twice_as_long_up_to_a_limit() -> None:
    some = breakers(failures=3)
    now, lengths = 0.0, []
    for _ in range(5):
        (remaining,) = [left for _, left in some.shut(now).values()]
        lengths.append(remaining)
        now += remaining
        some.began(LEG, room=1, now=now)
        some.failed(LEG, now, began_at=now)
        some.released(LEG, room=1)
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert some.num_opened == 6
    for _ in range(3):
        some.succeeded(LEG)
    for _ in range(3):
        some.failed(LEG, now, began_at=now)
    assert [left for _, left in some.shut(now).values()] == [1.0], "what has worked for a while starts anew"


def test_what_takes_requests_on_and_fails_them_later_is_left_alone_longer_each_time() -> None:
    """A hand-over that worked counts as a success, and the stream fails afterwards."""
    some, now, failed = breakers(), 0.0, 0
    while now < 60:
        if not some.shut(now):
            some.began(LEG, room=1, now=now)
            some.succeeded(LEG)
            some.failed(LEG, now, began_at=now)
            some.released(LEG, room=1)
            failed += 1
        now += 0.1
    assert failed < 60


def test_what_began_before_it_opened_says_nothing_new() -> None:
    some = breakers(failures=3, now=10.0)
    for _ in range(20):
        some.failed(LEG, 11.5, began_at=9.0)
    assert some.report(11.5) == {LEG: Health.HALF_OPEN}
    some.failed(LEG, 11.5, began_at=11.2)
    assert some.report(11.5) == {LEG: Health.OPEN}


def test_half_of_the_latest_outcomes_are_enough() -> None:
    some = breakers()
    for _ in range(3):
        assert some.report(0.0) == {}
        some.failed(LEG, 0.0, began_at=0.0)
        some.succeeded(LEG)
    assert some.report(0.0) == {}
    some.failed(LEG, 0.0, began_at=0.0)
    assert some.report(0.0) == {LEG: Health.OPEN}


def test_one_failure_now_and_then_is_forgotten() -> None:
    some = breakers()
    for _ in range(50):
        some.failed(LEG, 0.0, began_at=0.0)
        for _ in range(8):
            some.succeeded(LEG)
    assert some.num_opened == 0
    assert len(some) == 0, "a leg that works has no entry"


def test_a_restart_is_a_new_peer_and_starts_closed() -> None:
    some = breakers(failures=3)
    assert usable(["d0-b1"], "decode", some.shut(0.0), str) == ["d0-b1"]
    some.forget("d0-b0")
    assert len(some) == 0


def test_a_leg_is_judged_alone() -> None:
    some = breakers(failures=3)
    assert usable(["d0-b0", "d1-b0"], "decode", some.shut(0.0), str) == ["d1-b0"]
    assert usable(["d0-b0", "d1-b0"], "local", some.shut(0.0), str) == ["d0-b0", "d1-b0"]


def test_where_all_are_open_the_least_bad_is_used() -> None:
    some = breakers(failures=3)
    for _ in range(3):
        some.failed(OTHER, 0.5, began_at=0.5)
    assert usable(["d1-b0", "d0-b0"], "decode", some.shut(0.5), str) == ["d0-b0"], "its time is over first"
    some.failed(LEG, 1.2, began_at=1.2)
    assert usable(["d1-b0", "d0-b0"], "decode", some.shut(1.3), str) == ["d1-b0"], "it opened less often"
    assert usable([], "decode", some.shut(1.3), str) == []


@pytest.mark.parametrize(
    ("error", "by", "peers"),
    [
        (errors.PeerLost, "prefill", ["p0-b0"]),
        (errors.EngineError, "decode", ["d0-b0"]),
        (errors.BatonError, "decode", ["d0-b0"]),
        (errors.ProtocolError, "prefill", ["p0-b0"]),
        (errors.Corrupt, "decode", ["d0-b0", "p0-b0"]),
        (errors.TransferTimeout, "prefill", ["d0-b0", "p0-b0"]),
        (errors.TransferRefused, "prefill", ["d0-b0", "p0-b0"]),
        (errors.EngineError, "", []),
        (errors.PeerLost, "gateway", []),
        (errors.InvalidRequest, "decode", []),
        (errors.PoolExhausted, "decode", []),
        (errors.TicketDenied, "prefill", []),
        (errors.Cancelled, "decode", []),
        (errors.DeadlineExceeded, "decode", []),
        (errors.DeadRoom, "prefill", []),
        (errors.IdentityMismatch, "prefill", []),
        (errors.GeometryMismatch, "prefill", []),
    ],
)
def test_whose_fault_it_is(error: type[errors.BatonError], by: str, peers: list[str]) -> None:
    assert sorted(blamed(error.code, by, LEGS)) == peers


@given(st.lists(st.sampled_from(["fail", "ok", "begin", "end", "wait"]), max_size=60))
def test_whatever_happens_it_is_never_shut_for_longer_than_the_limit(story: list[str]) -> None:
    some, now, room = breakers(), 0.0, 0
    for event in story:
        if event == "wait":
            now += 0.7
        elif event == "begin":
            room += 1
            some.began(LEG, room, now)
        elif event == "end":
            some.released(LEG, room)
        elif event == "ok":
            some.succeeded(LEG)
            assert some.shut(now) == {}
        else:
            some.failed(LEG, now, began_at=now)
        assert all(left <= SETTINGS.max_open_s for _, left in some.shut(now).values())
    for number in range(room + 1):
        some.released(LEG, number)
    assert some.shut(now + SETTINGS.max_open_s) == {}


def test_their_number_is_bounded() -> None:
    some = breakers()
    for number in range(3000):
        some.failed((f"d{number}", "decode"), 0.0, began_at=0.0)
    assert len(some) <= 1024
