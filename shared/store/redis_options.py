"""How Redis is reached, out of one address, and what its own settings say about the blocks in it."""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from shared.store.resp import RedisAddress, Reply

_PREFIX = re.compile(r"[\w.:{}/-]*", re.ASCII)
CONFIG_NAMES = ("appendonly", "appendfsync", "save", "maxmemory", "maxmemory-policy", "proto-max-bulk-len")

_KINDS: dict[str, Callable[[str], Any]] = {
    "prefix": str,
    "timeout_s": float,
    "connect_s": float,
    "connections": int,
    "ca_file": str,
    "cert_file": str,
}


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """prefix: of the names of all our keys; others' keys beside them are let alone. timeout_s: a call's whole time.
    connect_s: of that, what a new connection may take. connections: calls that run at once. ca_file: PEM, trusted
    instead of the system's authorities. cert_file: PEM, our own certificate and its key."""

    address: RedisAddress
    prefix: str = "baton:"
    timeout_s: float = 10.0
    connect_s: float = 3.0
    connections: int = 4
    ca_file: str = ""
    cert_file: str = ""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("a prefix is made of letters, digits and . : _ - / { }")
        if not (0 < self.timeout_s < inf and 0 < self.connect_s < inf and self.connections > 0):
            raise ValueError("time limits and the number of connections are more than nothing")

    @classmethod
    def parse(cls, url: str) -> Self:
        """An address of `RedisAddress`, and the fields above, and `database`, as its query. ValueError for others."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        address = RedisAddress.of(parts, int(query.pop("database", 0)))
        if unknown := query.keys() - _KINDS.keys():
            raise ValueError(f"no such option of Redis: {', '.join(sorted(unknown))}")
        return cls(address, **{name: _KINDS[name](text) for name, text in query.items()})

    def tls_context(self) -> ssl.SSLContext | None:
        """OSError where a file cannot be read."""
        if not self.address.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.cert_file:
            context.load_cert_chain(self.cert_file)
        return context


def texts_of(answer: Reply) -> dict[str, str]:
    """An answer to CONFIG GET; empty where the server does not tell."""
    if not isinstance(answer, list):
        return {}
    texts = [word.decode(errors="replace") if isinstance(word, bytes) else "" for word in answer]
    return dict(zip(texts[::2], texts[1::2], strict=False))


def durability_of(config: dict[str, str]) -> str:
    """config: the server's, empty where it does not tell."""
    if not config:
        return "A block that was put survives what the Redis server is set up to survive; it does not tell."
    return f"{_persistence(config)} {_eviction(config)}"


def _persistence(config: dict[str, str]) -> str:
    if config.get("appendonly") == "yes":
        fsync = config.get("appendfsync")
        if fsync == "always":
            return "A block that was put survives the Redis server's end and a loss of power (appendfsync always)."
        lost = "the last second" if fsync == "everysec" else "what the system had not written yet"
        return (
            "A block that was put survives the Redis server's end; a loss of its machine's power costs "
            f"{lost} (appendfsync {fsync})."
        )
    if save := config.get("save"):
        return f"A block that was put survives the Redis server's end once a snapshot has it (save {save})."
    return "Nothing survives the Redis server's end: it writes nothing to its disk."


def _eviction(config: dict[str, str]) -> str:
    policy = config.get("maxmemory-policy", "")
    if policy in ("", "noeviction"):
        return "It evicts nothing."
    return f"It evicts blocks when its memory is full ({policy})."
