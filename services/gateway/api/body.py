"""From bytes to a checked body. Whatever is wrong with what a client sends ends here as an ApiError that names the
field."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Never, TypeVar

from aiohttp import web
from pydantic import ValidationError

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.schemas import (
    HARMLESS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_MESSAGE,
    Body,
    ChatBody,
    CompletionBody,
)

B = TypeVar("B", bound=Body)
MAX_SHOWN = 200
_SURROGATE = rb"\ud"


async def read_chat(request: web.Request, timeout_s: float) -> ChatBody:
    """The checked body of a chat request, or ApiError."""
    raw = drop_unsupported(await read_object(request, timeout_s), UNSUPPORTED_CHAT, "")
    messages = raw.get("messages")
    if isinstance(messages, list):
        raw["messages"] = [
            drop_unsupported(message, UNSUPPORTED_MESSAGE, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    return validate(ChatBody, raw)


async def read_completion(request: web.Request, timeout_s: float) -> CompletionBody:
    """The checked body of a completions request, or ApiError."""
    return validate(CompletionBody, drop_unsupported(await read_object(request, timeout_s), UNSUPPORTED_COMPLETION, ""))


async def read_object(request: web.Request, timeout_s: float) -> dict[str, Any]:
    """The JSON object in the body. 415 for another content type, 400 for anything but an object."""
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        raise ApiError(415, "The body must be JSON: set 'Content-Type: application/json'.", "unsupported_media_type")
    try:
        async with asyncio.timeout(timeout_s):
            data = await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {timeout_s:g} s.", "request_timeout") from error
    except web.RequestPayloadError as error:
        raise invalid("The body could not be read.", None, "invalid_body") from error
    try:
        parsed = json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not valid UTF-8 (byte {error.start}).", None, "invalid_utf8") from error
    except RecursionError as error:
        raise invalid("The body is nested too deeply.", None, "invalid_json") from error
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(parsed, dict):
        raise invalid("The body must be a JSON object.", None, "invalid_json")
    if _SURROGATE in data.lower():
        _refuse_surrogates(parsed)
    return parsed


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def drop_unsupported(raw: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """`raw` without the fields that Baton knows and does not serve; ApiError where one of them asks for something."""
    kept = dict(raw)
    for name in names:
        value = kept.pop(name, None)
        if value is None or (where and value == []) or value in HARMLESS.get(name, ()):
            continue
        raise invalid(f"'{where}{name}' is not supported by this server.", f"{where}{name}", "unsupported_parameter")
    return kept


def validate(kind: type[B], raw: dict[str, Any]) -> B:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise _explain(details[0]["loc"], details[0]["type"], details[0]["msg"]) from error


def _explain(loc: tuple[int | str, ...], kind: str, message: str) -> ApiError:
    param = _param(loc)
    if kind == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid(f"Invalid value for '{param}': {message}.", param, code)


def _param(loc: tuple[int | str, ...]) -> str:
    """`messages[0].role`, of bounded length and printable."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return shown(path)


def shown(text: str) -> str:
    """What a client sent, safe to be quoted back: printable ASCII of bounded length."""
    return text[:MAX_SHOWN].encode("ascii", "backslashreplace").decode()


_CAN_HOLD_TEXT = (str, dict, list)


def _refuse_surrogates(parsed: object) -> None:
    """Lone surrogates, which JSON can spell and UTF-8 cannot: no tokenizer could read them and no answer hold them."""
    open_: list[tuple[tuple[int | str, ...], object]] = [((), parsed)]
    while open_:
        loc, value = open_.pop()
        if isinstance(value, dict):
            open_.extend(((*loc, "(key)"), key) for key in value)
            open_.extend(((*loc, key), item) for key, item in value.items() if isinstance(item, _CAN_HOLD_TEXT))
        elif isinstance(value, list):
            open_.extend(((*loc, index), item) for index, item in enumerate(value) if isinstance(item, _CAN_HOLD_TEXT))
        elif isinstance(value, str) and not _is_unicode(value):
            where = _param(loc)
            raise invalid(f"'{where}' is not valid Unicode: it holds a lone surrogate.", where, "invalid_unicode")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
