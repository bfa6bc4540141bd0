"""Subjects: one scheme, checked parts, and patterns that catch what they should."""

import itertools

import pytest

from shared.bus.patterns import check_pattern, check_subject, matches
from shared.protocol import subjects


@pytest.mark.parametrize(("role", "verb"), list(itertools.product(subjects.ROLES, subjects.VERBS)))
def test_every_role_and_verb_make_a_subject(role: str, verb: str) -> None:
    subject = subjects.subject(role, "w0-aaaa0001", verb)
    assert subject == f"baton.v1.{role}.w0-aaaa0001.{verb}"
    check_subject(subject)
    assert matches(subjects.all_heartbeats(), subject) == (verb == subjects.HEARTBEAT)


@pytest.mark.parametrize(
    ("role", "peer", "verb"),
    [
        ("decode", "w0-1", "explode"),
        ("cook", "w0-1", "reserve"),
        ("decode", "", "reserve"),
        ("decode", "*", "reserve"),
        ("decode", ">", "reserve"),
        ("decode", "a.b", "reserve"),
        ("decode", "a b", "reserve"),
        ("decode", "w0-1\n", "reserve"),
        ("decode", "W0-1", "reserve"),
        ("decode", "x" * 65, "reserve"),
    ],
)
def test_other_parts_are_refused(role: str, peer: str, verb: str) -> None:
    with pytest.raises(ValueError, match=r"no such subject|not the name of a peer"):
        subjects.subject(role, peer, verb)


def test_incarnations_do_not_share_subjects() -> None:
    old, new = (subjects.subject("decode", f"d0-{boot}", "commit") for boot in ("aaaa0001", "aaaa0002"))
    assert not matches(old, new)


def test_hello_and_heartbeats_can_be_used() -> None:
    check_pattern(subjects.all_heartbeats())
    check_subject(subjects.hello())
    assert not matches(subjects.all_heartbeats(), subjects.hello())
