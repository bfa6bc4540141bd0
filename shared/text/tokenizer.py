"""Text to token ids and back, as the gateway needs it. Weights and devices are unknown here."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.runtime.errors import InvalidRequest
from shared.text.chat_template import ChatTemplate
from shared.text.files import TOKENIZER_FILE, TextSettings
from shared.text.vocabulary import Vocabulary


class TextModel:
    """The text side of one model. Immutable after loading, so that threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        settings: TextSettings,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """now: the date that chat templates may ask for. ValueError where the chat template does not compile."""
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self.vocabulary = vocabulary
        self.bos_token_id = settings.bos_token_id
        self.eos_token_ids = settings.eos_token_ids
        self._prefix = [settings.bos_token_id] if settings.add_bos and settings.bos_token_id is not None else []
        if settings.chat_template is not None:
            control = [vocabulary.piece(index).decode() for index in sorted(vocabulary.special)]
            self._template = ChatTemplate(
                settings.chat_template, named_tokens=settings.special_tokens, control_tokens=control, now=now
            )

    @classmethod
    def load(cls, directory: Path, *, now: Callable[[], datetime] = datetime.now) -> "TextModel":
        """Reads what `write_text_files` wrote. OSError or ValueError where that is missing or not understood."""
        content = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(content)
        return cls(tokenizer, Vocabulary.of(tokenizer, json.loads(content)), TextSettings.read(directory), now=now)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model's embedding may have more rows."""
        return len(self.vocabulary.pieces)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special: bool) -> list[int]:
        """add_special: the begin-of-text token in front, if the model wants one. Text that spells a control token
        becomes that token: a raw prompt is the client's own template. Bytes that the vocabulary lacks (a few control
        characters in SmolLM2) are dropped, as by the model's own tokenizer. InvalidRequest: not valid Unicode.
        """
        ids = self._encode(text)
        return [*self._prefix, *ids] if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        text = self.vocabulary.join(ids, skip_special=skip_special).decode(errors="replace")
        return text[1:] if self.vocabulary.leading_space and text.startswith(" ") else text

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token, which need not be whole characters; empty for an id without a token."""
        return self.vocabulary.piece(index)

    def token_text(self, index: int) -> str:
        """The token as text, U+FFFD where its bytes are not whole characters."""
        return self.vocabulary.piece(index).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation. variables: what the template may use besides (`tools` …).

        Control tokens come from the template alone, whatever the messages spell (see chat_template.py). InvalidRequest
        where the model has no template, or with the template's message where it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        context = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        parts = self._template.render(messages, context)
        return [index for part in parts for index in self._encode(part)]

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids
