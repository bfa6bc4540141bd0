"""The two files that make up the text side of a prepared model, and what `text.json` holds."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"


@dataclass(frozen=True, slots=True)
class TextSettings:
    """eos_token_ids: the tokens that end an answer. add_bos: a raw prompt starts with bos_token_id.
    special_tokens: the texts a chat template may name (`bos_token` …)."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> "TextSettings":
        raw = json.loads((directory / TEXT_FILE).read_text(encoding="utf-8"))
        return cls(**{**raw, "eos_token_ids": tuple(raw["eos_token_ids"])})

    def write(self, directory: Path) -> None:
        body = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (directory / TEXT_FILE).write_text(body + "\n", encoding="utf-8")
