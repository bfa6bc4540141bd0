"""What a client has of its answer already: from there another attempt goes on, and nothing of it is ever said again.

A token counts from the moment it is handed to the text side. What a letterbox had accepted and nobody had taken when
its attempt ended is forgotten with it; the next attempt brings it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.generation import TokenEvent
from shared.protocol.stream_messages import StreamTicket


@dataclass(slots=True)
class History:
    """tokens: of each choice, the handoff token first. over: which choices have finished, or were stopped by the text
    side. stored: positions, from the prompt's first on, whose state the stores can bring back."""

    tokens: list[list[int]]
    over: list[bool]
    stored: int = 0

    @classmethod
    def empty(cls, num_choices: int) -> "History":
        return cls([[] for _ in range(num_choices)], [False] * num_choices)

    @property
    def begun(self) -> bool:
        return any(self.tokens)

    def add(self, batch: Sequence[TokenEvent]) -> None:
        for event in batch:
            self.tokens[event.choice].append(event.token)
            if event.finish is not None:
                self.over[event.choice] = True

    def told(self) -> tuple[tuple[int, ...], ...]:
        """As `Reserve.history` has it."""
        return tuple(map(tuple, self.tokens)) if self.begun else ()

    def finished(self) -> tuple[int, ...]:
        """As `Reserve.finished` has it."""
        return tuple(choice for choice, over in enumerate(self.over) if over)

    def prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What a P computes: of a single choice also what it has given out, but for the last token, which D replays.
        Several choices have the prompt alone in common, and D catches each of them up."""
        return prompt + tuple(self.tokens[0][:-1]) if len(self.tokens) == 1 else prompt

    def prefix_len(self, prompt_len: int) -> int:
        """Length of `prefix`."""
        return prompt_len + (max(0, len(self.tokens[0]) - 1) if len(self.tokens) == 1 else 0)

    def caught_up(self) -> tuple[int, ...]:
        """Of each choice that goes on: how many positions behind `prefix` D computes by itself."""
        if len(self.tokens) == 1:
            return (0,)
        return tuple(max(0, len(tokens) - 1) for tokens, over in zip(self.tokens, self.over, strict=True) if not over)


@dataclass(frozen=True, slots=True)
class Past:
    """What another gateway has done for a request. identity: of the model that began it, which no other may end. path:
    which way its state came. ticket: which may still live. cached_tokens: of the prompt, once it has begun.
    epoch: ours, above that of every gateway that has had the ticket."""

    history: History
    identity: str | None = None
    path: str = "pending"
    ticket: StreamTicket | None = None
    cached_tokens: int | None = None
    epoch: int = 0
