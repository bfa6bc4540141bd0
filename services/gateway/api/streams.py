"""Resumable streams over HTTP: a new one, and `GET /v1/streams/{id}` for one that was begun before."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from aiohttp import web

from services.gateway.api.answer import Answer, Kitchen, Progress
from services.gateway.api.choices import Choice
from services.gateway.api.context import context_of
from services.gateway.api.limits import HttpLimits
from services.gateway.api.plan import Plan
from services.gateway.api.render import Renderer
from services.gateway.streams.desk import Found, Streams
from services.gateway.streams.position import Position, check_position, parse_position
from services.gateway.streams.tape import Tape
from shared.runtime.errors import StreamNotFound
from shared.text.choice import ChoiceText
from shared.text.tokenizer import TextModel

_ID = re.compile(r"[0-9a-f]{32}")
AFTER, LAST_EVENT_ID = "after", "Last-Event-ID"


def make_choices(text: TextModel, plan: Plan) -> list[Choice]:
    """Of the whole answer, in its order."""
    return [
        Choice(position * plan.n + number, one.prompt, ChoiceText(text, plan.stops), echo)
        for position, (one, echo) in enumerate(zip(plan.requests, plan.echoes, strict=True))
        for number in range(plan.n)
    ]


def read_past(choices: Sequence[Choice], tape: Tape, position: Position) -> None:
    """Puts what the client has through the text side, token by token, and drops what comes out: it stands then where
    it stood when the client got it."""
    for choice, events in zip(choices, tape.first(position), strict=True):
        for event in events:
            choice.take([event])


class StreamDoor:
    """kitchen: what every answer uses; a stream's own reader takes the place of its generator."""

    def __init__(
        self, streams: Streams, text: TextModel, kitchen: Kitchen, limits: HttpLimits, now: Callable[[], float]
    ) -> None:
        self._streams = streams
        self._text = text
        self._kitchen = kitchen
        self._limits = limits
        self._now = now

    async def open(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        """Answers a request that asked for a stream that can be resumed."""
        async with self._kitchen.guests.seated():
            found = await self._streams.open(plan, context_of(request).key, int(self._now()))
        return await self._send(request, found, make_choices(self._text, plan), None)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: all that comes behind `after`, to the stream's end."""
        with self._kitchen.guests.admitted(self._limits.max_active):
            async with self._kitchen.guests.seated():
                found, position = await self._find(request)
                choices = make_choices(self._text, found.plan)
                read_past(choices, found.tape, position)
                self._streams.count_resumed()
            return await self._send(request, found, choices, position)

    async def _find(self, request: web.Request) -> tuple[Found, Position]:
        stream, (text, param) = request.match_info["id"], _asked_for(request)
        if not _ID.fullmatch(stream):
            raise StreamNotFound

        def check(said: Sequence[int]) -> None:
            check_position(parse_position(text, len(said), param), said, param)

        found = await self._streams.find(stream, context_of(request).key, check)
        return found, parse_position(text, len(found.tape.said()), param)

    async def _send(
        self, request: web.Request, found: Found, choices: list[Choice], past: Position | None
    ) -> web.StreamResponse:
        context = context_of(request)
        context.stream = found.id
        reader = found.attach(past or (0,) * len(choices))
        try:
            renderer = Renderer(found.plan, found.request.created, self._text.token_bytes)
            kitchen = replace(self._kitchen, generator=reader)
            progress = Progress(choices, is_resumed=past is not None)
            return await Answer(found.plan, choices, renderer, context, kitchen, progress).send(request)
        finally:
            reader.close()


def _asked_for(request: web.Request) -> tuple[str | None, str]:
    """K, and by which name it was given. The header is a browser's own, of the last event that it got, and so newer
    than the address it connects to again."""
    last = request.headers.get(LAST_EVENT_ID)
    return (last, LAST_EVENT_ID) if last else (request.query.get(AFTER) or None, AFTER)
