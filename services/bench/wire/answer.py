"""What a server says, in OpenAI's shapes: one event of a stream, and errors. Pure; takes nothing on trust."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ERROR_CHARS = 80


@dataclass(frozen=True, slots=True)
class Event:
    """has_text: a choice says something, be it an answer or a thought. finished: a choice has ended."""

    has_text: bool = False
    finished: bool = False
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    path: str | None = None
    timings: Mapping[str, Any] | None = None


def read_event(payload: str) -> Event:
    """One `data:` of a stream. What is no such event becomes an error."""
    try:
        body = json.loads(payload)
    except ValueError:
        return Event(error="stream: not JSON")
    if not isinstance(body, dict):
        return Event(error="stream: not an object")
    if body.get("error"):
        return Event(error=f"stream: {error_code(payload)}")
    choices = [choice for choice in _list(body.get("choices")) if isinstance(choice, dict)]
    usage, baton = _dict(body.get("usage")), _dict(body.get("baton"))
    return Event(
        has_text=any(_says_something(choice) for choice in choices),
        finished=any(choice.get("finish_reason") for choice in choices),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        path=baton.get("path"),
        timings=_dict(baton.get("timings")) or None,
    )


def error_code(text: str) -> str:
    """The code in an OpenAI error body, else its type, else the first words of whatever it is."""
    try:
        error = json.loads(text)["error"]
        return str(error.get("code") or error.get("type") or error["message"])[:_ERROR_CHARS]
    except (ValueError, LookupError, TypeError, AttributeError):
        return " ".join(text.split())[:_ERROR_CHARS]


def error_message(text: str) -> str:
    """What the server says for people to read."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]


def _says_something(choice: dict[str, Any]) -> bool:
    delta = _dict(choice.get("delta"))
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
