"""The routes that only tell, and what every answer carries."""

from typing import Any

import openai
import pytest


async def test_models(gateway: Any) -> None:
    assert [model.id async for model in gateway.client.models.list()] == ["toy", "org/toy"]
    assert (await gateway.client.models.retrieve("toy")).owned_by == "baton"
    async with gateway.http.get(f"{gateway.url}/v1/models/org/toy") as response:
        assert (await response.json())["id"] == "org/toy"
    with pytest.raises(openai.NotFoundError) as failure:
        await gateway.client.models.retrieve("other")
    assert (failure.value.code, failure.value.param) == ("model_not_found", "model")


async def test_health(gateway: Any) -> None:
    async with gateway.http.get(f"{gateway.url}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok", "mode": "separated"})
    gateway.reason = "no decode worker is alive"
    async with gateway.http.get(f"{gateway.url}/health") as response:
        assert response.status == 503
        assert (await response.json())["reason"] == "no decode worker is alive"


@pytest.mark.parametrize("mode", ["colocated", "chunked"])
async def test_without_prefill_workers_every_path_is_local_and_remote_is_refused(start: Any, mode: str) -> None:
    gateway = await start(mode=mode, default_path="auto")
    async with gateway.http.get(f"{gateway.url}/health") as response:
        assert await response.json() == {"status": "ok", "mode": mode}
    for baton in ({}, {"path": "auto", "strict": True}, {"path": "local"}):
        await gateway.post("/v1/completions", model="toy", prompt="Say", baton=baton)
        assert gateway.generation.request.path == "local"
    asked = len(gateway.generator.generations)
    status, body, _ = await gateway.post("/v1/completions", model="toy", prompt="Say", baton={"path": "remote"})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "baton.path", "unsupported_value")
    assert mode in body["error"]["message"]
    assert len(gateway.generator.generations) == asked


async def test_cluster_and_version(gateway: Any) -> None:
    async with gateway.http.get(f"{gateway.url}/cluster") as response:
        assert await response.json() == {"workers": []}
    async with gateway.http.get(f"{gateway.url}/version") as response:
        assert (await response.json()).keys() == {"version"}


async def test_metrics(gateway: Any) -> None:
    await gateway.post("/v1/completions", model="toy", prompt="Say")
    async with gateway.http.get(f"{gateway.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    for line in (
        'baton_http_requests_total{route="completions",status="200"} 1.0',
        'baton_http_paths_total{path="remote"} 1.0',
        'baton_http_tokens_total{kind="prompt"} 3.0',
        'baton_http_tokens_total{kind="cached"} 2.0',
        'baton_http_tokens_total{kind="completion"} 13.0',
        "baton_time_to_first_token_seconds_count 1.0",
        "baton_inter_token_seconds_count 12.0",
        "baton_request_seconds_count 1.0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/metrics", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/completions", 415),
    ],
)
async def test_every_answer_names_its_request(gateway: Any, method: str, path: str, status: int) -> None:
    async with gateway.http.request(method, gateway.url + path, headers={"x-request-id": "mine-1"}) as response:
        assert response.status == status
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-baton-path"] == "pending"
        assert response.headers["x-baton-request-id"].startswith("req-")
        if status >= 400:
            assert (await response.json())["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", ["x" * 129, "é", "a b", ""])
async def test_odd_client_ids_are_not_echoed(gateway: Any, name: str) -> None:
    async with gateway.http.get(f"{gateway.url}/health", headers={"x-request-id": name}) as response:
        assert response.status == 200
        assert "x-request-id" not in response.headers
