"""A small OpenAI-compatible server that is not Baton, on a real socket: its answers are what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Stream = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def piece(text: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, "delta": {"content": text}} | more])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


END = b"data: [DONE]\n\n"


async def three_tokens(response: web.StreamResponse, body: dict[str, Any]) -> None:
    """The usual answer, in two pieces."""
    await response.write(piece("a"))
    await asyncio.sleep(0.02)
    await response.write(piece("bc", finish_reason="length"))
    await response.write(usage(count_words(body), 3) + END)


def count_words(body: dict[str, Any]) -> int:
    """Its tokenizer: two tokens a word, and ten of its own."""
    said = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return 10 + 2 * len(said.split())


class StubServer:
    """stream: answers what is streamed. refuse: answered to that instead. bodies: what clients streamed, in order.
    is_baton: it has a cluster, of nobody. max_model_len: what it says of that."""

    def __init__(self) -> None:
        self.stream: Stream = three_tokens
        self.refuse: web.Response | None = None
        self.counts = True
        self.is_baton = False
        self.max_model_len: int | None = None
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked = asyncio.Event()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub", "max_model_len": self.max_model_len}]})

    async def _cluster(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": []}, status=200 if self.is_baton else 404)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            counted = {"usage": {"prompt_tokens": count_words(body)}} if self.counts else {}
            return web.json_response({"choices": [{"text": "a"}]} | counted)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.asked.set()
        if self.refuse is not None:
            return web.Response(body=self.refuse.body, status=self.refuse.status, content_type=self.refuse.content_type)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.stream(response, body)
        return response


@asynccontextmanager
async def stub_server() -> AsyncIterator[StubServer]:
    server, app = StubServer(), web.Application()
    app.router.add_get("/v1/models", server._models)
    app.router.add_get("/cluster", server._cluster)
    app.router.add_post("/v1/completions", server._answer)
    app.router.add_post("/v1/chat/completions", server._answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield server
    finally:
        await runner.cleanup()
