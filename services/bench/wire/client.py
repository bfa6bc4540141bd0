"""Sends one planned request to an OpenAI-compatible server and notes what comes back, and when."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from services.bench.figures.records import RequestRecord
from services.bench.plan.workload import PlannedRequest
from services.bench.wire.answer import Event, error_code, read_event
from services.bench.wire.sse import DONE, EventParser

Api = Literal["completions", "chat"]
ROUTES: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is asked. extra: fields of every request beyond those that OpenAI's API needs. max_model_len:
    where it says how long a prompt and its answer may be."""

    url: str
    api: Api
    model: str
    is_baton: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None

    @property
    def route(self) -> str:
        return self.url + ROUTES[self.api]

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        said: dict[str, Any] = (
            {"prompt": prompt} if self.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        )
        return {"model": self.model, "max_tokens": max_tokens, "temperature": 0} | said | self.extra


class Client:
    """Borrows the session. now: seconds of the clock that records are written in."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._target = target
        self.now = now

    async def send(self, planned: PlannedRequest, record: RequestRecord, began: float) -> None:
        """Fills `record`, whose times count from `began`. A failure is noted there and raises nothing; cancelled half
        way, the record keeps what had come by then."""
        body = self._target.body(planned.prompt, planned.max_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(self._target.route, json=body, headers=self._target.headers) as response:
                record.status = response.status
                record.path = response.headers.get("x-baton-path")
                if response.status != 200:
                    record.error = f"{response.status} {error_code(await response.text(errors='replace'))}".strip()
                elif response.content_type != "text/event-stream":
                    record.error = f"200 but no stream ({response.content_type})"
                else:
                    await self._listen(response, record, began)
        except TimeoutError:
            record.error = "timed out"
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error = f"connection: {type(error).__name__}"
        record.ended_s = self.now() - began
        record.outcome = "ok" if record.error is None else "error"

    async def _listen(self, response: aiohttp.ClientResponse, record: RequestRecord, began: float) -> None:
        """Until the server ends the answer. Events that one read brought have arrived at one time."""
        parser, ended, finished_s = EventParser(), False, None
        async for data in response.content.iter_any():
            arrived_s = self.now() - began
            for payload in parser.feed(data):
                if payload == DONE:
                    ended = True
                    continue
                event = read_event(payload)
                _take(event, record, arrived_s)
                if event.error is not None:
                    return
                finished_s = arrived_s if event.finished else finished_s
        if not ended:
            record.error = "stream: broke off"
        elif not record.chunk_s and finished_s is not None:
            record.chunk_s.append(finished_s)  # an answer without any text: its end is all there is


def _take(event: Event, record: RequestRecord, arrived_s: float) -> None:
    record.error = event.error
    if event.has_text:
        record.chunk_s.append(arrived_s)
    if event.completion_tokens is not None:
        record.prompt_tokens, record.completion_tokens = event.prompt_tokens, event.completion_tokens
    record.path = event.path or record.path
    record.timings = event.timings or record.timings
