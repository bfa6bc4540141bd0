"""The text of one choice: token ids in, deltas for the client out."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.text.detokenizer import Detokenizer
from shared.text.stops import StopMatcher
from shared.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push brought.

    text: to be sent now; it may lag behind the tokens. stopped: a stop string is complete and the choice is over.
    offsets: for each token that was taken, the position in the choice's text at which its own text begins (a token
    that continues a character begins where the character does). Tokens behind a stop are not taken, so that there can
    be fewer than were pushed.
    """

    text: str
    stopped: bool
    offsets: tuple[int, ...] = ()


class ChoiceText:
    """One choice's detokenizer and stop strings. num_tokens: tokens taken so far, for usage: all up to and including
    the one that completed a stop string."""

    def __init__(
        self,
        model: TextModel,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(model, skip_special)
        self._matcher = StopMatcher(stops, include_stop)
        self._text_len = 0
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def push(self, token_ids: Sequence[int], *, hide_last: bool = False) -> TextDelta:
        """hide_last: the last token ended the choice by its id (end of text, a stop token): it counts and has an
        offset, but its text is not shown."""
        texts: list[str] = []
        offsets: list[int] = []
        for position, token in enumerate(token_ids):
            if self._matcher.stopped:
                break
            offsets.append(self._text_len)
            if not (hide_last and position == len(token_ids) - 1):
                texts.append(self._take(self._detokenizer.push((token,))))
        self.num_tokens += len(offsets)
        return TextDelta("".join(texts), self._matcher.stopped, tuple(offsets))

    def finish(self) -> TextDelta:
        """The choice is over: the text that was held back. Idempotent; empty after a stop."""
        if self._matcher.stopped:
            return TextDelta("", True)
        text = self._take(self._detokenizer.finish())
        return TextDelta(text + self._matcher.finish(), self._matcher.stopped)

    def _take(self, text: str) -> str:
        self._text_len += len(text)
        return self._matcher.push(text)[0]
