"""What clients get wrong: the right status, code and field, and never a 5xx."""

import json
import random
from typing import Any

import pytest

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "toy", "prompt": "Say"}
UNKNOWN, VALUE, TYPE = "unknown_parameter", "invalid_value", "invalid_type"
MISSING, UNSUPPORTED, LONG = "missing_required_parameter", "unsupported_parameter", "context_length_exceeded"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | fields]}


BOTH = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"model": 5}, 400, TYPE, "model"),
    ({"model": None}, 400, TYPE, "model"),
    ({"max_tokens": 0}, 400, VALUE, "max_tokens"),
    ({"max_tokens": -1}, 400, VALUE, "max_tokens"),
    ({"max_tokens": "5"}, 400, TYPE, "max_tokens"),
    ({"max_tokens": 5.5}, 400, TYPE, "max_tokens"),
    ({"max_tokens": True}, 400, TYPE, "max_tokens"),
    ({"max_tokens": 10**30}, 400, LONG, "max_tokens"),
    ({"max_tokens": 512}, 400, LONG, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, VALUE, "min_tokens"),
    ({"n": 0}, 400, VALUE, "n"),
    ({"n": 129}, 400, VALUE, "n"),
    ({"temperature": -0.1}, 400, VALUE, "temperature"),
    ({"temperature": 2.1}, 400, VALUE, "temperature"),
    ({"temperature": "hot"}, 400, TYPE, "temperature"),
    ({"top_p": 1.1}, 400, VALUE, "top_p"),
    ({"top_k": -2}, 400, VALUE, "top_k"),
    ({"min_p": 2}, 400, VALUE, "min_p"),
    ({"presence_penalty": 2.5}, 400, VALUE, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, VALUE, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, VALUE, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, 400, VALUE, "logit_bias.x"),
    ({"logit_bias": {"258": 1}}, 400, VALUE, "logit_bias.258"),
    ({"logit_bias": {"5": 101}}, 400, VALUE, "logit_bias.5"),
    ({"logit_bias": {"5": 1, "05": 2}}, 400, VALUE, "logit_bias"),
    ({"logit_bias": [1]}, 400, TYPE, "logit_bias"),
    ({"stop": 5}, 400, TYPE, "stop"),
    ({"stop": ""}, 400, VALUE, "stop"),
    ({"stop": ["a", ""]}, 400, VALUE, "stop[1]"),
    ({"stop": ["a", 1]}, 400, TYPE, "stop[1]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, VALUE, "stop"),
    ({"stop": "x" * 1025}, 400, VALUE, "stop"),
    ({"stop": "\ud800"}, 400, "invalid_unicode", "stop"),
    ({"stop_token_ids": [258]}, 400, VALUE, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, 400, VALUE, "stop_token_ids[0]"),
    ({"seed": 1 << 64}, 400, VALUE, "seed"),
    ({"seed": 1.5}, 400, TYPE, "seed"),
    ({"priority": "high"}, 400, TYPE, "priority"),
    ({"priority": 1.5}, 400, TYPE, "priority"),
    ({"priority": True}, 400, TYPE, "priority"),
    ({"priority": 1 << 31}, 400, VALUE, "priority"),
    ({"priority": -(1 << 31) - 1}, 400, VALUE, "priority"),
    ({"stream": "yes"}, 400, TYPE, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, VALUE, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, UNKNOWN, "stream_options.x"),
    ({"user": 5}, 400, TYPE, "user"),
    ({"user": "\udfff"}, 400, "invalid_unicode", "user"),
    ({"metadata": {"a": 1}}, 400, TYPE, "metadata.a"),
    ({"baton": {"path": "moon"}}, 400, VALUE, "baton.path"),
    ({"baton": {"strict": 1}}, 400, TYPE, "baton.strict"),
    ({"baton": {"kv_precision": "int3"}}, 400, VALUE, "baton.kv_precision"),
    ({"baton": {"kv_precision": 8}}, 400, VALUE, "baton.kv_precision"),
    ({"baton": {"cache_salt": ""}}, 400, VALUE, "baton.cache_salt"),
    ({"baton": {"cache_salt": "two words"}}, 400, VALUE, "baton.cache_salt"),
    ({"baton": {"cache_salt": "\ud800"}}, 400, "invalid_unicode", "baton.cache_salt"),
    ({"baton": {"cache_salt": "x" * 101}}, 400, VALUE, "baton.cache_salt"),
    ({"baton": {"cache_salt": 7}}, 400, TYPE, "baton.cache_salt"),
    ({"baton": {"speed": 1}}, 400, UNKNOWN, "baton.speed"),
    ({"baton": "x"}, 400, TYPE, "baton"),
    ({"tempreature": 1}, 400, UNKNOWN, "tempreature"),
    ({"\ud800": 1}, 400, "invalid_unicode", "(key)"),
    ({"é": 1}, 400, UNKNOWN, "\\xe9"),
]
CHAT_ONLY = [
    ({"messages": []}, 400, VALUE, "messages"),
    ({"messages": "Hi"}, 400, TYPE, "messages"),
    ({"messages": None}, 400, TYPE, "messages"),
    ({"messages": ["Hi"]}, 400, TYPE, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, 400, MISSING, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, MISSING, "messages[0].content"),
    (message(role="wizard"), 400, VALUE, "messages[0].role"),
    (message(role="tool"), 400, VALUE, "messages[0].role"),
    (message(role=5), 400, VALUE, "messages[0].role"),
    (message(content=None), 400, MISSING, "messages[0].content"),
    (message(content=5), 400, TYPE, "messages[0].content"),
    (message(content=[]), 400, VALUE, "messages[0].content"),
    (message(content=["x"]), 400, TYPE, "messages[0].content[0]"),
    (message(content=[{"type": "image_url"}]), 400, "unsupported_value", "messages[0].content[0].type"),
    (message(content=[{"type": "input_audio"}]), 400, "unsupported_value", "messages[0].content[0].type"),
    (message(content=[{"type": "text"}]), 400, TYPE, "messages[0].content[0].text"),
    (message(content=[{"type": "text", "text": "x", "y": 1}]), 400, UNKNOWN, "messages[0].content[0].y"),
    (message(content="\ud800"), 400, "invalid_unicode", "messages[0].content"),
    (message(content="x" * 512), 400, LONG, "messages"),
    (message(content="x" * 100_000), 400, LONG, "messages"),
    (message(tool_calls=[{}]), 400, UNSUPPORTED, "messages[0].tool_calls"),
    (message(colour="red"), 400, UNKNOWN, "messages[0].colour"),
    ({"tools": [{}]}, 400, UNSUPPORTED, "tools"),
    ({"functions": []}, 400, UNSUPPORTED, "functions"),
    ({"response_format": {"type": "json_object"}}, 400, UNSUPPORTED, "response_format"),
    ({"modalities": ["text", "audio"]}, 400, UNSUPPORTED, "modalities"),
    ({"audio": {"voice": "x"}}, 400, UNSUPPORTED, "audio"),
    ({"max_completion_tokens": 0}, 400, VALUE, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, 400, VALUE, "max_tokens"),
    ({"max_completion_tokens": 600}, 400, LONG, "max_completion_tokens"),
    ({"logprobs": 1}, 400, TYPE, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, VALUE, "top_logprobs"),
    ({"top_logprobs": 2}, 400, VALUE, "top_logprobs"),
    ({"prompt": "x"}, 400, UNKNOWN, "prompt"),
]
TEXT_ONLY = [
    ({"prompt": None}, 400, TYPE, "prompt"),
    ({"prompt": 5}, 400, TYPE, "prompt"),
    ({"prompt": ""}, 400, VALUE, "prompt"),
    ({"prompt": []}, 400, VALUE, "prompt"),
    ({"prompt": [[]]}, 400, VALUE, "prompt[0]"),
    ({"prompt": ["a", ""]}, 400, VALUE, "prompt[1]"),
    ({"prompt": ["a", 5]}, 400, TYPE, "prompt[0]"),
    ({"prompt": [5, "a"]}, 400, TYPE, "prompt[1]"),
    ({"prompt": [True]}, 400, TYPE, "prompt[0]"),
    ({"prompt": [1.5]}, 400, TYPE, "prompt[0]"),
    ({"prompt": [258]}, 400, VALUE, "prompt[0]"),
    ({"prompt": [1, -1]}, 400, VALUE, "prompt[1]"),
    ({"prompt": [[1], [2, 258]]}, 400, VALUE, "prompt[1][1]"),
    ({"prompt": ["a"] * 17}, 400, VALUE, "prompt"),
    ({"prompt": "\ud800"}, 400, "invalid_unicode", "prompt"),
    ({"prompt": "x" * 512}, 400, LONG, "prompt"),
    ({"prompt": [1] * 512}, 400, LONG, "prompt"),
    ({"prompt": "x" * 100_000}, 400, LONG, "prompt"),
    ({"suffix": "x"}, 400, UNSUPPORTED, "suffix"),
    ({"best_of": 2}, 400, "unsupported_value", "best_of"),
    ({"logprobs": 21}, 400, VALUE, "logprobs"),
    ({"logprobs": True}, 400, TYPE, "logprobs"),
    ({"echo": True, "logprobs": 1}, 400, "unsupported_value", "echo"),
    ({"messages": []}, 400, UNKNOWN, "messages"),
]
CASES = (
    [("/v1/chat/completions", CHAT | change, *rest) for change, *rest in BOTH + CHAT_ONLY]
    + [("/v1/completions", TEXT | change, *rest) for change, *rest in BOTH + TEXT_ONLY]
    + [
        ("/v1/chat/completions", {"model": "toy"}, 400, MISSING, "messages"),
        ("/v1/completions", {"model": "toy"}, 400, MISSING, "prompt"),
        ("/v1/completions", {"prompt": "Say"}, 400, MISSING, "model"),
    ]
)


async def test_table(gateway: Any) -> None:
    """One server for the whole table; every row is told apart in the message."""
    for path, body, status, code, param in CASES:
        async with gateway.http.post(gateway.url + path, json=body) as response:
            answer = await response.json()
        error = answer.get("error", {})
        found = (response.status, error.get("code"), error.get("param"), error.get("type"))
        assert found == (status, code, param, "invalid_request_error"), (path, json.dumps(body)[:200], answer)
        assert error["message"]
    assert gateway.generator.generations == []


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'"x"', 400, "invalid_json"),
        (b'{"model": NaN}', 400, "invalid_json"),
        (b'{"temperature": 1e999, "model": "toy", "prompt": "x"}', 400, "invalid_value"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_utf8"),
        (b"\xff\xfe{\x00}\x00", 400, "invalid_utf8"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"a":' * 50_000, 400, "invalid_json"),
        (b" " * 5000, 413, "request_too_large"),
    ],
)
async def test_bodies_that_are_not_json(start: Any, data: bytes, status: int, code: str) -> None:
    gateway = await start(body_bytes=4999 if status == 413 else 1 << 20)
    headers = {"Content-Type": "application/json"}
    async with gateway.http.post(f"{gateway.url}/v1/completions", data=data, headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "nonsense", ""],
)
async def test_content_types(gateway: Any, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    async with gateway.http.post(
        f"{gateway.url}/v1/completions", data=json.dumps(TEXT).encode(), headers=headers
    ) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"


async def test_a_body_that_claims_to_be_compressed(gateway: Any) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with gateway.http.post(
        f"{gateway.url}/v1/completions", data=b"not gzip", headers=headers, chunked=True
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/chat", "/v1/completions/"])
async def test_unknown_routes(gateway: Any, path: str) -> None:
    status, body, _ = await gateway.post(path, model="toy")
    assert (status, body["error"]["code"], body["error"]["type"]) == (404, "not_found", "invalid_request_error")


async def test_wrong_method(gateway: Any) -> None:
    async with gateway.http.delete(f"{gateway.url}/v1/chat/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


FIELDS = sorted(
    {key for _, body, *_ in CASES for key in body}
    | {"top_logprobs", "echo", "logprobs", "ignore_eos", "tool_choice", "best_of"}
)


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    simple = [None, True, False, 0, 1, -1, 7, 1 << 70, 0.5, -1e300, "", "Say", "\ud800", "\x00", "é€🙂", "x" * 600, "5"]
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ["role", "content", "type", "text", "path", "strict", "5", "", "\ud800", "include_usage"]
    return {rng.choice(keys): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}


async def test_random_bodies_never_fail_the_server(gateway: Any) -> None:
    rng = random.Random(20240607)
    statuses = set()
    for number in range(2000):
        path, base = rng.choice([("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
        body: Any = dict(base)
        for _ in range(rng.randrange(1, 4)):
            body[rng.choice(FIELDS)] = odd_value(rng)
        if rng.random() < 0.05:
            body = odd_value(rng)
        data = json.dumps(body).encode()
        if rng.random() < 0.1:
            place = rng.randrange(len(data))
            data = data[:place] + rng.randbytes(3) + data[place + 1 :]
        headers = {"Content-Type": "application/json"}
        async with gateway.http.post(gateway.url + path, data=data, headers=headers) as response:
            text = await response.text()
        statuses.add(response.status)
        assert response.status < 500, (number, data[:300], text)
        assert response.status == 200 or json.loads(text)["error"]["message"]
    assert {200, 400} <= statuses


async def test_many_empty_messages_are_refused_unread(gateway: Any) -> None:
    """Each costs the template some tokens; the event loop must not find that out the long way."""
    messages = [{"role": "user", "content": ""}] * 20_000
    status, body, _ = await gateway.post("/v1/chat/completions", model="toy", messages=messages)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, LONG, "messages")
    status, body, _ = await gateway.post("/v1/completions", model="toy", prompt=[1] * 100_000)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, LONG, "prompt")


async def test_too_many_biases_are_refused(gateway: Any) -> None:
    biases = {str(token): 0.0 for token in range(1025)}
    status, body, _ = await gateway.post("/v1/completions", model="toy", prompt="Say", logit_bias=biases)
    assert (status, body["error"]["param"].split(".")[0]) == (400, "logit_bias")
