"""Ids and texts that another implementation made from the same model file."""

from typing import Any

from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import TextModel


def test_chat_prompts_are_token_for_token_those_of_the_reference(smollm2: TextModel, golden: dict[str, Any]) -> None:
    assert len(golden["chat"]) == 5
    for case in golden["chat"]:
        assert smollm2.apply_chat_template([{"role": "user", "content": case["user"]}]) == case["prompt_ids"]


def test_outputs_read_as_in_the_reference(smollm2: TextModel, golden: dict[str, Any]) -> None:
    for case in [*golden["chat"], *golden["text"]]:
        assert smollm2.decode(case["output_ids"]) == case["output_text"]
    for case in golden["text"]:
        assert smollm2.decode(case["output_ids"], skip_special=True) == case["output_text_plain"]


def test_streamed_outputs_read_as_in_the_reference(smollm2: TextModel, golden: dict[str, Any]) -> None:
    assert len(golden["text"]) == 19
    for case in golden["text"]:
        for skip_special, text in ((False, case["output_text"]), (True, case["output_text_plain"])):
            detokenizer = Detokenizer(smollm2, skip_special)
            streamed = [detokenizer.push([token]) for token in case["output_ids"]]
            assert "".join(streamed) + detokenizer.finish() == text
            assert "\ufffd" not in "".join(streamed)


def test_special_ids_of_the_model(smollm2: TextModel) -> None:
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.vocab_size == 49152
    assert smollm2.vocabulary.special == frozenset(range(17))
    assert smollm2.encode("Hi", add_special=True) == smollm2.encode("Hi", add_special=False)


def test_digits_are_single_tokens(smollm2: TextModel) -> None:
    ids = smollm2.encode("in 2024, 1234567", add_special=False)
    assert [smollm2.token_text(i) for i in ids] == ["in", " ", *"2024", ",", " ", *"1234567"]
