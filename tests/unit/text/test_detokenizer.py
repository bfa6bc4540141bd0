import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import TextModel

# Without what SmolLM2's vocabulary has no bytes for.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d").filter(
    lambda char: not 0x40000 <= ord(char) < 0xC0000
)
UNICODE = st.text(CHARACTERS, max_size=30)
PARTS = "a🦜b 👩\u200d👩\u200d👧 日本 ﷽ é"


def pieces(model: TextModel, batches: list[list[int]], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(model, skip_special)
    return [*(detokenizer.push(batch) for batch in batches), detokenizer.finish()]


@settings(deadline=None, max_examples=100)
@given(UNICODE, st.data())
def test_text_in_pieces_is_the_text(smollm2: TextModel, text: str, data: st.DataObject) -> None:
    ids = smollm2.encode(text, add_special=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    edges = [0, *cuts, len(ids)]
    batches = [ids[a:b] for a, b in pairwise(edges)]
    streamed = pieces(smollm2, batches, skip_special=False)
    assert "".join(streamed) == text
    assert text.startswith("".join(streamed[: len(streamed) // 2]))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_any_ids_read_as_in_the_whole(smollm2: TextModel, ids: list[int], skip_special: bool) -> None:
    whole = smollm2.decode(ids, skip_special=skip_special)
    assert "".join(pieces(smollm2, [[i] for i in ids], skip_special)) == whole
    for cut in range(len(ids) + 1):
        assert "".join(pieces(smollm2, [ids[:cut], ids[cut:]], skip_special)) == whole


def test_a_character_comes_whole_or_not_at_all(smollm2: TextModel) -> None:
    ids = smollm2.encode(PARTS, add_special=False)
    detokenizer = Detokenizer(smollm2)
    streamed = [detokenizer.push([i]) for i in ids]
    assert "" in streamed
    assert not any("\ufffd" in piece for piece in streamed)
    assert "".join(streamed) == PARTS
    assert detokenizer.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only(smollm2: TextModel) -> None:
    ids = smollm2.encode("ok 🦜", add_special=False)
    detokenizer = Detokenizer(smollm2)
    assert "".join(detokenizer.push([i]) for i in ids[:-1]).strip() == "ok"
    assert re.fullmatch("\ufffd+", detokenizer.finish())
    assert detokenizer.finish() == ""


def test_control_tokens_in_the_middle(smollm2: TextModel) -> None:
    bird = smollm2.encode("🦜", add_special=False)
    ids = [504, 2, *bird[:1], 0, *bird[1:], 1]
    assert "".join(pieces(smollm2, [[i] for i in ids])) == "The🦜"
    assert "".join(pieces(smollm2, [[i] for i in ids], skip_special=False)).startswith(
        "The<|im_end|>\ufffd<|endoftext|>"
    )


@pytest.mark.parametrize("first", ["Hello", " Hello", "  Hello"])
def test_a_continuation_keeps_its_leading_space(smollm2: TextModel, spm_model: TextModel, first: str) -> None:
    ids = smollm2.encode(first, add_special=False)
    assert "".join(pieces(smollm2, [ids])) == first
    ids = spm_model.encode(first, add_special=False)
    assert spm_model.decode(ids) == first
    assert "".join(pieces(spm_model, [ids])) == f" {first}"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 699), max_size=30))
@example([272])
def test_byte_fallback_tokens_in_pieces(spm_model: TextModel, ids: list[int]) -> None:
    whole = "".join(pieces(spm_model, [ids], skip_special=False))
    assert "".join(pieces(spm_model, [[i] for i in ids], skip_special=False)) == whole
    assert spm_model.decode(ids) == whole.removeprefix(" ")
