"""Answers of both routes, whole or streamed, in one shape, so that a test compares what they say and not how."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class ChoiceSeen:
    """logprobs: of the chosen tokens, where they were asked for."""

    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Seen:
    """What a client got to know. error: the body's error object, also that of a stream that broke off; `ended`: the
    answer was complete (a stream said so)."""

    status: int
    path: str = ""
    choices: dict[int, ChoiceSeen] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    baton: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    ended: bool = False

    @property
    def texts(self) -> list[str]:
        return [self.choices[index].text for index in sorted(self.choices)]

    @property
    def finishes(self) -> list[str | None]:
        return [self.choices[index].finish for index in sorted(self.choices)]

    @property
    def tokens(self) -> list[list[int]]:
        return [self.choices[index].token_ids for index in sorted(self.choices)]

    @property
    def bytes_moved(self) -> int:
        """By `baton.timings` of the one prompt."""
        assert self.baton is not None, self
        return sum(self.baton["timings"]["bytes"].values())


def see_body(status: int, path: str, body: dict[str, Any]) -> Seen:
    """An answer that was not streamed, or an error."""
    seen = Seen(status, path, error=body.get("error"), ended=True)
    if seen.error is None:
        for choice in body["choices"]:
            _add(seen, choice, choice["message"]["content"] if "message" in choice else choice["text"])
        seen.usage, seen.baton = body["usage"], body.get("baton")
        _check_path(seen)
    return seen


class StreamSeen:
    """Takes the lines of a stream, one by one; `seen` is what is known so far."""

    def __init__(self, status: int, path: str) -> None:
        self.seen = Seen(status, path)

    def take(self, line: str) -> None:
        seen = self.seen
        if not line:
            return
        assert line.startswith("data: "), line
        assert not seen.ended, f"after the end: {line}"
        if line == "data: [DONE]":
            seen.ended = True
            _check_path(seen)
            return
        chunk = json.loads(line.removeprefix("data: "))
        assert seen.error is None, f"after an error: {chunk}"
        if "error" in chunk:
            seen.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            _add(seen, choice, choice["delta"].get("content", "") if "delta" in choice else choice["text"])
        seen.usage = chunk.get("usage") or seen.usage
        seen.baton = chunk.get("baton") or seen.baton


def see_stream(status: int, path: str, lines: Iterable[str]) -> Seen:
    stream = StreamSeen(status, path)
    for line in lines:
        stream.take(line)
    return stream.seen


def _add(seen: Seen, part: dict[str, Any], text: str) -> None:
    choice = seen.choices.setdefault(part["index"], ChoiceSeen())
    assert choice.finish is None, f"after the choice's end: {part}"
    choice.text += text
    choice.finish = part["finish_reason"]
    choice.token_ids += part.get("token_ids", [])
    choice.prompt_ids += part.get("prompt_token_ids", [])
    logprobs = part.get("logprobs")
    if logprobs is not None and "content" in logprobs:
        choice.logprobs += [entry["logprob"] for entry in logprobs["content"]]
    elif logprobs is not None:
        choice.logprobs += logprobs["token_logprobs"]


def _check_path(seen: Seen) -> None:
    """The header may say `pending`; the last body decides. It may say something else where workers were lost since."""
    if seen.baton is not None:
        timings = seen.baton.get("timings")
        recovered = isinstance(timings, dict) and timings["recoveries"]
        assert recovered or seen.path in (seen.baton["path"], "pending")
        seen.path = seen.baton["path"]
