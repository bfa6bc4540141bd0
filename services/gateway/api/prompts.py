"""Prompts as clients write them (text, token ids, conversations) to token ids."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from services.gateway.api.body import shown
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.limits import HttpLimits
from services.gateway.api.schemas import ChatBody, CompletionBody
from shared.text.tokenizer import TextModel

T = TypeVar("T")
_NORMALIZED = 4
"""Unicode normalization makes a text shorter at most so many times."""
_MESSAGE_CHARS = 32
"""What a template puts around each message, so that many empty ones do not pass for a short text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """echo: what its choices begin with; empty unless the client asked."""

    ids: tuple[int, ...]
    echo: str = ""


class PromptReader:
    """Immutable; shared by all requests of a gateway."""

    def __init__(self, model: TextModel, max_model_len: int, limits: HttpLimits) -> None:
        self._model = model
        self._limits = limits
        longest = max(map(len, model.vocabulary.pieces), default=1)
        self._max_chars = _NORMALIZED * max(1, longest) * max_model_len
        self._max_model_len = max_model_len

    async def chat(self, body: ChatBody) -> tuple[Prompt, ...]:
        """The one prompt of a conversation. ApiError, or InvalidRequest from the model's template."""
        if len(body.messages) > self._max_model_len:  # each costs a token at least
            raise self._too_long(f"there are {len(body.messages)} messages", "messages")
        messages = [
            {"role": _role(message.role), "content": _content(message.content, index)}
            for index, message in enumerate(body.messages)
        ]
        chars = sum(len(message["content"]) + _MESSAGE_CHARS for message in messages)
        ids = await self._compute(chars, "messages", lambda: self._model.apply_chat_template(messages))
        return (Prompt(tuple(ids)),)

    async def completion(self, body: CompletionBody) -> tuple[Prompt, ...]:
        """The prompts of a completions request, in order."""
        singles = _as_list(body.prompt)
        if len(singles) > self._limits.max_prompts:
            raise invalid(f"At most {self._limits.max_prompts} prompts are served at once.", "prompt")
        nested = isinstance(body.prompt, list) and singles is body.prompt
        return tuple(
            [
                await self._single(single, f"prompt[{index}]" if nested else "prompt", bool(body.echo))
                for index, single in enumerate(singles)
            ]
        )

    async def _single(self, single: Any, where: str, echo: bool) -> Prompt:
        if isinstance(single, str):
            ids = await self._compute(len(single), where, lambda: self._model.encode(single, add_special=True))
            text = single
        else:
            if len(single) >= self._max_model_len:
                raise self._too_long(f"the prompt has {len(single)}", where)
            ids = _token_ids(single, where, self._model.vocab_size)
            text = self._model.decode(ids) if echo else ""
        if not ids:
            raise invalid("The prompt is empty.", where)
        return Prompt(tuple(ids), text if echo else "")

    async def _compute(self, chars: int, where: str, work: Callable[[], T]) -> T:
        """`work`, in a thread where the text is long; refused unseen where no tokenizer could make it fit."""
        if chars > self._max_chars:
            raise self._too_long(f"the prompt has {chars} characters", where)
        if chars > self._limits.inline_encode_chars:
            return await asyncio.to_thread(work)
        return work()

    def _too_long(self, what: str, where: str) -> ApiError:
        message = f"This model's context holds {self._max_model_len} tokens; {what}."
        return ApiError(400, message, "context_length_exceeded", where)


def _as_list(prompt: Any) -> list[Any]:
    """A list of prompts from every form OpenAI allows; the list that was given where it is one already."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("'prompt' must be a string, token ids, or a list of either.", "prompt", "invalid_type")
    if not prompt:
        raise invalid("The prompt is empty.", "prompt")
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    return [prompt]


def _token_ids(ids: Any, where: str, vocab_size: int) -> list[int]:
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise invalid("A prompt given as a list must hold token ids.", f"{where}[{position}]", "invalid_type")
        if not 0 <= token < vocab_size:
            raise invalid(f"{str(token)[:24]} is not a token id of this model.", f"{where}[{position}]")
    return list(ids)


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _content(content: Any, index: int) -> str:
    """The text of a message; several text parts are joined by newlines."""
    where = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    if not isinstance(content, list):
        raise invalid("'content' must be a string or a list of parts.", where, "invalid_type")
    if not content:
        raise invalid("'content' is an empty list.", where)
    return "\n".join(_part(part, f"{where}[{position}]") for position, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid("A part must be an object.", where, "invalid_type")
    kind = part.get("type")
    if kind != "text":
        named = f"'{shown(kind)}'" if isinstance(kind, str) else "Such"
        raise invalid(
            f"{named} parts are not supported by this server, only 'text'.",
            f"{where}.type",
            "unsupported_value",
        )
    for name in part:
        if name not in ("type", "text"):
            field = f"{where}.{shown(name)}"
            raise invalid(f"Unrecognized request argument supplied: {field}", field, "unknown_parameter")
    if not isinstance(part.get("text"), str):
        raise invalid("'text' must be a string.", f"{where}.text", "invalid_type")
    return str(part["text"])
