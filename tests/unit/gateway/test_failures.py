"""Failures of the cluster, before and behind the first byte."""

import asyncio
import json
from typing import Any

import openai
import pytest

from shared.protocol.messages import FinishReason
from shared.runtime.errors import (
    BatonError,
    Corrupt,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NoWorker,
    PeerLost,
    QueueFull,
)

BODY: dict[str, Any] = {"model": "toy", "prompt": "Say"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "retry_after"),
    [
        (NoWorker("nobody"), 503, "no_worker", "server_error", "1"),
        (QueueFull("full", retry_after_s=7.2), 429, "queue_full", "rate_limit_error", "7"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", "server_error", None),
        (EngineError("broken"), 500, "engine_error", "server_error", None),
        (PeerLost("gone"), 503, "peer_lost", "server_error", "1"),
        (Corrupt("bits"), 500, "corrupt_state", "server_error", None),
        (InvalidRequest("bad", param="prompt"), 400, "invalid_request", "invalid_request_error", None),
        (BatonError("?"), 500, "internal_error", "server_error", None),
        (RuntimeError("secret"), 500, "internal_error", "server_error", None),
    ],
)
async def test_before_the_first_byte(
    gateway: Any, error: Exception, status: int, code: str, kind: str, retry_after: str | None, stream: bool
) -> None:
    gateway.generator.script = lambda request: [error]
    async with gateway.http.post(f"{gateway.url}/v1/completions", json=BODY | {"stream": stream}) as response:
        body = await response.json()
        assert response.status == status
        assert response.headers.get("Retry-After") == retry_after
        assert response.headers["x-baton-path"] == "pending"
        assert response.headers["x-baton-request-id"].startswith("req-")
    assert (body["error"]["code"], body["error"]["type"]) == (code, kind)
    assert "secret" not in json.dumps(body)
    assert gateway.generation.closed.is_set()


@pytest.mark.parametrize(("error", "code"), [(PeerLost("gone"), "peer_lost"), (RuntimeError("x"), "internal_error")])
async def test_behind_the_first_byte(gateway: Any, error: Exception, code: str) -> None:
    gateway.generator.script = lambda request: [tuple(gateway.say("abc", finish=None)), error]
    _, events = await gateway.sse("/v1/completions", **BODY)
    chunk, failure = [json.loads(event) for event in events]
    assert chunk["choices"][0]["text"] == "abc"
    assert chunk["choices"][0]["finish_reason"] is None
    assert failure["error"]["code"] == code
    assert gateway.generation.closed.is_set()
    stream = await gateway.client.completions.create(**BODY, stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_one_of_several_prompts_fails(gateway: Any) -> None:
    def script(request: Any) -> list[Any]:
        if request.prompt == (1,):
            return [NoWorker("nobody")]
        return [tuple(gateway.say("abc", finish=FinishReason.LENGTH))]

    gateway.generator.script = script
    status, body, _ = await gateway.post("/v1/completions", model="toy", prompt=[[1], [2]])
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert all(generation.closed.is_set() for generation in gateway.generator.generations)


async def test_failures_are_counted(gateway: Any) -> None:
    gateway.generator.script = lambda request: [tuple(gateway.say("abc", finish=None)), PeerLost("gone")]
    await gateway.sse("/v1/completions", **BODY)
    await gateway.post("/v1/completions", **BODY)
    await gateway.post("/v1/completions", model="toy")
    async with gateway.http.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    assert 'baton_http_errors_total{code="peer_lost"} 2.0' in text
    assert 'baton_http_errors_total{code="missing_required_parameter"} 1.0' in text
    assert 'baton_http_requests_total{route="completions",status="503"} 1.0' in text
    assert 'baton_http_requests_total{route="completions",status="400"} 1.0' in text
    assert "baton_http_active_requests 0.0" in text


async def test_too_many_requests(start: Any) -> None:
    gateway = await start(max_active=1)
    go = asyncio.Event()
    gateway.generator.script = lambda request: [go, tuple(gateway.say("abc"))]
    async with asyncio.TaskGroup() as group, asyncio.timeout(10):
        first = group.create_task(gateway.post("/v1/completions", **BODY))
        await gateway.until(lambda: bool(gateway.generator.generations))
        status, body, headers = await gateway.post("/v1/completions", **BODY)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "1")
        go.set()
    assert first.result()[0] == 200
    assert (await gateway.post("/v1/completions", **BODY))[0] == 200
