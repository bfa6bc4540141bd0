"""`baton chat`: a conversation in the terminal over the gateway's own HTTP API."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_CONNECT_TIMEOUT_S = 10.0


class ChatError(Exception):
    """What the gateway said, or that it said nothing."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str
    model: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.2
    path: str = "auto"
    api_key: str | None = None


@dataclass(slots=True)
class _Answer:
    text: str = ""
    path: str = "?"
    timings: dict[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None


def chat(options: ChatOptions, say: str | None = None) -> None:
    """Until /exit, the end of input or Ctrl-C at the prompt; Ctrl-C in an answer stops that answer. With `say`, one
    question. Raises ChatError.

    Lines are read between runs of the loop: a thread that reads could not be interrupted.
    """
    with asyncio.Runner() as runner:
        session = runner.run(_open(options.api_key))
        try:
            model = options.model or runner.run(_served_model(session, options.url))
            history = [{"role": "system", "content": options.system}] if options.system else []
            if say is not None:
                question = [*history, {"role": "user", "content": say}]
                print(_footer(runner.run(_ask(session, options, model, question))), file=sys.stderr)
                return
            print(f"{model} at {options.url}   /new forgets, /exit ends", file=sys.stderr)
            _converse(runner, session, options, model, history)
        except KeyboardInterrupt:
            print()
        finally:
            runner.run(session.close())


def _converse(
    runner: asyncio.Runner,
    session: aiohttp.ClientSession,
    options: ChatOptions,
    model: str,
    start: list[dict[str, str]],
) -> None:
    history = list(start)
    while (text := _read_line()) is not None and text.strip() not in ("/exit", "/quit"):
        if text.strip() == "/new":
            history = list(start)
        elif text.strip():
            history.append({"role": "user", "content": text})
            try:
                answer = runner.run(_ask(session, options, model, history))
            except (ChatError, KeyboardInterrupt) as error:
                history.pop()
                print(f"\n{error}" if isinstance(error, ChatError) else "\n(stopped)", file=sys.stderr)
                continue
            history.append({"role": "assistant", "content": answer.text})
            print(_footer(answer), file=sys.stderr)


async def _open(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, headers=headers)


async def _served_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status == 401:
                raise ChatError(f"{url} wants an API key: give it with --api-key or OPENAI_API_KEY")
            if response.status != 200:
                raise ChatError(f"{url} answers {response.status}: {(await response.text())[:200]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        why = f"nothing answers at {url} ({error}); start a cluster with `baton up`, or give --url"
        raise ChatError(why) from error
    except (LookupError, ValueError) as error:
        raise ChatError(f"{url} is no Baton gateway") from error


async def _ask(
    session: aiohttp.ClientSession, options: ChatOptions, model: str, history: list[dict[str, str]]
) -> _Answer:
    body = {
        "model": model,
        "messages": history,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "baton": {"path": options.path, "timings": True},
    }
    answer = _Answer()
    try:
        async with session.post(f"{options.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ChatError(_message(await response.text()) or f"status {response.status}")
            answer.path = response.headers.get("x-baton-path", "?")
            async for event in _events(response.content):
                _take(answer, event)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatError(f"the connection broke: {error}") from error
    print()
    return answer


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for raw in content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _take(answer: _Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ChatError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", []):
        piece = choice.get("delta", {}).get("content") or ""
        answer.text += piece
        print(piece, end="", flush=True)
    told = event.get("baton") or {}
    answer.path = told.get("path", answer.path)
    answer.timings = told.get("timings", answer.timings)
    usage = event.get("usage") or {}
    answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)


def _footer(answer: _Answer) -> str:
    parts = [f"path {answer.path}"]
    if answer.num_tokens is not None:
        parts.append(f"{answer.num_tokens} tokens")
    for key, label in (("first_token_s", "first token"), ("transfer_s", "transfer")):
        value = answer.timings.get(key)
        if isinstance(value, int | float):
            parts.append(f"{label} {value * 1000:.0f} ms")
    return f"  ({', '.join(parts)})"


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


def _read_line() -> str | None:
    try:
        return input("\n› ")
    except EOFError:
        return None
