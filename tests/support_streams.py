"""A client of resumable streams: it reads, leaves, and comes back for the rest, at whichever gateway it likes."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlparse

from tests.support_client import poll


@dataclass
class Read:
    """What one connection brought. ids: of each event that had one; events: the JSON of each, but the end mark."""

    status: int
    headers: Mapping[str, str]
    ids: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    ended: bool = False
    broken: bool = False

    @property
    def stream(self) -> str:
        return self.headers["x-baton-stream-id"]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, tokens_of([self]).values()))


def tokens_of(reads: list[Read]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for choice in _choices(reads):
        found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


def texts_of(reads: list[Read]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in _choices(reads):
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def finishes_of(reads: list[Read]) -> dict[int, str]:
    """Each choice ends once, with its last event."""
    found: dict[int, str] = {}
    for choice in _choices(reads):
        assert choice["index"] not in found, choice
        if choice["finish_reason"] is not None:
            found[choice["index"]] = choice["finish_reason"]
    return found


def logprobs_of(reads: list[Read]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for choice in _choices(reads):
        if choice["logprobs"] is not None:
            found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    return found


def usage_of(read: Read) -> dict[str, int] | None:
    return next((event["usage"] for event in read.events if event.get("usage")), None)


def _choices(reads: list[Read]) -> list[dict[str, Any]]:
    return [choice for read in reads for event in read.events for choice in event["choices"]]


class Connection:
    """Reads one answer in a thread of its own. body: None for a GET."""

    def __init__(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        stop_at: int | None = None,
    ) -> None:
        address = urlparse(url)
        self._http = HTTPConnection(str(address.hostname), address.port, timeout=120.0)
        self._http.connect()
        self._socket: socket.socket = self._http.sock
        self._path, self._body, self._headers = path, body, dict(headers or {})
        self._stop_at = stop_at
        self.read: Read | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return 0 if self.read is None else self.read.num_tokens

    def wait_tokens(self, count: int, within_s: float = 60.0) -> None:
        poll(lambda: self.num_tokens >= count or not self._thread.is_alive(), f"not {count} tokens", within_s)
        assert self.num_tokens >= count, self.read

    def leave(self) -> Read:
        """Closes the connection; what it had brought."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        assert self.read is not None
        return self.read

    def stay(self, within_s: float = 120.0) -> Read:
        """Waits for the end, or for the connection to break."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"no end after {within_s:g} s: {self.read}"
        assert self.read is not None
        return self.read

    def _run(self) -> None:
        try:
            if self._body is None:
                self._http.request("GET", self._path, headers=self._headers)
            else:
                self._headers["Content-Type"] = "application/json"
                self._http.request("POST", self._path, json.dumps(self._body), self._headers)
            answer = self._http.getresponse()
            read = Read(answer.status, dict(answer.headers))
            if answer.status != 200:
                read.error, read.ended = json.loads(answer.read())["error"], True
                self.read = read
                return
            self.read = read
            while line := answer.readline():
                _take(read, line.decode().rstrip("\n"))
            read.broken = not read.ended
        except (OSError, HTTPException, ValueError):
            if self.read is not None:
                self.read.broken = True
        finally:
            self._http.close()


def _take(read: Read, line: str) -> None:
    if not line:
        return
    assert not read.ended, line
    if line.startswith("id: "):
        read.ids.append(line.removeprefix("id: "))
        return
    assert line.startswith("data: "), line
    if line == "data: [DONE]":
        read.ended = True
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        read.error = event["error"]
        return
    read.events.append(event)
    if "x-baton-stream-id" in read.headers:
        assert len(read.ids) == len(read.events), "every event has an id"


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
