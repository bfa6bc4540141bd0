"""Builds a `tokenizers.Tokenizer` from the vocabulary inside a GGUF file.

A GGUF names its pre-tokenizer instead of describing it. A name that is not listed here is refused: a nearly right
splitting gives nearly right ids, which no later check would notice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TYPE_UNKNOWN = 2
TYPE_CONTROL = 3
TYPE_USER_DEFINED = 4
SPACE_MARK = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


class UnsupportedTokenizer(ValueError):
    """The model's tokenizer is of a kind that Baton does not know."""


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before the merges. regex None: GPT-2's own, inside the byte-level step."""

    regex: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(self.regex), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.regex is None))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _Splitting()
_LLAMA_BPE = _Splitting(regex=_LLAMA3, ignore_merges=True, add_bos=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _Splitting(regex=_QWEN2, nfc=True),
    "smollm": _Splitting(single_digits=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` fields of one file; absent fields are None or empty."""

    model: str
    pre: str | None
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]
    add_space_prefix: bool | None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "GgufVocabulary":
        """fields: the file's metadata by full key. UnsupportedTokenizer where the vocabulary is missing or odd."""
        tokens = fields.get("tokenizer.ggml.tokens") or []
        if not tokens:
            raise UnsupportedTokenizer("the GGUF holds no vocabulary (tokenizer.ggml.tokens)")
        if len(set(tokens)) != len(tokens):
            raise UnsupportedTokenizer("the GGUF's vocabulary names a token twice (tokenizer.ggml.tokens)")
        return cls(
            model=str(fields.get("tokenizer.ggml.model", "")),
            pre=fields.get("tokenizer.ggml.pre"),
            tokens=tokens,
            token_types=fields.get("tokenizer.ggml.token_type") or [1] * len(tokens),
            merges=fields.get("tokenizer.ggml.merges") or [],
            scores=fields.get("tokenizer.ggml.scores") or [],
            add_space_prefix=fields.get("tokenizer.ggml.add_space_prefix"),
        )

    def build(self) -> Tokenizer:
        """The tokenizer, with control tokens marked special. UnsupportedTokenizer names what is not known."""
        if self.model == "gpt2":
            tokenizer = self._byte_level(self._splitting())
        elif self.model == "llama":
            tokenizer = self._sentencepiece()
        else:
            raise UnsupportedTokenizer(f"tokenizer.ggml.model is {self.model!r}; known are 'gpt2' and 'llama'")
        for token_type in (TYPE_CONTROL, TYPE_USER_DEFINED):
            added = [
                AddedToken(token, special=token_type == TYPE_CONTROL, normalized=False)
                for token, kind in zip(self.tokens, self.token_types, strict=True)
                if kind == token_type and token
            ]
            if token_type == TYPE_CONTROL:
                tokenizer.add_special_tokens(added)
            else:
                tokenizer.add_tokens(added)
        return tokenizer

    def default_add_bos(self) -> bool:
        """Whether a prompt starts with the begin-of-text token where the file does not say."""
        return True if self.model == "llama" else self._splitting().add_bos

    def _splitting(self) -> _Splitting:
        found = _SPLITTINGS.get(self.pre or "")
        if found is None:
            named = "is missing" if self.pre is None else f"is {self.pre!r}"
            known = ", ".join(sorted(_SPLITTINGS))
            raise UnsupportedTokenizer(f"the GGUF's pre-tokenizer (tokenizer.ggml.pre) {named}; known are {known}")
        return found

    def _byte_level(self, splitting: _Splitting) -> Tokenizer:
        if not self.merges:
            raise UnsupportedTokenizer("the GGUF's byte-level vocabulary has no merges (tokenizer.ggml.merges)")
        merges = [_split_merge(merge) for merge in self.merges]
        model = models.BPE(vocab=self._ids(), merges=merges, ignore_merges=splitting.ignore_merges)
        tokenizer = Tokenizer(model)
        if splitting.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = splitting.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        if len(self.scores) != len(self.tokens):
            raise UnsupportedTokenizer("the GGUF's SentencePiece vocabulary has no scores (tokenizer.ggml.scores)")
        unknown = next((t for t, kind in zip(self.tokens, self.token_types, strict=True) if kind == TYPE_UNKNOWN), None)
        merges = _merges_by_score(self._ids(), self.scores, self.token_types)
        tokenizer = Tokenizer(
            models.BPE(vocab=self._ids(), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefix = self.add_space_prefix is not False
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE_MARK)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
        undo = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
        return tokenizer

    def _ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def _split_merge(merge: str) -> tuple[str, str]:
    """'left right'; a left part that is itself a space is allowed."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _merges_by_score(
    ids: Mapping[str, int], scores: Sequence[float], token_types: Iterable[int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores best; the same order written as a list of merges."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for (piece, index), kind in zip(ids.items(), token_types, strict=True):
        if kind in (TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]
