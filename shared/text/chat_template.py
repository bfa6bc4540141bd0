"""Renders a conversation with the model's own chat template, in a sandbox.

What clients send is untrusted, the template is the model's. Text of a client that spells a control token must not
become one: otherwise any user could end their turn and speak as the system. The tokenizer finds control tokens by
their text, so every such spelling inside a client's strings gets a mark behind its first character while the template
runs, and the result is cut at the marks: no part holds the whole spelling. The parts are to be tokenized one by one.
The mark is a noncharacter that the client's text does not hold. Where no string spells a control token, which is nearly
always, nothing is marked and there is one part.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.runtime.errors import InvalidRequest

_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. ValueError where the template itself does not compile."""

    def __init__(
        self,
        source: str,
        *,
        named_tokens: Mapping[str, str],
        control_tokens: Sequence[str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """named_tokens: variables such as `bos_token`. control_tokens: the texts that clients may not use as tokens."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        self._named_tokens = dict(named_tokens)
        spellings = "|".join(re.escape(token) for token in control_tokens if len(token) > 1)
        self._control = re.compile(f"(?={spellings})") if spellings else None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[str]:
        """The rendered conversation, in parts that are to be tokenized one by one.

        A content given as a list of text parts is joined by newlines. variables cannot replace the messages or the
        named tokens. InvalidRequest with the template's message where it refuses the conversation or fails on it.
        """
        conversation = {**variables, "messages": [_with_text_content(message) for message in messages]}
        mark = self._mark_for(conversation)
        if mark is not None:
            conversation = self._marked(conversation, mark)
        try:
            text = self._template.render({**conversation, **self._named_tokens})
        except Exception as error:
            # The template is the model's and its input the client's: whatever fails in there, this conversation cannot
            # be shown to this model. Nothing of ours runs inside.
            raise InvalidRequest(f"the model's chat template failed: {error}", param="messages") from error
        return [text] if mark is None else text.split(mark)

    def _mark_for(self, conversation: Mapping[str, Any]) -> str | None:
        """A mark to use, or None where no string spells a control token."""
        control = self._control
        if control is None:
            return None
        strings = list(_strings(conversation))
        if not any(control.search(text) for text in strings):
            return None
        for mark in _MARKS:
            if not any(mark in text for text in strings):
                return mark
        raise InvalidRequest("the messages hold every noncharacter from U+FDD0 to U+FDEF", param="messages")

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._control is not None
            cuts = [found.start() + 1 for found in self._control.finditer(value)]
            return mark.join(value[a:b] for a, b in pairwise([0, *cuts, len(value)]))
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _with_text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": "\n".join(_part_text(part) for part in content)}


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest("message content may hold only text parts", param="messages")
    return text


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # As transformers does it: readable characters, and no HTML escapes, which the models have not seen.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
