"""Requests that no client library would send, over a plain socket: every route answers with its own error body and the
right status, never with a 5xx, and what is not HTTP costs its sender the connection and nobody else anything.
HYPOTHESIS_PROFILE=deep sends ten times as many.
"""

import asyncio
import json
import os
import random
from typing import Any
from urllib.parse import urlsplit

COUNT = 8000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 800
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/cluster", "/version"]
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW"]
BODY = json.dumps({"model": "toy", "prompt": "Say", "max_tokens": 4}).encode()
HEADERS = [
    ("x-request-id", "a b\tc"),
    ("x-request-id", "é" * 300),
    ("X-Baton-Request-Id", "req-" + "0" * 500),
    ("Authorization", "Bearer"),
    ("Authorization", "Bearer " + "k" * 5000),
    ("Authorization", "Basic ====="),
    ("Accept", "*/*;q=zzz"),
    ("Accept-Encoding", "gzip;q=x, \x01"),
    ("Content-Type", "application/json; charset=utf-7"),
    ("Content-Type", "multipart/form-data"),
    ("Content-Encoding", "br"),
    ("Transfer-Encoding", "gzip, chunked"),
    ("Expect", "100-continue"),
    ("Expect", "the unexpected"),
    ("Range", "bytes=0-1"),
    ("Upgrade", "websocket"),
    ("Connection", "upgrade, close, keep-alive"),
    ("Cookie", "=;=;" * 100),
    ("Host", ""),
]


async def say(url: str, data: bytes, *, is_whole: bool) -> bytes:
    """What is answered. is_whole: the request is complete, so an answer must come; of another one we say that this was
    all, which an HTTP server may take as the client's leaving."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    answer = b""
    try:
        writer.write(data)
        await writer.drain()
        if not is_whole:
            writer.write_eof()
        async with asyncio.timeout(10):
            while part := await reader.read(1 << 16):
                answer += part
                if answers(answer) and is_whole:
                    break
    except ConnectionError:
        return answer
    finally:
        writer.close()
    return answer


def request(rng: random.Random, method: str, path: str) -> tuple[bytes, bool]:
    """And whether it is whole."""
    headers = [("Host", "x"), ("Content-Type", "application/json"), ("Connection", "close")]
    odd = rng.sample(HEADERS, rng.randrange(3))
    body = BODY if method in ("POST", "PUT", "PATCH") else b""
    length = str(rng.choice([len(body)] * 6 + [0, len(body) + 5, 10**19, -1]))
    names = {name for name, _ in odd}
    lines = [*(pair for pair in headers if pair[0] not in names), *odd, ("Content-Length", length)]
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines)
    is_whole = length == str(len(body)) and not {"Expect", "Transfer-Encoding", "Upgrade"} & names
    return head.encode("utf-8", "replace") + b"\r\n" + body, is_whole


def answers(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """(status, head, body) of the first answer, if it is there; interim answers are skipped."""
    while data.startswith(b"HTTP/1.1 1"):
        data = data.partition(b"\r\n\r\n")[2]
    head, end, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    if not end or (len(body) < length and not data.startswith(b"HTTP/1.1 2")):
        return []
    return [(int(head.split(b" ", 2)[1]), head.lower(), body)]


async def test_odd_requests_of_every_route(gateway: Any) -> None:
    rng = random.Random(12)
    statuses: set[int] = set()
    for number in range(COUNT):
        method, path = rng.choice(METHODS), rng.choice(ROUTES)
        path += rng.choice(["", "", "", "/", "?a=%zz", "?" + "x" * 3000, "//..", "%00", "#x"])
        said, is_whole = request(rng, method, path)
        for status, head, body in answers(await say(gateway.url, said, is_whole=is_whole)):
            statuses.add(status)
            assert status < 500, (number, said[:300], body[:300])
            is_ours = b"application/json" in head and method != "HEAD"
            if status >= 400 and is_ours and b"transfer-encoding" not in head:
                error = json.loads(body)["error"]
                assert error["message"]
                assert error["type"]
    assert {200, 400, 404, 405} <= statuses
    status, body, _ = await gateway.post("/v1/completions", model="toy", prompt="Say")
    assert (status, body["choices"][0]["text"]) == (200, "Hello, world")


async def test_what_is_not_http(gateway: Any) -> None:
    rng = random.Random(13)
    for _ in range(COUNT // 2):
        right, _ = request(rng, "POST", "/v1/completions")
        spoiled = bytearray(right)
        how = rng.randrange(4)
        if how == 0:
            for _ in range(rng.randrange(1, 6)):
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        elif how == 1:
            del spoiled[rng.randrange(len(spoiled)) :]
        elif how == 2:
            spoiled = bytearray(rng.randbytes(rng.randrange(1, 2000)))
        else:
            place = rng.randrange(len(spoiled))
            spoiled[place:place] = rng.choice([b"\r\n", b"\0", b"\r\n\r\n", b" " * 9000, b"\xff" * 20])
        for status, _, body in answers(await say(gateway.url, bytes(spoiled), is_whole=False)):
            assert status < 500, (bytes(spoiled)[:300], body[:300])
    status, _, _ = await gateway.post("/v1/completions", model="toy", prompt="Say")
    assert status == 200
