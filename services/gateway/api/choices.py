"""One choice of an answer: its text, tokens and end, as events come in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.generation import TokenEvent
from shared.protocol.messages import FinishReason, TokenLogprob
from shared.text.choice import ChoiceText


class TokenMark(NamedTuple):
    """A token with its logprobs. offset: characters of the choice's text in front of it; an echo does not count."""

    token: int
    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a batch added to one choice. first: nothing of this choice came before. stopped: a stop string ended it, of
    which nobody but the gateway knows."""

    choice: "Choice"
    text: str
    tokens: Sequence[int]
    marks: Sequence[TokenMark]
    finish: FinishReason | None
    first: bool
    stopped: bool


class Choice:
    """index: its place in the answer. text: what was released so far, the echo included. tokens: those that count for
    usage, with a mark for each where logprobs were asked for. finish: set once, with the last of them."""

    def __init__(self, index: int, prompt: Sequence[int], text: ChoiceText, echo: str = "") -> None:
        self.index = index
        self.prompt = prompt
        self.tokens: list[int] = []
        self.marks: list[TokenMark] = []
        self.finish: FinishReason | None = None
        self._source = text
        self._echo = echo
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take(self, events: Sequence[TokenEvent]) -> Delta:
        """events: the next ones of this choice, which has not finished. Those behind a stop string are dropped."""
        first = not self.tokens
        reported = events[-1].finish
        taken = self._source.push([event.token for event in events], hide_last=reported is FinishReason.STOP)
        text, stopped = taken.text, taken.stopped
        if reported is not None and not stopped:
            rest = self._source.finish()
            text, stopped = text + rest.text, rest.stopped
        self.finish = FinishReason.STOP if stopped else reported
        if first:
            text = self._echo + text
        marks = [
            TokenMark(event.token, event.logprob, offset)
            for event, offset in zip(events, taken.offsets, strict=False)
            if event.logprob is not None
        ]
        tokens = [event.token for event in events[: len(taken.offsets)]]
        self.tokens += tokens
        self.marks += marks
        self._parts.append(text)
        return Delta(self, text, tokens, marks, self.finish, first, stopped and reported is None)
