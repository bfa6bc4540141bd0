"""Identifiers are in range, distinct, and safe inside a subject."""

import re

import pytest

from shared.bus.patterns import check_subject
from shared.runtime import ids


def test_rooms_are_63_bits_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = [ids.new_room() for _ in range(1000)]
    assert len(set(rooms)) == 1000
    assert all(0 < room < 1 << 63 for room in rooms)
    assert max(rooms) > 1 << 61
    bounds: list[int] = []
    monkeypatch.setattr(ids.secrets, "randbelow", lambda bound: bounds.append(bound) or 0)
    assert ids.new_room() == 1
    monkeypatch.setattr(ids.secrets, "randbelow", lambda bound: bound - 1)
    assert ids.new_room() == (1 << 63) - 1


def test_seeds_are_63_bits() -> None:
    assert all(0 <= ids.new_seed() < 1 << 63 for _ in range(100))


@pytest.mark.parametrize(
    ("make", "form"),
    [(ids.new_boot_id, r"[0-9a-f]{8}"), (ids.new_request_id, r"req-[0-9a-f]{32}")],
)
def test_names_are_distinct_and_of_a_fixed_form(make: type, form: str) -> None:
    made = [make() for _ in range(200)]
    assert len(set(made)) == 200
    assert all(re.fullmatch(form, name) for name in made)


def test_a_peer_is_a_name_and_an_incarnation() -> None:
    peer = ids.peer_name("decode-0", ids.new_boot_id())
    assert peer.startswith("decode-0-")
    check_subject(peer)
    assert ids.peer_name("x" * 55, "12345678") == "x" * 55 + "-12345678"


@pytest.mark.parametrize("worker", ["a.b", "a b", "D0", "*", ">", "é", "a\n", "x" * 60])
def test_names_that_would_break_a_subject_are_refused(worker: str) -> None:
    with pytest.raises(ValueError, match="may hold only"):
        ids.peer_name(worker, "aaaa0001")


def test_a_boot_id_cannot_break_a_subject_either() -> None:
    with pytest.raises(ValueError, match="may hold only"):
        ids.peer_name("d0", "aaaa0001\n")
