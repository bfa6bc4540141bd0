"""Resumable streams at the HTTP door: what a client sees, the same wherever and however it comes back."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.history import History, Past
from services.gateway.keys import Keyring
from services.gateway.streams.desk import Streams
from services.gateway.streams.journal import Journal
from shared.bus.memory import MemoryHub
from shared.protocol.messages import FinishReason
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.errors import EngineError
from shared.runtime.tasks import TaskOwner
from shared.text.tokenizer import TextModel

ALICE, ALSO_ALICE, BOB = "sk-alice-0123456789", "sk-alice-9876543210", "sk-bob-0123456789"
KEYS = f"alice:{ALICE},alice:{ALSO_ALICE},bob:{BOB}"
SPEECH = "Höhe: 8849 m ⛰️ über dem Meer. STOP and never this."
GRACE_S = 30.0
Batch = tuple[TokenEvent, ...]


class Talk:
    """Implements `ResumableGeneration`: says all tokens behind `past`, `width` of each choice in a batch; after
    `pause_at` of them it waits until it is told to go on."""

    def __init__(self, speaker: "Speaker", request: GenerationRequest, past: Past) -> None:
        self.request = request
        self.path = "pending"
        self.stopped: set[int] = set()
        self.closed = asyncio.Event()
        self.left = False
        self._speaker = speaker
        self._past = past

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._run()

    async def _run(self) -> AsyncIterator[Batch]:
        speaker, n = self._speaker, self.request.sampling.n
        places = [len(tokens) for tokens in self._past.history.tokens]
        words = speaker.words(self.request)
        while open_ := [c for c in range(n) if places[c] < len(words[c]) and c not in self.stopped]:
            if max(places) >= speaker.pause_at:
                await speaker.go_on.wait()
            if speaker.fails_at is not None and max(places) >= speaker.fails_at:
                raise EngineError("the model could not be computed")
            batch: list[TokenEvent] = []
            for choice in open_:
                batch += words[choice][places[choice] : places[choice] + speaker.width]
                places[choice] += speaker.width
            self.path = "remote"
            yield tuple(batch)
            await asyncio.sleep(0)

    def timings(self) -> dict[str, object]:
        return {"queue_s": 0.25, "recoveries": 0}

    def stop_choice(self, choice: int) -> None:
        self.stopped.add(choice)

    @property
    def cached_tokens(self) -> int:
        return 2

    def progress(self) -> Past:
        return Past(History.empty(self.request.sampling.n), "identity", self.path, cached_tokens=2)

    def leave(self) -> None:
        self.left = True

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class Speaker:
    """A generator: every choice says the text, from a letter further on than the one before."""

    text: TextModel
    speech: str = SPEECH
    width: int = 1
    pause_at: int = 1 << 30
    fails_at: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    talks: list[Talk] = field(default_factory=list)

    def generate(self, request: GenerationRequest, past: Past | None = None) -> Talk:
        self.talks.append(Talk(self, request, past or Past(History.empty(request.sampling.n))))
        return self.talks[-1]

    def words(self, request: GenerationRequest) -> list[list[TokenEvent]]:
        by_byte = {self.text.token_bytes(index): index for index in range(256)}
        said = []
        for choice in range(request.sampling.n):
            tokens = [by_byte[bytes([byte])] for byte in self.speech.encode()[choice:]] + [257]
            last = len(tokens) - 1
            said.append(
                [TokenEvent(choice, k, t, None, FinishReason.STOP if k == last else None) for k, t in enumerate(tokens)]
            )
        return said


@dataclass
class Pair:
    """Two gateways of one cluster, each with a speaker of its own."""

    hub: MemoryHub
    gateways: list[Any]
    speakers: list[Speaker]
    counters: list[Counters]


StartPair = Callable[..., Any]


@pytest.fixture
async def start_pair(start: Any, text_model: TextModel) -> AsyncIterator[StartPair]:
    owner = TaskOwner()

    async def start_pair(keys: str = "", grace_s: float = GRACE_S, **speaker: Any) -> Pair:
        hub = MemoryHub()
        pair = Pair(hub, [], [], [])
        for number in range(2):
            bus, counters = hub.client(f"gateway-{number}"), Counters()
            deps = Deps(f"gateway-{number}", bus, LoopClock(), owner.spawn, owner.spawn_vital, lambda: None, counters)
            speaking = Speaker(text_model, **speaker)
            journal = Journal(bus, deps.clock, grace_s, 60.0)
            streams = Streams(deps, journal, speaking, text_model, grace_s, 100)
            await streams.start()
            ring = Keyring(keys, None) if keys else None
            pair.gateways.append(await start(streams=streams, keys=ring))
            pair.speakers.append(speaking)
            pair.counters.append(counters)
        return pair

    async with owner:
        yield start_pair
        owner.cancel_all()


@pytest.fixture
async def pair(start_pair: StartPair) -> Pair:
    made: Pair = await start_pair()
    return made


@dataclass
class Event:
    id: str | None
    data: Any


def events_of(body: bytes) -> list[Event]:
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        match = re.fullmatch(r"(?:id: ([0-9.]+)\n)?data: (.*)", part)
        assert match is not None, part
        data = match[2] if match[2] == "[DONE]" else json.loads(match[2])
        found.append(Event(match[1], data))
    return found


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    said = [c for event in events if event.data != "[DONE]" for c in event.data["choices"] if c["index"] == choice]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in said)


BODY: dict[str, Any] = {"model": "toy", "prompt": "Say", "stream": True, "max_tokens": 200}


async def open_stream(gateway: Any, *, path: str = "/v1/completions", key: str = "", **body: Any) -> tuple[str, Any]:
    """The stream's id and its answer, which is not read yet."""
    body = BODY | {"baton": {"resumable": True}} | body
    if path.endswith("chat/completions"):
        body = {k: v for k, v in body.items() if k != "prompt"} | {"messages": [{"role": "user", "content": "Say"}]}
    answer = await gateway.http.post(gateway.url + path, json=body, headers=bearer(key))
    assert answer.status == 200, await answer.text()
    stream = answer.headers["x-baton-stream-id"]
    assert re.fullmatch("[0-9a-f]{32}", stream)
    return stream, answer


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def whole(gateway: Any, **body: Any) -> tuple[str, list[Event]]:
    stream, answer = await open_stream(gateway, **body)
    async with answer:
        return stream, events_of(await answer.read())


async def come_back(
    gateway: Any, stream: str, after: str | None = None, key: str = "", **headers: str
) -> tuple[int, Any]:
    query = {} if after is None else {"after": after}
    url = f"{gateway.url}/v1/streams/{stream}"
    async with gateway.http.get(url, params=query, headers=bearer(key) | headers) as answer:
        if answer.status != 200:
            return answer.status, (await answer.json())["error"]
        assert answer.headers["x-baton-stream-id"] == stream
        return answer.status, events_of(await answer.read())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_event_says_how_far_the_client_is(pair: Pair, path: str) -> None:
    _, events = await whole(pair.gateways[0], path=path, stream_options={"include_usage": True})
    assert events[-1] == Event(None, "[DONE]")
    ids = [event.id for event in events[:-1]]
    num_tokens = len(SPEECH.encode()) + 1
    assert ids[-1] == ids[-2] == str(num_tokens)
    assert [int(one or "") for one in ids] == sorted(int(one or "") for one in ids)
    assert events[-2].data["usage"]["completion_tokens"] == num_tokens
    assert events[-2].data["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert text_of(events) == SPEECH


async def test_from_every_event_on_the_rest_is_the_same_everywhere(pair: Pair) -> None:
    """Characters that are cut by a token's border, and a stop string, are where they were."""
    body = {"stop": ["STOP"], "stream_options": {"include_usage": True}, "baton": {"resumable": True, "timings": True}}
    stream, events = await whole(pair.gateways[0], **body)
    assert text_of(events) == SPEECH.partition("STOP")[0]
    assert pair.speakers[0].talks[0].stopped == {0}, "whoever computes it is told"
    for position, event in enumerate(events[:-1]):
        for gateway in pair.gateways:
            status, rest = await come_back(gateway, stream, event.id)
            assert status == 200
            assert text_of(events[: position + 1]) + text_of(rest) == text_of(events), event.id
            assert rest[-1].data == "[DONE]"
            assert rest[-2].data == events[-2].data


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
async def test_the_ids_do_not_depend_on_the_batches(start_pair: StartPair, width: int) -> None:
    pair: Pair = await start_pair()
    pair.speakers[1].width = width
    body = {"stop": ["STOP"], "n": 2}
    _, by_one = await whole(pair.gateways[0], **body)
    stream, wide = await whole(pair.gateways[1], **body)
    for event in by_one[:-1]:
        _, rest = await come_back(pair.gateways[0], stream, event.id)
        at = by_one.index(event)
        for choice in range(2):
            assert text_of(by_one[: at + 1], choice) + text_of(rest, choice) == text_of(by_one, choice)
    assert [text_of(wide, c) for c in range(2)] == [text_of(by_one, c) for c in range(2)]
    assert wide[-2].id == by_one[-2].id


async def test_several_prompts_and_choices_have_a_number_each(pair: Pair) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "stop": ["STOP"]}
    stream, events = await whole(pair.gateways[0], **body)
    assert all(event.id is not None and len(event.id.split(".")) == 4 for event in events[:-1])
    for at in range(0, len(events) - 1, 5):
        _, rest = await come_back(pair.gateways[at % 2], stream, events[at].id)
        for choice in range(4):
            assert text_of(events[: at + 1], choice) + text_of(rest, choice) == text_of(events, choice)


async def test_a_client_leaves_and_comes_back_while_it_goes_on(start_pair: StartPair) -> None:
    for number in (0, 1):
        pair: Pair = await start_pair(pause_at=20)
        stream, answer = await open_stream(pair.gateways[0])
        first = b""
        while first.count(b"id: ") < 10:
            first += await answer.content.readany()
        answer.close()
        seen = events_of(first[: first.rindex(b"\n\n") + 2])
        await pair.gateways[0].until(lambda pair=pair: pair.counters[0]["streams_detached"] == 1)
        pair.speakers[0].go_on.set()
        pair.speakers[1].go_on.set()
        status, rest = await come_back(pair.gateways[number], stream, seen[-1].id)
        assert (status, text_of(seen) + text_of(rest)) == (200, SPEECH)
        assert rest[0].data["id"] == seen[0].data["id"]
        assert rest[0].data["created"] == seen[0].data["created"]
        assert pair.speakers[0].talks[0].left == bool(number)
        assert pair.counters[number]["streams_resumed"] == 1
        await pair.gateways[0].until(lambda pair=pair: pair.speakers[0].talks[0].closed.is_set())


async def test_who_did_not_ask_for_it_is_not_written_down(pair: Pair) -> None:
    headers, _ = await pair.gateways[0].sse("/v1/completions", model="toy", prompt="Say")
    assert "x-baton-stream-id" not in headers
    assert pair.hub.stores == {}


async def test_the_header_of_a_browser_is_newer_than_its_address(pair: Pair) -> None:
    stream, events = await whole(pair.gateways[0])
    status, rest = await come_back(pair.gateways[0], stream, "3", **{"Last-Event-ID": str(events[-3].id)})
    assert status == 200
    assert [event.id for event in rest[:-1]] == [events[-2].id]


@pytest.mark.parametrize("after", ["x", "1.1", "-1", "1.", "1e3", "١", "99999999999", "1" * 70_000])
async def test_a_place_that_cannot_be(pair: Pair, after: str) -> None:
    stream, _ = await whole(pair.gateways[0])
    for gateway in pair.gateways:
        status, error = await come_back(gateway, stream, after[:4000])
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "after")


async def test_a_place_beyond_what_was_sent(pair: Pair) -> None:
    stream, events = await whole(pair.gateways[0])
    for gateway in pair.gateways:
        assert (await come_back(gateway, stream, events[-2].id))[0] == 200
        status, error = await come_back(gateway, stream, str(int(events[-2].id or "") + 1))
        assert (status, error["param"]) == (400, "after")


async def test_unknown_and_other_keys_streams_look_the_same(start_pair: StartPair) -> None:
    pair: Pair = await start_pair(keys=KEYS, pause_at=5)
    stream, answer = await open_stream(pair.gateways[0], key=ALICE)
    refusals = []
    for gateway in pair.gateways:
        for name, key in (
            (stream, BOB),
            (stream, ALSO_ALICE),
            ("0" * 32, ALICE),
            ("x", ALICE),
            (stream.upper(), ALICE),
        ):
            refusals.append(await come_back(gateway, name, key=key))
    assert {json.dumps(refusal) for refusal in refusals} == {json.dumps(refusals[0])}
    status, error = refusals[0]
    assert (status, error["code"], error["type"]) == (404, "stream_not_found", "invalid_request_error")
    pair.speakers[0].go_on.set()
    async with answer:
        assert text_of(events_of(await answer.read())) == SPEECH
    assert (await come_back(pair.gateways[1], stream, key=ALICE))[0] == 200
    assert (await come_back(pair.gateways[1], stream))[0] == 401


async def test_it_needs_a_stream(pair: Pair) -> None:
    status, body, _ = await pair.gateways[0].post(
        "/v1/completions", model="toy", prompt="Say", baton={"resumable": True}
    )
    assert (status, body["error"]["param"]) == (400, "baton.resumable")


async def test_without_a_journal_it_is_refused_and_the_rest_is_served(pair: Pair) -> None:
    pair.hub.stores = None
    gateway = pair.gateways[0]
    status, body, _ = await gateway.post("/v1/completions", **BODY, baton={"resumable": True})
    assert (status, body["error"]["code"], body["error"]["type"]) == (501, "not_resumable", "server_error")
    assert (await come_back(gateway, "0" * 32))[0] == 501
    _, events = await gateway.sse("/v1/completions", model="toy", prompt="Say")
    assert events[-1] == b"[DONE]"


async def test_a_failure_before_the_first_byte_has_its_status(start_pair: StartPair) -> None:
    pair: Pair = await start_pair(fails_at=0)
    status, body, headers = await pair.gateways[0].post("/v1/completions", **BODY, baton={"resumable": True})
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert (await come_back(pair.gateways[1], headers["x-baton-stream-id"]))[1]["code"] == "engine_error"


async def test_a_failure_ends_the_stream_for_whoever_reads_it(start_pair: StartPair) -> None:
    pair: Pair = await start_pair(fails_at=5)
    stream, events = await whole(pair.gateways[0])
    assert events[-1].data["error"]["code"] == "engine_error"
    assert (events[-2].id, events[-1].id) == ("5", None)
    for gateway in pair.gateways:
        _, again = await come_back(gateway, stream, "3")
        assert again[-2].id == "5"
        assert again[-1].data == events[-1].data


async def test_a_second_connection_ends_the_first(start_pair: StartPair) -> None:
    pair: Pair = await start_pair(pause_at=5)
    stream, answer = await open_stream(pair.gateways[0])
    await pair.gateways[0].until(lambda: pair.speakers[0].talks != [])
    second = asyncio.get_running_loop().create_task(come_back(pair.gateways[0], stream))
    async with answer:
        first = events_of(await answer.read())
    assert first[-1].data["error"]["code"] == "stream_moved"
    pair.speakers[0].go_on.set()
    assert text_of((await second)[1]) == SPEECH


async def test_grace_that_is_over(start_pair: StartPair) -> None:
    pair: Pair = await start_pair(grace_s=0.4, pause_at=5)
    stream, answer = await open_stream(pair.gateways[0])
    answer.close()
    await pair.gateways[0].until(lambda: pair.counters[0]["streams_expired"] == 1)
    await pair.gateways[0].until(lambda: pair.speakers[0].talks[0].closed.is_set())
    assert not pair.speakers[0].talks[0].left
    assert (await come_back(pair.gateways[0], stream))[0] == 404
    assert (await come_back(pair.gateways[1], stream))[0] == 404


async def test_metrics_count_a_token_once(pair: Pair) -> None:
    stream, events = await whole(pair.gateways[0])
    before = await pair.gateways[0].metrics()
    await come_back(pair.gateways[0], stream, events[-2].id)
    after = await pair.gateways[0].metrics()
    tokens = [line for line in before.splitlines() if line.startswith("baton_http_tokens_total")]
    assert tokens
    assert tokens == [line for line in after.splitlines() if line.startswith("baton_http_tokens_total")]
    assert 'baton_http_requests_total{route="streams",status="200"} 1.0' in after
