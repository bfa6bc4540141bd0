"""Answers one generation request, from its plan to the last byte: runs the generations, renders what comes, and ends
everything when the client leaves."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from services.gateway.api.choices import Choice, Delta
from services.gateway.api.context import PENDING, RequestContext
from services.gateway.api.errors import ApiError, from_baton, internal
from services.gateway.api.guests import Guests
from services.gateway.api.metrics import HttpMetrics
from services.gateway.api.plan import Plan
from services.gateway.api.render import Ending, Renderer, error_event
from services.gateway.api.sse import ClientGone, EventStream
from services.gateway.generation import Generation, Generator, TokenEvent
from services.gateway.streams.position import format_position
from shared.runtime.errors import BatonError, EngineError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What every answer uses."""

    generator: Generator
    metrics: HttpMetrics
    write_timeout_s: float
    guests: Guests


class Progress:
    """How far the client is, of a stream that can be resumed: the id of each event. is_resumed: another connection had
    the beginning."""

    def __init__(self, choices: Sequence[Choice], *, is_resumed: bool) -> None:
        self.is_resumed = is_resumed
        self._choices = choices
        self._sent = [len(choice.tokens) for choice in choices]

    def ids(self, deltas: Sequence[Delta], taken: Sequence[Choice]) -> list[str]:
        """Of the events for `deltas`, which are sent in this order. taken: all choices that got tokens; those without
        an event of their own have none to wait for."""
        shown = {delta.choice.index for delta in deltas}
        for choice in taken:
            if choice.index not in shown:
                self._sent[choice.index] = len(choice.tokens)
        ids = []
        for delta in deltas:
            self._sent[delta.choice.index] = len(delta.choice.tokens)
            ids.append(format_position(self._sent))
        return ids

    def last(self) -> str:
        return format_position([len(choice.tokens) for choice in self._choices])


class Answer:
    """One request's generations and what became of them. `choices` are in the order of the answer. progress: where the
    stream can be resumed."""

    def __init__(
        self,
        plan: Plan,
        choices: Sequence[Choice],
        renderer: Renderer,
        context: RequestContext,
        kitchen: Kitchen,
        progress: Progress | None = None,
    ) -> None:
        self._plan = plan
        self._choices = choices
        self._renderer = renderer
        self._context = context
        self._kitchen = kitchen
        self._progress = progress
        self._is_resumed = progress is not None and progress.is_resumed
        self._tokens_before = self._completion_tokens()
        self._generations: list[Generation] = []
        self._started = asyncio.get_running_loop().time()
        self._last_batch: float | None = None

    async def send(self, request: web.Request) -> web.StreamResponse:
        """The answer. Raises BatonError or ApiError as long as nothing was sent; later failures end the stream."""
        metrics = self._kitchen.metrics
        if not self._is_resumed:
            metrics.tokens.labels("prompt").inc(self._plan.prompt_tokens)
        with metrics.active.track_inprogress():
            try:
                if self._plan.stream:
                    return await self._stream(request)
                await self._run(None)
                body = self._renderer.whole(self._choices, self._ending())
                return web.Response(body=body, content_type="application/json")
            finally:
                if not self._is_resumed:
                    metrics.tokens.labels("cached").inc(self._cached_tokens())
                metrics.tokens.labels("completion").inc(self._completion_tokens() - self._tokens_before)
                metrics.paths.labels(self._context.path).inc()
                metrics.duration_s.observe(asyncio.get_running_loop().time() - self._started)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        events = EventStream(request, self._kitchen.write_timeout_s)
        try:
            await self._run(events)
            last = None if self._progress is None else self._progress.last()
            await events.write(self._renderer.tail(self._ending(), last))
        except ClientGone:
            raise
        except Exception as error:
            if events.response is None:
                raise
            failure = self._explain(error)
            await events.write(error_event(failure.body()))
        return await events.end()

    def _explain(self, error: Exception) -> ApiError:
        if isinstance(error, BatonError):
            failure = from_baton(error)
        else:
            log.exception("request %s of %s failed in its stream", self._context.request_id, self._context.tenant)
            failure = internal()
        self._context.cause = failure.code
        return failure

    async def _run(self, events: EventStream | None) -> None:
        """Drives all generations to their end; the first failure ends the others. events: where batches go at once."""
        async with self._kitchen.guests.seated():
            await self._drive_all(events)

    async def _drive_all(self, events: EventStream | None) -> None:
        if len(self._plan.requests) == 1:
            return await self._drive(0, events)
        try:
            async with asyncio.TaskGroup() as group:
                for position in range(len(self._plan.requests)):
                    group.create_task(self._drive(position, events))
        except ExceptionGroup as failures:
            raise _first(failures) from failures
        return None

    async def _drive(self, position: int, events: EventStream | None) -> None:
        """One prompt: takes its batches until all of its choices have ended. Ends the generation whatever happens."""
        n = self._plan.n
        choices = self._choices[position * n : (position + 1) * n]
        generation = self._kitchen.generator.generate(self._plan.requests[position])
        self._generations.append(generation)
        try:
            async for batch in generation:
                self._note(batch)
                deltas = self._take(generation, choices, batch)
                if events is not None and (deltas or events.response is None):
                    ids = None if self._progress is None else self._progress.ids(deltas, choices)
                    await events.write(self._renderer.chunks(deltas, ids))
            self._context.path = self._path()
            unfinished = [choice.index for choice in choices if choice.finish is None]
            if unfinished:
                raise EngineError(f"the answer ended early (choices {unfinished})")
        finally:
            self._context.path = self._path()
            await _close(generation)

    def _take(self, generation: Generation, choices: Sequence[Choice], batch: Sequence[TokenEvent]) -> list[Delta]:
        """The batch as one delta for each choice that it added something to."""
        by_choice: dict[int, list[TokenEvent]] = {}
        for event in batch:
            by_choice.setdefault(event.choice, []).append(event)
        deltas = []
        for number, items in by_choice.items():
            choice = choices[number]
            if choice.finish is not None:
                continue
            delta = choice.take(items)
            if delta.stopped:
                generation.stop_choice(number)
            if delta.first or delta.text or delta.marks or delta.finish is not None or self._plan.token_ids:
                deltas.append(delta)
        return deltas

    def _note(self, batch: Sequence[TokenEvent]) -> None:
        now = asyncio.get_running_loop().time()
        self._context.path = self._path()
        metrics = self._kitchen.metrics
        if self._last_batch is None and not self._is_resumed:
            metrics.first_token_s.observe(now - self._started)
        elif self._last_batch is not None:
            per_choice = max(1, len(batch) // len({event.choice for event in batch}))
            metrics.token_gap_s.observe((now - self._last_batch) / per_choice)
        self._last_batch = now

    def _path(self) -> str:
        """One word for all prompts of the request; `mixed` where they went different ways."""
        paths = {generation.path for generation in self._generations}
        known = paths - {PENDING}
        if len(known) > 1:
            return "mixed"
        if PENDING in paths or len(self._generations) < len(self._plan.requests):
            return PENDING
        return known.pop()

    def _cached_tokens(self) -> int:
        return sum(one.cached_tokens for one in self._generations)

    def _completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    def _ending(self) -> Ending:
        prompt, completion = self._plan.prompt_tokens, self._completion_tokens()
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }
        if not self._plan.tell_baton:
            return Ending(usage, None)
        baton: dict[str, object] = {"request_id": self._plan.request_id, "path": self._context.path}
        if self._plan.timings:
            timings = [generation.timings() for generation in self._generations]
            baton["timings"] = timings[0] if len(timings) == 1 else timings
        return Ending(usage, baton)


async def _close(generation: Generation) -> None:
    """Ends a generation even where the client's leaving is noticed only now: that cancels the handler, not the closing.
    A second cancellation, as at a shutdown that was told to hurry, does reach it."""
    closing = asyncio.create_task(generation.aclose())  # noqa: TID251 (awaited here to its end)
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to report: of several the first. A group inside stays one and counts as internal."""
    return failures.exceptions[0]
