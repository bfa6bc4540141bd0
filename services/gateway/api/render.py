"""Answers in the two shapes of OpenAI's API, whole and as server-sent events. Pure: from deltas to bytes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api.choices import Choice, Delta, TokenMark
from services.gateway.api.plan import Plan

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; this is what OpenAI's API says for impossible tokens."""

TokenBytes = Callable[[int], bytes]
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when all choices have ended. baton: the client asked to be told."""

    usage: Mapping[str, object]
    baton: Mapping[str, object] | None


class Renderer:
    """Writes one answer. `created` is seconds since 1970."""

    def __init__(self, plan: Plan, created: int, token_bytes: TokenBytes) -> None:
        self._plan = plan
        self._token_bytes = token_bytes
        kind = "chat.completion" if plan.chat else "text_completion"
        prefix = "chatcmpl" if plan.chat else "cmpl"
        self._identity = {
            "id": f"{prefix}-{plan.request_id.removeprefix('req-')}",
            "object": kind,
            "created": created,
            "model": plan.model,
        }
        chunk = self._identity | ({"object": "chat.completion.chunk"} if plan.chat else {})
        self._chunk_start = "data: " + _to_json(chunk)[:-1]
        self._chunk_end = ',"usage":null}\n\n' if plan.include_usage else "}\n\n"

    def chunks(self, deltas: Sequence[Delta], ids: Sequence[str] | None = None) -> bytes:
        """One event for each delta, as one piece of bytes. ids: of a stream that can be resumed."""
        marks = [""] * len(deltas) if ids is None else [f"id: {one}\n" for one in ids]
        events = (
            f'{mark}{self._chunk_start},"choices":[{_to_json(self._chunk_choice(delta))}]{self._chunk_end}'
            for mark, delta in zip(marks, deltas, strict=True)
        )
        return "".join(events).encode()

    def tail(self, ending: Ending, last: str | None = None) -> bytes:
        """What follows the last choice: usage and `baton` where asked for, and the end mark. last: the id of the last
        event, where the stream can be resumed: who lost these gets them again."""
        extra: dict[str, object] = {}
        if self._plan.include_usage:
            extra["usage"] = ending.usage
        if ending.baton is not None:
            extra["baton"] = ending.baton
        if not extra:
            return DONE
        mark = "" if last is None else f"id: {last}\n"
        return f'{mark}{self._chunk_start},"choices":[],{_to_json(extra)[1:]}\n\n'.encode() + DONE

    def whole(self, choices: Sequence[Choice], ending: Ending) -> bytes:
        """The body of an answer that is not streamed."""
        body: dict[str, object] = dict(self._identity)
        body["choices"] = [self._whole_choice(choice) for choice in choices]
        body["usage"] = ending.usage
        if ending.baton is not None:
            body["baton"] = ending.baton
        return _to_json(body).encode()

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.choice.index}
        if self._plan.chat:
            role = {"role": "assistant"} if delta.first else {}
            content = {"content": delta.text} if delta.text or delta.first else {}
            choice["delta"] = role | content
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.marks)
        choice["finish_reason"] = delta.finish
        if self._plan.token_ids:
            choice["token_ids"] = delta.tokens
            if delta.first:
                choice["prompt_token_ids"] = delta.choice.prompt
        return choice

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        rendered: dict[str, Any] = {"index": choice.index}
        if self._plan.chat:
            rendered["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            rendered["text"] = choice.text
        rendered["logprobs"] = self._logprobs(choice.marks)
        rendered["finish_reason"] = choice.finish
        if self._plan.token_ids:
            rendered["token_ids"] = choice.tokens
            rendered["prompt_token_ids"] = choice.prompt
        return rendered

    def _logprobs(self, marks: Sequence[TokenMark]) -> dict[str, object] | None:
        if self._plan.logprobs is None or not marks:
            return None
        return self._chat_logprobs(marks) if self._plan.chat else self._completion_logprobs(marks)

    def _chat_logprobs(self, marks: Sequence[TokenMark]) -> dict[str, object]:
        content = []
        for mark in marks:
            entry = self._chat_entry(mark.token, mark.logprob.logprob)
            entry["top_logprobs"] = [self._chat_entry(token, logprob) for token, logprob in mark.logprob.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _chat_entry(self, token: int, logprob: float) -> dict[str, object]:
        data = self._token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _completion_logprobs(self, marks: Sequence[TokenMark]) -> dict[str, object]:
        return {
            "tokens": [self._name(mark.token) for mark in marks],
            "token_logprobs": [_finite(mark.logprob.logprob) for mark in marks],
            "top_logprobs": [self._top(mark) for mark in marks],
            "text_offset": [mark.offset for mark in marks],
        }

    def _top(self, mark: TokenMark) -> dict[str, float]:
        """The best tokens and, always, the chosen one: up to one more than asked for."""
        top = {self._name(token): _finite(logprob) for token, logprob in mark.logprob.top}
        return top | {self._name(mark.token): _finite(mark.logprob.logprob)}

    def _name(self, token: int) -> str:
        """The token's text; `bytes:\\xe2\\x82` where it is a part of a character."""
        data = self._token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def error_event(body: bytes) -> bytes:
    """A failure after the first byte. No end mark follows it."""
    return b"data: " + body + b"\n\n"
