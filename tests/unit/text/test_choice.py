from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.choice import ChoiceText
from shared.text.tokenizer import TextModel

LINE = "One two\n\nUser: 🦜 three"


def test_no_stop_gives_all_the_text_and_an_offset_for_each_token(smollm2: TextModel) -> None:
    ids = smollm2.encode(LINE, add_special=False)
    choice = ChoiceText(smollm2)
    delta = choice.push(ids)
    assert delta.text + choice.finish().text == LINE
    assert not choice.stopped
    assert choice.num_tokens == len(ids) == len(delta.offsets)
    for token, offset in zip(ids, delta.offsets, strict=True):
        text = smollm2.token_text(token)
        if "\ufffd" in text:
            assert LINE[offset] == "🦜" or LINE[offset : offset + 2] == " 🦜"
        else:
            assert LINE.startswith(text, offset)


def test_tokens_count_up_to_the_one_that_completes_the_stop(smollm2: TextModel) -> None:
    ids = smollm2.encode(LINE, add_special=False)
    lengths = list(accumulate(len(smollm2.token_bytes(i)) for i in ids))
    needed = 1 + next(k for k, length in enumerate(lengths) if length >= len("One two\n\nUser:"))
    assert needed < len(ids)
    for batch in (1, 2, len(ids)):
        choice = ChoiceText(smollm2, ("\n\nUser:",))
        deltas = [choice.push(ids[at : at + batch]) for at in range(0, len(ids), batch)]
        assert "".join(delta.text for delta in deltas) + choice.finish().text == "One two"
        assert choice.stopped
        assert choice.num_tokens == needed == sum(len(delta.offsets) for delta in deltas)


def test_stop_in_the_first_token(smollm2: TextModel) -> None:
    choice = ChoiceText(smollm2, ("The",))
    delta = choice.push([504])
    assert (delta.text, delta.stopped, delta.offsets) == ("", True, (0,))
    assert choice.num_tokens == 1
    assert choice.push([504]).offsets == ()
    assert choice.num_tokens == 1
    assert choice.finish() == choice.finish()
    assert choice.finish().stopped


def test_include_stop_keeps_it(smollm2: TextModel) -> None:
    choice = ChoiceText(smollm2, ("two",), include_stop=True)
    assert choice.push(smollm2.encode("One two three", add_special=False)).text == "One two"


def test_the_token_that_ends_the_choice_counts_but_is_not_shown(smollm2: TextModel) -> None:
    for skip_special in (True, False):
        choice = ChoiceText(smollm2, skip_special=skip_special)
        delta = choice.push([504, 2], hide_last=True)
        assert (delta.text, delta.offsets) == ("The", (0, 3))
        assert choice.finish().text == ""
        assert choice.num_tokens == 2
    assert ChoiceText(smollm2, skip_special=False).push([504, 2]).text == "The<|im_end|>"


def test_an_unfinished_character_and_held_text_come_at_the_end(smollm2: TextModel) -> None:
    ids = smollm2.encode("ok\n🦜", add_special=False)[:-1]
    choice = ChoiceText(smollm2, ("\n🦜!",))
    assert choice.push(ids).text == "ok"
    rest = choice.finish().text
    assert rest.startswith("\n\ufffd")
    assert choice.finish().text == ""


@settings(deadline=None, max_examples=80)
@given(
    st.text(st.sampled_from("ab \n🦜é1"), max_size=30), st.lists(st.text("ab\n🦜", min_size=1, max_size=3), max_size=3)
)
def test_batches_do_not_matter(smollm2: TextModel, text: str, stops: list[str]) -> None:
    ids = smollm2.encode(text, add_special=False)
    results = set()
    for batch in (1, 3, max(1, len(ids))):
        choice = ChoiceText(smollm2, stops)
        deltas = [choice.push(ids[at : at + batch]) for at in range(0, len(ids), batch)]
        shown = "".join(delta.text for delta in deltas) + choice.finish().text
        results.add((shown, choice.stopped, choice.num_tokens, tuple(o for d in deltas for o in d.offsets)))
    assert len(results) == 1
    shown, stopped, _, _ = results.pop()
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert stopped or shown == text
