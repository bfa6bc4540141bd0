import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.text.stops import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("ab\n", max_size=6), max_size=12)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, the longest of those that end there."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(((start, end) for end, start in found), key=lambda span: (span[1], span[0])) if found else None


@given(STOPS, PIECES, st.booleans())
@example(["abab", "bb"], ["aba", "bb"], False)
@example(["aab"], ["aa", "ab"], False)
@example(["abaabb"], ["abaab", "aabb"], False)
@example(["ab", "aab", "b"], ["aa", "b"], True)
def test_pieces_give_what_the_joined_text_gives(stops: list[str], pieces: list[str], include_stop: bool) -> None:
    text = "".join(pieces)
    span = first_stop(text, stops)
    matcher = StopMatcher(stops, include_stop)
    emitted = ""
    for position, piece in enumerate(pieces):
        new, stopped = matcher.push(piece)
        emitted += new
        seen = "".join(pieces[: position + 1])
        assert stopped == (first_stop(seen, stops) is not None)
        if not stopped and not include_stop:
            held = next(k for k in range(len(seen), -1, -1) if k == 0 or any(s[:k] == seen[-k:] for s in stops))
            assert emitted == seen[: len(seen) - held], "exactly what may still become a stop is held back"
    emitted += matcher.finish()
    if span is None:
        assert emitted == text
    else:
        assert emitted == text[: span[1] if include_stop else span[0]]
    assert matcher.stopped == (span is not None)


def test_stop_inside_the_first_piece() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("before END after") == ("before ", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_stop_across_pieces_and_a_false_start() -> None:
    matcher = StopMatcher(("</answer>",))
    assert matcher.push("1 < 2 <") == ("1 < 2 ", False)
    assert matcher.push("/ans") == ("", False)
    assert matcher.push("!") == ("</ans!", False)
    assert matcher.push("</answer") == ("", False)
    assert matcher.push(">tail") == ("", True)


def test_what_was_held_back_comes_at_the_end() -> None:
    matcher = StopMatcher(("\n\n",))
    assert matcher.push("line\n") == ("line", False)
    assert matcher.finish() == "\n"
    assert matcher.finish() == ""


def test_a_shorter_stop_inside_a_longer_one_wins_by_being_complete() -> None:
    assert StopMatcher(("abcd", "bc")).push("xabcd") == ("xa", True)
    assert StopMatcher(("abcd", "bc"), include_stop=True).push("xabcd") == ("xabc", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))
