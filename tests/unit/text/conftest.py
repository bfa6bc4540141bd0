"""Real vocabularies: SmolLM2's, as its GGUF holds it, and a small SentencePiece one."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter

from shared.text.prepare import write_text_files
from shared.text.tokenizer import TextModel

DATA = Path(__file__).parent / "data"


def _write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    writer = GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_key_value(name, value, GGUFValueType.UINT32)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path, dict[str, Any]], Path]:
    return _write_gguf


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="session")
def sentencepiece() -> dict[str, Any]:
    """A vocabulary that SentencePiece trained, with what SentencePiece itself makes of some texts."""
    content: dict[str, Any] = json.loads((DATA / "sentencepiece.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = json.loads(lzma.decompress((DATA / "smollm2_gguf_fields.json.xz").read_bytes()))
    directory = tmp_path_factory.mktemp("smollm2")
    write_text_files(_write_gguf(directory / "model.gguf", fields), directory / "text")
    return directory / "text"


@pytest.fixture(scope="session")
def smollm2(smollm2_directory: Path) -> TextModel:
    return TextModel.load(smollm2_directory)


@pytest.fixture(scope="session")
def spm_model(tmp_path_factory: pytest.TempPathFactory, sentencepiece: dict[str, Any]) -> TextModel:
    directory = tmp_path_factory.mktemp("sentencepiece")
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": sentencepiece["tokens"],
        "tokenizer.ggml.token_type": sentencepiece["token_types"],
        "tokenizer.ggml.scores": [float(score) for score in sentencepiece["scores"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_text_files(_write_gguf(directory / "model.gguf", fields), directory / "text")
    return TextModel.load(directory / "text")
