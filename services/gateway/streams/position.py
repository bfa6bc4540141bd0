"""K: how far a client has read. One number a choice, in the order of the answer: the tokens of it that went into what
was sent. It is the same on every gateway, whatever the batches were: `12`, and of several choices `12.7`."""

import re
from collections.abc import Sequence

from services.gateway.api.errors import invalid

Position = tuple[int, ...]
_POSITION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*", re.ASCII)
_MOST_CHARS = 65536


def format_position(position: Sequence[int]) -> str:
    return ".".join(map(str, position))


def parse_position(text: str | None, num_choices: int, param: str) -> Position:
    """None: from the first token on. ApiError 400 for what no event of such a stream ever said."""
    if text is None:
        return (0,) * num_choices
    if len(text) > _MOST_CHARS or not _POSITION.fullmatch(text):
        raise invalid(f"'{param}' must be the id of an event of this stream, as in '12' or '12.7'.", param)
    position = tuple(map(int, text.split(".")))
    if len(position) != num_choices:
        raise invalid(f"'{param}' has {len(position)} numbers, and this stream has {num_choices} choices.", param)
    return position


def check_position(position: Position, said: Sequence[int], param: str) -> None:
    """said: how many tokens of each choice there are. ApiError 400 where the client claims to have more."""
    if any(claimed > there for claimed, there in zip(position, said, strict=True)):
        raise invalid(
            f"'{param}' is {format_position(position)}, beyond what was sent ({format_position(said)}).", param
        )
