"""The bytes behind every token id, so that text can be put together token by token without asking the tokenizer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """pieces[id]: the token's bytes; ids without a token have none. special: control tokens.

    leading_space: the tokenizer puts a space in front of a text, which decoding a whole text takes away again.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    leading_space: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, description: Mapping[str, Any]) -> "Vocabulary":
        """description: the content of `tokenizer.json`. ValueError where its decoder is of a kind not known here."""
        decoder = list(_steps(description.get("decoder")))
        kinds = {step["type"] for step in decoder}
        added = tokenizer.get_added_tokens_decoder()
        by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
        pieces = [b""] * (max(by_id) + 1)
        if "ByteLevel" in kinds:
            table = _byte_level_table()
            for index, token in by_id.items():
                pieces[index] = _byte_level_bytes(token, table)
        elif kinds & {"Metaspace", "ByteFallback"}:
            for index, token in by_id.items():
                pieces[index] = _sentencepiece_bytes(token)
        else:
            raise ValueError(
                f"the tokenizer's decoder {sorted(kinds)} is not known; only byte-level and SentencePiece are"
            )
        for index, entry in added.items():
            pieces[index] = entry.content.encode()
        return cls(
            pieces=tuple(pieces),
            special=frozenset(index for index, entry in added.items() if entry.special),
            leading_space=any(_strips_space(step) for step in decoder),
        )

    def join(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        skipped = self.special if skip_special else frozenset[int]()
        return b"".join(self.piece(index) for index in ids if index not in skipped)

    def piece(self, index: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not have (padding of the embedding)."""
        return self.pieces[index] if 0 <= index < len(self.pieces) else b""


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _strips_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return False


def _byte_level_table() -> dict[str, int]:
    """GPT-2 writes each byte as one printable character: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return table


def _byte_level_bytes(token: str, table: Mapping[str, int]) -> bytes:
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()
