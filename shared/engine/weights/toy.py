"""The toy model's prepared directory: text files and numbers, no weights. A token is a byte; 0xFF, which UTF-8 never
uses, ends a text. Cluster tests run whole deployments on it.
"""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.engine.weights.prepared import FORMAT_VERSION, MODEL_FILE, ModelFile
from shared.text.files import TOKENIZER_FILE, TextSettings

TOY = "toy"
TOY_VOCAB_SIZE = 256
TOY_EOS_TOKEN = 255
TOY_MAX_MODEL_LEN = 4096
_EOS_TEXT = "<eos>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def toy_identity(salt: int = 0) -> str:
    return hashlib.sha256(f"toy-1-{salt}".encode()).hexdigest()


def write_toy(directory: Path) -> None:
    """Writes it over what is there."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {_byte_text(byte): byte for byte in range(TOY_EOS_TOKEN)} | {_EOS_TEXT: TOY_EOS_TOKEN}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS_TEXT])
    tokenizer.save(str(directory / TOKENIZER_FILE), pretty=False)
    TextSettings(None, (TOY_EOS_TOKEN,), False, _CHAT_TEMPLATE, {"eos_token": _EOS_TEXT}).write(directory)
    model = ModelFile(
        format_version=FORMAT_VERSION,
        name=TOY,
        architecture=TOY,
        identity=toy_identity(),
        source=TOY,
        vocab_size=TOY_VOCAB_SIZE,
        max_model_len=TOY_MAX_MODEL_LEN,
        eos_token_ids=(TOY_EOS_TOKEN,),
        bos_token_id=None,
        weights_digest="",
        weights_bytes=0,
        numbers={},
    )
    (directory / MODEL_FILE).write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _byte_text(byte: int) -> str:
    """How byte-level vocabularies spell a byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(0x100) if other not in printable].index(byte))
