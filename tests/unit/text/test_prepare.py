import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.text.files import TextSettings
from shared.text.gguf_tokenizer import GgufVocabulary, UnsupportedTokenizer
from shared.text.prepare import write_text_files
from shared.text.tokenizer import TextModel

WriteGguf = Callable[[Path, dict[str, Any]], Path]
BYTES = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
BYTES += [chr(0x100 + rank) for rank in range(256 - len(BYTES))]


def small_fields(pre: str | None, **more: Any) -> dict[str, Any]:
    tokens = [*BYTES, "ab", "abc", "<s>", "</s>", "<été>", "<turn>"]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * 258, 3, 3, 4, 3],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        **more,
    }
    return fields if pre is None else {**fields, "tokenizer.ggml.pre": pre}


def words(pre: str, text: str) -> list[str]:
    tokenizer = GgufVocabulary.from_fields(small_fields(pre)).build()
    model = tokenizer.pre_tokenizer
    assert model is not None
    return [text[start:end] for _, (start, end) in model.pre_tokenize_str(text)]


def test_each_pre_tokenizer_splits_its_own_way() -> None:
    text = "I'M 12345 it's (x)\n\n  y"
    assert words("gpt-2", text) == ["I", "'", "M", " 12345", " it", "'s", " (", "x", ")", "\n\n ", " y"]
    digits = [" ", "1", "2", "3", "4", "5"]
    assert words("smollm", text) == ["I", "'", "M", *digits, " it", "'s", " (", "x", ")", "\n\n ", " y"]
    tail = [" it", "'s", " (", "x", ")\n\n", " ", " y"]
    assert words("llama-bpe", text) == ["I", "'M", " ", "123", "45", *tail]
    assert words("qwen2", text) == ["I", "'M", *digits, *tail]


@pytest.mark.parametrize("pre", ["default", "tekken", None])
def test_an_unknown_pre_tokenizer_is_named_and_nothing_is_written(
    tmp_path: Path, write_gguf: WriteGguf, pre: str | None
) -> None:
    source = write_gguf(tmp_path / "model.gguf", small_fields(pre))
    with pytest.raises(UnsupportedTokenizer, match=repr(pre) if pre else "is missing"):
        write_text_files(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_tokenizer_model_is_named() -> None:
    with pytest.raises(UnsupportedTokenizer, match="'t5'"):
        GgufVocabulary.from_fields({**small_fields("gpt-2"), "tokenizer.ggml.model": "t5"}).build()
    with pytest.raises(UnsupportedTokenizer, match="no vocabulary"):
        GgufVocabulary.from_fields({"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(UnsupportedTokenizer, match="twice"):
        GgufVocabulary.from_fields({"tokenizer.ggml.tokens": ["a", "a"]})


def test_token_types_of_a_gguf(tmp_path: Path, write_gguf: WriteGguf) -> None:
    more = {"tokenizer.ggml.eot_token_id": 261, "tokenizer.chat_template": "{{ bos_token }}"}
    write_text_files(write_gguf(tmp_path / "model.gguf", small_fields("llama-bpe", **more)), tmp_path)
    model = TextModel.load(tmp_path)
    assert model.eos_token_ids == (259, 261)
    assert model.encode("abc<été></s>", add_special=True) == [258, 257, 260, 259]
    assert model.vocabulary.special == {258, 259, 261}
    assert model.decode([258, 260, 257], skip_special=True) == "<été>abc"
    assert model.apply_chat_template([]) == [258]


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_whether_a_prompt_begins_with_the_begin_token(
    tmp_path: Path, write_gguf: WriteGguf, pre: str, declared: bool | None, expected: bool
) -> None:
    more = {} if declared is None else {"tokenizer.ggml.add_bos_token": declared}
    write_text_files(write_gguf(tmp_path / "model.gguf", small_fields(pre, **more)), tmp_path)
    assert TextSettings.read(tmp_path).add_bos is expected


def test_sentencepiece_ids_are_those_of_sentencepiece(spm_model: TextModel, sentencepiece: dict[str, Any]) -> None:
    assert len(sentencepiece["cases"]) > 50
    for case in sentencepiece["cases"]:
        assert spm_model.encode(case["text"], add_special=False) == case["ids"]
        assert spm_model.encode(case["text"], add_special=True) == [1, *case["ids"]]
        assert spm_model.decode(case["ids"]) == case["text"]


def test_sentencepiece_goes_by_score_whatever_the_order_of_the_ids(sentencepiece: dict[str, Any]) -> None:
    rows = list(zip(sentencepiece["tokens"], sentencepiece["token_types"], sentencepiece["scores"], strict=True))[::-1]
    tokens, types, scores = (list(column) for column in zip(*rows, strict=True))
    names = ("tokens", "token_type", "scores", "model")
    fields = {
        f"tokenizer.ggml.{name}": value for name, value in zip(names, (tokens, types, scores, "llama"), strict=True)
    }
    tokenizer = GgufVocabulary.from_fields(fields).build()
    for case in sentencepiece["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
        assert [len(tokens) - 1 - i for i in ids] == case["ids"]


def hugging_face(directory: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = GgufVocabulary.from_fields(small_fields("gpt-2")).build()
    made.enable_truncation(3)
    return made


def test_a_hugging_face_directory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}],
    }
    source = hugging_face(
        tmp_path / "hf", tokenizer, tokenizer_config=config, generation_config={"eos_token_id": [261, 259]}
    )
    write_text_files(source, tmp_path / "out")
    assert TextSettings.read(tmp_path / "out") == TextSettings(
        bos_token_id=258,
        eos_token_ids=(259, 261),
        add_bos=True,
        chat_template="{{ eos_token }}",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    model = TextModel.load(tmp_path / "out")
    assert len(model.encode("a b c d e", add_special=False)) == 9, "the file's truncation is not ours"
    assert model.apply_chat_template([]) == [259]

    (source / "chat_template.jinja").write_text("{{ bos_token }}")
    write_text_files(source, tmp_path / "out")
    assert TextModel.load(tmp_path / "out").apply_chat_template([]) == [258]


def test_a_hugging_face_directory_with_little_in_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_text_files(hugging_face(tmp_path / "hf", tokenizer, config={"eos_token_id": 259}), tmp_path / "out")
    assert TextSettings.read(tmp_path / "out") == TextSettings(None, (259,), False, None, {})


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
        write_text_files(tmp_path, tmp_path / "out")


def test_serving_text_needs_neither_torch_nor_gguf() -> None:
    code = (
        "import sys, shared.text.choice, shared.text.prepare\n"
        "assert not {'torch', 'numba', 'gguf', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
