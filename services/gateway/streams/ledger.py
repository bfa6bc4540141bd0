"""The journal of one stream as its owner writes it: the state that is in force, and what comes next.

A token is on the tape only when it is in the journal; whoever finds that another gateway has taken the stream over
gets StreamMoved and neither writes nor sends anything more.
"""

import json
from collections.abc import Iterator

from services.gateway.generation import TokenEvent
from services.gateway.streams.journal import Journal, Page
from services.gateway.streams.records import tokens_of
from services.gateway.streams.tape import Tape
from shared.protocol.stream_messages import (
    StreamFailure,
    StreamPart,
    StreamProgress,
    StreamRequest,
    StreamState,
)
from shared.runtime.clock import Clock
from shared.runtime.errors import BatonError

PART_TOKENS = 256
"""So many tokens are written again with every batch at most; then they get an entry of their own."""


class Draft:
    """What has come and is not written down yet. Of each choice its new tokens, in the order of the answer."""

    def __init__(self, num_choices: int) -> None:
        self.events: list[list[TokenEvent]] = [[] for _ in range(num_choices)]
        self.stopped: set[int] = set()
        self.timings: dict[int, dict[str, object]] = {}
        self.failure: BatonError | None = None


class Ledger:
    """tape: what is in force; only `write` changes it. deadline: of the request, by the clock. epoch: the revision at
    which it became ours; 0: it was from the beginning."""

    def __init__(
        self, stream: str, journal: Journal, tape: Tape, n: int, owner: str, clock: Clock, deadline: float
    ) -> None:
        self.stream = stream
        self.tape = tape
        self.draft = Draft(n * len(tape.prompts))
        self.progress = [prompt.past() for prompt in tape.prompts]
        self.parts: tuple[str, ...] = ()
        self.epoch = 0
        self._journal = journal
        self._n = n
        self._owner = owner
        self._clock = clock
        self._deadline = deadline
        self._revision = 0
        self._tail_from = [0] * len(self.draft.events)

    async def begin(self, request: StreamRequest) -> None:
        """The first word about a new stream."""
        self._revision = await self._journal.begin(self.stream, request, self._state(self.draft))

    async def claim(self, page: Page) -> None:
        """Makes us the owner of what the tape was read from; StreamMoved where somebody else was sooner."""
        lengths = [len(one.tokens) for one in page.state.choices]
        self._tail_from = [said - new for said, new in zip(self.tape.said(), lengths, strict=True)]
        self.parts = page.state.parts
        self._revision = page.revision
        await self._replace(self.draft)
        self.epoch = self._revision

    async def write(self) -> None:
        """Writes all that has come since the last call, and puts it onto the tape. With nothing new it says that we are
        still here. Not to be called twice at a time."""
        draft, self.draft = self.draft, Draft(len(self.draft.events))
        for part in _slices(draft):
            if sum(map(len, self._tail())) >= PART_TOKENS:
                await self._put_tail_away()
            await self._replace(part)
            self._publish(part)

    @property
    def revision(self) -> int:
        """Of the state that was written last."""
        return self._revision

    async def _replace(self, draft: Draft) -> None:
        self._revision = await self._journal.replace(self.stream, self._state(draft), self._revision)

    async def _put_tail_away(self) -> None:
        tail = self._tail()
        part = StreamPart(choices=tuple(tokens_of(events) for events in tail))
        self.parts = (*self.parts, await self._journal.keep(self.stream, part))
        self._tail_from = [at + len(events) for at, events in zip(self._tail_from, tail, strict=True)]

    def _tail(self) -> list[list[TokenEvent]]:
        """Tokens in force that have no entry of their own."""
        choices = [events for prompt in self.tape.prompts for events in prompt.events]
        return [events[at:] for events, at in zip(choices, self._tail_from, strict=True)]

    def _state(self, draft: Draft) -> StreamState:
        failure = draft.failure or self.tape.failure
        stopped = [flag for prompt in self.tape.prompts for flag in prompt.stopped]
        return StreamState(
            owner=self._owner,
            parts=self.parts,
            choices=tuple(
                tokens_of([*told, *new], stopped=stopped[number] or number in draft.stopped)
                for number, (told, new) in enumerate(zip(self._tail(), draft.events, strict=True))
            ),
            progress=tuple(self._told(number, draft) for number in range(len(self.tape.prompts))),
            remaining_s=max(0.0, self._deadline - self._clock.now()),
            failure=None if failure is None else StreamFailure(code=failure.code, message=failure.message),
        )

    def _told(self, number: int, draft: Draft) -> StreamProgress:
        timings, now = draft.timings.get(number, self.tape.prompts[number].timings), self.progress[number]
        return StreamProgress(
            identity=now.identity,
            path=now.path,
            stored=now.history.stored,
            cached_tokens=now.cached_tokens,
            ticket=now.ticket if timings is None else None,
            timings=None if timings is None else json.dumps(timings),
        )

    def _publish(self, draft: Draft) -> None:
        tape = self.tape
        for number, events in enumerate(draft.events):
            tape.prompts[number // self._n].events[number % self._n] += events
        for number in draft.stopped:
            tape.prompts[number // self._n].stopped[number % self._n] = True
        for number, timings in draft.timings.items():
            tape.prompts[number].timings = timings
        for prompt, now in zip(tape.prompts, self.progress, strict=True):
            prompt.path, prompt.cached_tokens = now.path, now.cached_tokens
        tape.failure = tape.failure or draft.failure
        tape.grown.set()


def _slices(draft: Draft) -> Iterator[Draft]:
    """What came while the journal was away may be more than one entry holds: some tokens of every choice at a time. All
    else that there is to say comes with the last of them."""
    each = max(1, PART_TOKENS // len(draft.events))
    longest = max(map(len, draft.events))
    for start in range(0, longest - each, each):
        part = Draft(len(draft.events))
        part.events = [events[start : start + each] for events in draft.events]
        yield part
    last = max(0, longest - 1) // each * each
    draft.events = [events[last:] for events in draft.events]
    yield draft
