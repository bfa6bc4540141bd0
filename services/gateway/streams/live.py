"""A stream while this gateway serves it: its generations are driven and written down, whether or not somebody reads."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from services.gateway.api.plan import Plan
from services.gateway.generation import Generation, GenerationRequest, TokenEvent
from services.gateway.history import Past
from services.gateway.streams.ledger import Ledger
from services.gateway.streams.reader import Reader
from services.gateway.streams.tape import Tape
from shared.protocol.messages import FinishReason
from shared.protocol.stream_messages import StreamRequest
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, JournalUnavailable, StreamMoved
from shared.text.choice import ChoiceText
from shared.text.tokenizer import TextModel

log = logging.getLogger(__name__)
_END_S = 5.0
_SHOWN = 8
"""Of an id in logs: who knows all of it may read the stream where there are no API keys."""


class ResumableGeneration(Generation, Protocol):
    def progress(self) -> Past:
        """From which another gateway can go on."""

    def leave(self) -> None:
        """It is about to be closed here, and goes on for another gateway."""


class ResumableGenerator(Protocol):
    """past: what the client may have already; the generation goes on behind it."""

    def generate(self, request: GenerationRequest, past: Past | None = None) -> ResumableGeneration: ...


class LiveStream:
    """detached_at: since when nobody reads, by the clock. lost: it is served elsewhere, or cannot be written down: the
    journal is no longer ours."""

    def __init__(
        self,
        deps: Deps,
        ledger: Ledger,
        request: StreamRequest,
        plan: Plan,
        generator: ResumableGenerator,
        text: TextModel,
        touch_s: float,
    ) -> None:
        self.id = ledger.stream
        self.request = request
        self.plan = plan
        self.ledger = ledger
        self.detached_at: float | None = deps.clock.now()
        self.lost = False
        self._deps = deps
        self._generator = generator
        self._touch_s = touch_s
        self._reader: Reader | None = None
        self._task: asyncio.Task[None] | None = None
        self._come = asyncio.Event()
        self._over: set[int] = set()
        self._generations: dict[int, ResumableGeneration] = {}
        self._texts: list[ChoiceText] = []
        self._read_past(text)

    @property
    def tape(self) -> Tape:
        return self.ledger.tape

    def start(self) -> None:
        self._task = self._deps.spawn(self._run(), f"stream-{self.id[:_SHOWN]}")

    def attach(self, start: Sequence[int]) -> Reader:
        """A connection that has so many tokens of each choice takes the stream; the one before it ends."""
        if self._reader is not None:
            self._reader.end(StreamMoved())
        self._reader = Reader(self.tape, self.plan.requests, start, self._detach)
        self.detached_at = None
        return self._reader

    def _detach(self, reader: Reader) -> None:
        if self._reader is reader:
            self._reader, self.detached_at = None, self._deps.clock.now()
            self._come.set()
            if not self.tape.ended:
                self._deps.counters.add("streams_detached")

    async def let_go(self, why: BatonError) -> None:
        """Another gateway may go on with it, and with the tickets that the journal names."""
        self._leave_tickets()
        await self.end(why)

    async def end(self, why: BatonError) -> None:
        """Stops serving it; whoever reads is told why. Its tickets are cancelled, the journal stays as it is."""
        if self._reader is not None:
            self._reader.end(why)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_END_S)

    async def _run(self) -> None:
        """Until all of it is on the tape, or it cannot be written down any more."""
        numbers = [number for number, prompt in enumerate(self.tape.prompts) if prompt.timings is None]
        try:
            async with asyncio.TaskGroup() as group:
                drives = [group.create_task(self._drive(number)) for number in numbers]
                try:
                    await self._write(drives)
                except StreamMoved:  # whoever has it now may go on with its tickets
                    self._leave_tickets()
                    raise
                finally:
                    for drive in drives:
                        drive.cancel()
        except* Exception as errors:
            self.lost = True
            self.tape.failure = self._why_lost(_first(errors))
            moved = isinstance(self.tape.failure, StreamMoved)
            self._deps.counters.add("streams_lost" if moved else "streams_unwritten")
            self.tape.grown.set()

    def _why_lost(self, error: Exception) -> BatonError:
        """Whatever it was, whoever reads must not wait for ever."""
        if isinstance(error, StreamMoved | JournalUnavailable):
            return error
        log.error("stream %s… is given up", self.id[:_SHOWN], exc_info=error)
        return JournalUnavailable("the stream could not be written down")

    def _leave_tickets(self) -> None:
        for generation in self._generations.values():
            generation.leave()

    async def _write(self, drives: Sequence[asyncio.Task[None]]) -> None:
        """What comes while something is being written is written together. An end that is still being read is kept."""
        while not (self.tape.ended and self.detached_at is not None):
            try:
                async with asyncio.timeout(self._touch_s):
                    await self._come.wait()
            except TimeoutError:
                pass
            self._come.clear()
            if not (self.tape.ended and self.detached_at is not None):
                await self.ledger.write()
            if self.tape.failure is not None:  # of one prompt: nobody waits for the others any more
                for drive in drives:
                    drive.cancel()

    async def _drive(self, number: int) -> None:
        """One prompt, from where the tape ends. Of several that fail the first is what the stream ends with."""
        past = replace(self.tape.prompts[number].past(), epoch=self.ledger.epoch)
        generation = self._generator.generate(self.plan.requests[number], past)
        self._generations[number] = generation
        try:
            if not all(past.history.over):
                async for batch in generation:
                    self._take(number, generation, batch)
            self.ledger.progress[number] = generation.progress()
            self.ledger.draft.timings[number] = generation.timings()
        except BatonError as error:
            self._fail(error)
        except Exception:
            log.exception("stream %s… failed", self.id[:_SHOWN])
            self._fail(BatonError())
        finally:
            self._come.set()
            await generation.aclose()

    def _fail(self, error: BatonError) -> None:
        self.ledger.draft.failure = self.ledger.draft.failure or error

    def _take(self, number: int, generation: ResumableGeneration, batch: Sequence[TokenEvent]) -> None:
        ledger = self.ledger
        for event in batch:
            place = number * self.plan.n + event.choice
            if place in self._over:  # behind a stop string
                continue
            ledger.draft.events[place].append(event)
            if event.finish is not None:
                self._over.add(place)
            elif self._texts and self._texts[place].push((event.token,)).stopped:
                self._over.add(place)
                ledger.draft.stopped.add(place)
                generation.stop_choice(event.choice)
        ledger.progress[number] = generation.progress()
        self._come.set()

    def _read_past(self, text: TextModel) -> None:
        """What was said before us goes through the stop strings' matchers, token by token."""
        prompts, n = self.tape.prompts, self.plan.n
        self._over = {p * n + c for p, prompt in enumerate(prompts) for c in range(n) if prompt.is_over(c)}
        if self.plan.stops:
            self._texts = [ChoiceText(text, self.plan.stops) for _ in range(n * len(prompts))]
        for matcher, events in zip(self._texts, (e for prompt in prompts for e in prompt.events), strict=False):
            for event in events:
                matcher.push((event.token,), hide_last=event.finish is FinishReason.STOP)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    inner: Exception = errors
    while isinstance(inner, ExceptionGroup):
        inner = inner.exceptions[0]
    return inner
