"""Token ids to text, as they come."""

import codecs
from collections.abc import Iterable

from shared.text.tokenizer import TextModel


class Detokenizer:
    """The text of one choice's tokens. What `push` returned so far and `finish` together are the text of all ids.

    A character appears once all its bytes are there; bytes that can no longer become one appear as U+FFFD. Control
    tokens are left out where skip_special is set. The text continues a prompt: a space in front of the first word is
    kept. Each token costs the length of its own text.
    """

    def __init__(self, model: TextModel, skip_special: bool = True) -> None:
        self._vocabulary = model.vocabulary
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return self._decoder.decode(self._vocabulary.join(token_ids, skip_special=self._skip_special))

    def finish(self) -> str:
        """What is left of an unfinished character (U+FFFD), once; then empty."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
