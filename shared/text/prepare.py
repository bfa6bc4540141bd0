"""Writes the two files every process that touches text reads: `tokenizer.json` and `text.json`.

This is the only place that knows where a model's tokenizer comes from: a GGUF file, or a directory as Hugging Face lays
it out. `gguf` is imported only here and only when a GGUF is prepared, so that serving text does not need it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.runtime.errors import InvalidRequest
from shared.text.chat_template import ChatTemplate
from shared.text.files import TOKENIZER_FILE, TextSettings
from shared.text.gguf_tokenizer import GgufVocabulary, UnsupportedTokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_NAMED_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GGUF_END_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def write_text_files(source: Path, directory: Path, fields: Mapping[str, Any] | None = None) -> None:
    """From a GGUF file or a Hugging Face directory to `tokenizer.json` and `text.json` in `directory`.

    fields: the GGUF's metadata by key, where the caller has read it; reading it here takes seconds.
    UnsupportedTokenizer (a ValueError) says what about the model's tokenizer is not known; nothing is written then.
    """
    if source.is_dir():
        tokenizer, settings = _from_directory(source)
    else:
        tokenizer, settings = _from_fields(_read_gguf(source) if fields is None else fields)
    _try_template(settings)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / TOKENIZER_FILE), pretty=False)
    settings.write(directory)


def _read_gguf(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    return {
        name: item.contents()
        for name, item in reader.fields.items()
        if name.startswith("tokenizer.") and name != "tokenizer.huggingface.json"
    }


def _try_template(settings: TextSettings) -> None:
    """ValueError where the model's chat template does not compile, or fails on the plainest of conversations: then no
    chat would ever be answered."""
    if settings.chat_template is None:
        return
    template = ChatTemplate(settings.chat_template, named_tokens=settings.special_tokens, control_tokens=())
    try:
        template.render([{"role": "user", "content": "Hello"}], {"add_generation_prompt": True})
    except InvalidRequest as error:
        raise ValueError(f"{error}, on one message of a user") from error


def _from_fields(fields: Mapping[str, Any]) -> tuple[Tokenizer, TextSettings]:
    vocabulary = GgufVocabulary.from_fields(fields)
    tokenizer = vocabulary.build()
    bos = fields.get("tokenizer.ggml.bos_token_id")
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    wants_bos = vocabulary.default_add_bos() if add_bos is None else bool(add_bos)
    return tokenizer, TextSettings(
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(fields[key] for key in _GGUF_END_IDS if key in fields)),
        add_bos=wants_bos and bos is not None,
        chat_template=fields.get("tokenizer.chat_template"),
        special_tokens={name: vocabulary.tokens[fields[key]] for name, key in _GGUF_NAMED_IDS.items() if key in fields},
    )


def _from_directory(path: Path) -> tuple[Tokenizer, TextSettings]:
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise UnsupportedTokenizer(f"{path} has no {TOKENIZER_FILE} (the format of Hugging Face tokenizers)")
    tokenizer = Tokenizer.from_file(str(file))
    config = _read_json(path / "tokenizer_config.json")
    named = {**_read_json(path / "special_tokens_map.json"), **config}
    texts = {name: text for name in _NAMED_TOKENS if (text := _token_content(named.get(name))) is not None}
    bos = tokenizer.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    eos = [tokenizer.token_to_id(texts["eos_token"])] if "eos_token" in texts else []
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(path / name).get("eos_token_id")
        eos.extend(declared if isinstance(declared, list) else [declared])
    return tokenizer, TextSettings(
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        add_bos=bos is not None and _adds_bos(tokenizer, bos, config.get("add_bos_token")),
        chat_template=_chat_template(path, config),
        special_tokens=texts,
    )


def _adds_bos(tokenizer: Tokenizer, bos: int, declared: bool | None) -> bool:
    """The tokenizer's own post-processor decides, unless the configuration says otherwise."""
    frame = tokenizer.encode("", add_special_tokens=True).ids
    if frame not in ([], [bos]):
        raise UnsupportedTokenizer(f"the tokenizer frames text with the tokens {frame}; only {[bos]} in front is known")
    return bool(frame) if declared is None else declared


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _token_content(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"its {path.name} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
