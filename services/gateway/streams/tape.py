"""What a resumable stream has said so far, and how it ended: written by whoever drives it, read by a connection.

Only what the journal has comes onto the tape, so nothing that a client ever saw can change.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.generation import TokenEvent
from services.gateway.history import History, Past
from shared.protocol.stream_messages import StreamTicket
from shared.runtime.errors import BatonError


@dataclass(slots=True)
class PromptTape:
    """events: of each choice, in order. stopped: choices that a stop string has ended. identity, stored, ticket:
    as they were when the stream was taken up. timings: once all have ended."""

    events: list[list[TokenEvent]]
    stopped: list[bool]
    path: str = "pending"
    identity: str | None = None
    stored: int = 0
    ticket: StreamTicket | None = None
    cached_tokens: int | None = None
    timings: dict[str, object] | None = None

    @classmethod
    def empty(cls, n: int) -> "PromptTape":
        return cls([[] for _ in range(n)], [False] * n)

    def is_over(self, choice: int) -> bool:
        events = self.events[choice]
        return self.stopped[choice] or bool(events and events[-1].finish is not None)

    @property
    def all_over(self) -> bool:
        return all(map(self.is_over, range(len(self.events))))

    def past(self) -> Past:
        """From which a generation goes on behind it."""
        tokens = [[event.token for event in events] for events in self.events]
        history = History(tokens, [self.is_over(choice) for choice in range(len(tokens))], self.stored)
        return Past(history, self.identity, self.path, self.ticket, self.cached_tokens)


@dataclass(slots=True)
class Tape:
    """failure: why it ended early. grown: set at each change, for the one connection that reads."""

    prompts: list[PromptTape]
    failure: BatonError | None = None
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def empty(cls, num_prompts: int, n: int) -> "Tape":
        return cls([PromptTape.empty(n) for _ in range(num_prompts)])

    @property
    def ended(self) -> bool:
        return self.failure is not None or all(prompt.timings is not None for prompt in self.prompts)

    def said(self) -> tuple[int, ...]:
        """Tokens of each choice, in the order of the answer."""
        return tuple(len(events) for prompt in self.prompts for events in prompt.events)

    def first(self, position: Sequence[int]) -> list[list[TokenEvent]]:
        """Of each choice so many tokens as `position` says."""
        choices = [events for prompt in self.prompts for events in prompt.events]
        return [events[:end] for events, end in zip(choices, position, strict=True)]
