"""The routes that generate."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from services.gateway.api.answer import Answer, Kitchen
from services.gateway.api.body import read_chat, read_completion
from services.gateway.api.context import context_of
from services.gateway.api.guests import Guests
from services.gateway.api.limits import HttpLimits
from services.gateway.api.metrics import HttpMetrics
from services.gateway.api.plan import Plan, Served, check_model, make_plan
from services.gateway.api.prompts import PromptReader
from services.gateway.api.render import Renderer
from services.gateway.api.streams import StreamDoor, make_choices
from services.gateway.generation import Generator
from services.gateway.streams.desk import Streams
from shared.runtime.errors import NotResumable
from shared.text.tokenizer import TextModel


class Completions:
    """Bounds how many requests are in hand, from before their bodies are read."""

    def __init__(
        self,
        generator: Generator,
        text: TextModel,
        model_names: tuple[str, ...],
        max_model_len: int,
        limits: HttpLimits,
        metrics: HttpMetrics,
        now: Callable[[], float],
        guests: Guests,
        streams: Streams | None = None,
    ) -> None:
        self._text = text
        self._served = Served(model_names, text.vocab_size, max_model_len, limits)
        self._prompts = PromptReader(text, max_model_len, limits)
        self._kitchen = Kitchen(generator, metrics, limits.write_timeout_s, guests)
        self._streams = None if streams is None else StreamDoor(streams, text, self._kitchen, limits, now)
        self._now = now
        self._guests = guests

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._admitted(request, self._plan_chat)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._admitted(request, self._plan_completion)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        if self._streams is None:
            raise NotResumable
        return await self._streams.resume(request)

    async def _admitted(
        self, request: web.Request, plan: Callable[[web.Request], Awaitable[Plan]]
    ) -> web.StreamResponse:
        with self._guests.admitted(self._served.limits.max_active):
            async with self._guests.seated():
                planned = await plan(request)
            return await self._answer(request, planned)

    async def _plan_chat(self, request: web.Request) -> Plan:
        body = await read_chat(request, self._served.limits.read_timeout_s)
        check_model(body, self._served)
        return make_plan(body, await self._prompts.chat(body), self._served, context_of(request))

    async def _plan_completion(self, request: web.Request) -> Plan:
        body = await read_completion(request, self._served.limits.read_timeout_s)
        check_model(body, self._served)
        return make_plan(body, await self._prompts.completion(body), self._served, context_of(request))

    async def _answer(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        if plan.resumable:
            if self._streams is None:
                raise NotResumable
            return await self._streams.open(request, plan)
        choices = make_choices(self._text, plan)
        renderer = Renderer(plan, int(self._now()), self._text.token_bytes)
        return await Answer(plan, choices, renderer, context_of(request), self._kitchen).send(request)
