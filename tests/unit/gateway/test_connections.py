"""Clients that leave, clients that do not read, and how bytes leave."""

import asyncio
import json
import socket
from typing import Any

import pytest

from shared.protocol.messages import FinishReason

DEADLINE_S = 10.0


async def open_request(gateway: Any, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.runner.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def started(gateway: Any) -> Any:
    await gateway.until(lambda: bool(gateway.generator.generations))
    return gateway.generation


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talks", [False, True])
async def test_a_client_that_leaves_ends_its_generation(gateway: Any, stream: bool, talks: bool) -> None:
    first = [tuple(gateway.say("abc", finish=None))] if talks else []
    gateway.generator.script = lambda request: [*first, asyncio.Event()]
    _, writer = await open_request(gateway, {"model": "toy", "prompt": "Say", "stream": stream})
    generation = await started(gateway)
    assert not generation.closed.is_set()
    writer.close()
    async with asyncio.timeout(DEADLINE_S):
        await generation.closed.wait()
    text = await gateway.metrics()
    assert 'baton_http_requests_total{route="completions",status="499"} 1.0' in text
    assert 'baton_http_errors_total{code="cancelled"} 1.0' in text
    assert "baton_http_active_requests 0.0" in text


async def test_all_prompts_of_a_client_that_leaves_end(gateway: Any) -> None:
    gateway.generator.script = lambda request: [asyncio.Event()]
    _, writer = await open_request(gateway, {"model": "toy", "prompt": ["a", "b", "c"]})
    await gateway.until(lambda: len(gateway.generator.generations) == 3)
    writer.transport.abort()
    async with asyncio.timeout(DEADLINE_S):
        for generation in gateway.generator.generations:
            await generation.closed.wait()


async def test_closing_is_not_cut_short_by_the_clients_leaving(gateway: Any) -> None:
    """The client goes while the generation is being closed after its last token."""
    gateway.generator.close_delay = 0.2
    _, writer = await open_request(gateway, {"model": "toy", "prompt": "Say"})
    generation = await started(gateway)
    await gateway.until(lambda: generation.num_delivered == 13)
    writer.transport.abort()
    async with asyncio.timeout(DEADLINE_S):
        await generation.closed.wait()


async def test_a_client_that_does_not_read_is_given_up(start: Any) -> None:
    gateway = await start(write_timeout_s=0.3)
    long = [tuple(gateway.say("x" * 1024, finish=None))] * 400
    gateway.generator.script = lambda request: long
    _, writer = await open_request(gateway, {"model": "toy", "prompt": "Say", "stream": True, "logprobs": 1})
    generation = await started(gateway)
    async with asyncio.timeout(DEADLINE_S):
        await generation.closed.wait()
    assert generation.num_delivered < len(long)
    await gateway.until(lambda: not gateway.runner.server.connections)
    writer.close()


async def test_a_body_that_does_not_arrive(start: Any) -> None:
    gateway = await start(read_timeout_s=0.1)
    host, port = gateway.runner.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    async with asyncio.timeout(DEADLINE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_batch_is_one_event_of_each_choice_in_one_chunk(gateway: Any) -> None:
    spoken = [gateway.say("abc", choice, FinishReason.LENGTH) for choice in range(3)]
    gateway.generator.script = lambda request: [tuple(event for one in spoken for event in one)]
    reader, writer = await open_request(gateway, {"model": "toy", "prompt": "Say", "stream": True, "n": 3})
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b"\r\n\r\n")
        size = int(await reader.readline(), 16)
        chunk = await reader.readexactly(size)
    assert chunk.count(b"data: ") == 3
    assert [json.loads(event[6:])["choices"][0]["text"] for event in chunk.split(b"\n\n")[:-1]] == ["abc"] * 3
    writer.close()


async def test_small_writes_are_not_delayed(gateway: Any) -> None:
    go = asyncio.Event()
    gateway.generator.script = lambda request: [go, tuple(gateway.say("abc"))]
    _, writer = await open_request(gateway, {"model": "toy", "prompt": "Say", "stream": True})
    await started(gateway)
    [connection] = gateway.runner.server.connections
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()


async def test_the_connection_serves_the_next_request(gateway: Any) -> None:
    for _ in range(3):
        await gateway.sse("/v1/completions", model="toy", prompt="Say")
        assert (await gateway.post("/v1/completions", model="toy", prompt=[]))[0] == 400
    assert len(gateway.http.connector._conns) == 1
