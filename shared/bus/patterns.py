"""Subjects, wildcards and sizes by NATS's rules, so that the in-memory bus accepts and matches what NATS does."""

import re
from functools import lru_cache

from shared.bus.base import MAX_PAYLOAD_BYTES

_TOKEN = r"[^\s.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_PATTERN = re.compile(rf"(?:(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?|>)")


@lru_cache(maxsize=4096)
def check_subject(subject: str) -> None:
    """Raises ValueError unless a message can be sent to `subject`: non-empty tokens, no wildcards."""
    if not _SUBJECT.fullmatch(subject):
        raise ValueError(f"not a subject to send to: {subject!r}")


def check_payload(subject: str, data: bytes) -> None:
    """Raises ValueError if a message cannot hold `data`."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{len(data)} bytes for {subject}: more than a message may hold ({MAX_PAYLOAD_BYTES})")


def check_pattern(pattern: str) -> None:
    """Raises ValueError unless `pattern` can be subscribed to."""
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(f"not a subject to subscribe to: {pattern!r}")


def matches(pattern: str, subject: str) -> bool:
    """Does a subscription to `pattern` get what is sent to `subject`?"""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        return len(given) > len(wanted) and _tokens_match(wanted, given[: len(wanted)])
    return len(wanted) == len(given) and _tokens_match(wanted, given)


def _tokens_match(wanted: list[str], given: list[str]) -> bool:
    return all(want in ("*", token) for want, token in zip(wanted, given, strict=True))
