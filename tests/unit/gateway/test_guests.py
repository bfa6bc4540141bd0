"""A gateway that goes: nobody new is let in, streams may finish, and what is left ends with an error, never as done."""

import asyncio
import json
from typing import Any

import pytest

from services.gateway.api.guests import Guests
from shared.protocol.messages import FinishReason
from shared.runtime.errors import ShuttingDown


def held(gateway: Any, release: asyncio.Event, said_before: str = "Hel") -> None:
    """Every answer says this much, and the rest once released."""
    before, after = gateway.say(said_before, finish=None), gateway.say("lo")
    later = [
        event.__class__(0, len(before) + k, e.token, e.logprob, e.finish)
        for k, (event, e) in enumerate(zip(after, after, strict=True))
    ]
    gateway.generator.script = lambda request: [
        *[(event,) for event in before],
        release,
        *[(event,) for event in later],
    ]


async def test_a_closed_gateway_refuses_politely_and_finishes_its_streams(start: Any) -> None:
    guests, release = Guests(), asyncio.Event()
    gateway = await start(guests=guests)
    held(gateway, release)
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(gateway.sse("/v1/completions", model="toy", prompt="Say"))
        await gateway.until(lambda: gateway.generator.generations and gateway.generation.num_delivered == 3)
        guests.close()
        leaving = group.create_task(guests.gone())
        status, body, headers = await gateway.post("/v1/completions", model="toy", prompt="Say")
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert int(headers["Retry-After"]) >= 1
        assert not leaving.done()
        release.set()
    _, events = stream.result()
    assert events[-1] == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == "Hello"
    assert choices[-1]["finish_reason"] == "stop"


async def test_what_is_left_ends_with_an_error_event(start: Any) -> None:
    guests = Guests()
    gateway = await start(guests=guests)
    held(gateway, asyncio.Event())
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(gateway.sse("/v1/completions", model="toy", prompt="Say"))
        await gateway.until(lambda: gateway.generator.generations and gateway.generation.num_delivered == 3)
        guests.evict()
    _, events = stream.result()
    error = next(json.loads(event)["error"] for event in events if b'"error"' in event)
    assert error["code"] == "shutting_down"
    assert b'finish_reason": "' not in b"".join(events)
    assert FinishReason.STOP.value.encode() not in b"".join(events)
    await asyncio.wait_for(guests.gone(), 5)
    assert gateway.generation.closed.is_set()


async def test_an_answer_in_one_piece_becomes_an_error(start: Any) -> None:
    guests = Guests()
    gateway = await start(guests=guests)
    held(gateway, asyncio.Event(), said_before="")
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(gateway.post("/v1/completions", model="toy", prompt=["one", "two"]))
        await gateway.until(lambda: len(gateway.generator.generations) == 2)
        guests.evict()
    status, body, headers = asked.result()
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert "Retry-After" in headers
    assert all(generation.closed.is_set() for generation in gateway.generator.generations)


async def test_a_body_that_does_not_come_holds_nobody_up(start: Any) -> None:
    guests = Guests()
    gateway = await start(guests=guests)
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    await gateway.until(lambda: guests.num_inside == 1)
    guests.evict()
    assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
    await asyncio.wait_for(guests.gone(), 5)
    writer.close()


async def test_who_sits_down_late_is_shown_out_too() -> None:
    guests = Guests()
    guests.evict()
    with pytest.raises(ShuttingDown):
        async with guests.seated():
            raise AssertionError
    other = Guests()
    with pytest.raises(TimeoutError):  # somebody else's time limit stays one
        async with asyncio.timeout(0), other.seated():
            await asyncio.sleep(60)
