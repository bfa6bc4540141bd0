"""A client that can leave at any moment, and what the cluster holds on its behalf."""

import contextlib
import json
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlparse

import httpx

from tests.support_answers import COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import Report, body_of, poll
from tests.support_cluster import RealCluster

Held = dict[str, int]


class Visitor:
    """Sends a request and reads its stream in a thread of its own, until the end or until it leaves."""

    def __init__(self, cluster: RealCluster, **body: Any) -> None:
        address = urlparse(cluster.url)
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=120.0)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self._body = json.dumps(body_of(**body) | {"stream": True})
        self.seen: Seen | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return 0 if self.seen is None else sum(map(len, self.seen.tokens))

    def __enter__(self) -> "Visitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> float:
        """Closes the connection, if that is not done yet; when that was."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        left_at = time.monotonic()
        self._thread.join(10.0)
        return left_at

    def stay(self, within_s: float = 120.0) -> Seen:
        """Waits for the end."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"no end after {within_s:g} s: {self.seen}"
        assert self.seen is not None
        return self.seen

    def _read(self) -> None:
        try:
            self._connection.request("POST", COMPLETIONS, self._body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            path = answer.headers["x-baton-path"]
            if answer.status != 200:
                self.seen = see_body(answer.status, path, json.loads(answer.read()))
                return
            stream = StreamSeen(answer.status, path)
            self.seen = stream.seen
            while line := answer.readline():
                stream.take(line.decode().strip())
        except (OSError, HTTPException):
            return
        finally:
            self._connection.close()


def report_of(cluster: RealCluster, name: str) -> Report:
    found = cluster.worker(name)
    assert found is not None, f"no {name}"
    return found


def tickets(cluster: RealCluster, name: str, *states: str) -> int:
    """How many of that worker are in one of these states; in any, without."""
    found = report_of(cluster, name)["tickets"]
    return sum(number for state, number in found.items() if not states or state in states)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(k * 31 + 17 * salt + length) % 40_000 + 100 for k in range(length)]


def held(cluster: RealCluster) -> Held:
    """By all processes, on behalf of requests."""
    found: Held = {}
    for worker in cluster.workers():
        found[f"{worker['id']} tickets"] = sum(worker["tickets"].values())
        found[f"{worker['id']} queues"] = sum(n for k, n in worker["queues"].items() if k != "breakers_open")
        for kind in ("pages", "slots"):
            if worker[kind] is not None:
                found[f"{worker['id']} {kind}"] = worker[kind]["total"] - worker[kind]["free"]
    return found


def pages_held(port: int) -> int:
    """Pages that a worker holds, by its own word: the gateway's may be frozen."""
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20.0).text
    kinds = [line for line in metrics.splitlines() if line.startswith("baton_pages{")]
    assert kinds, metrics
    return sum(int(float(line.split()[1])) for line in kinds if "free" not in line and "total" not in line)


def wait_released(cluster: RealCluster, before: Held, left_at: float, within_s: float) -> float:
    """Until no process holds more than `before`. How long after the client had left."""

    def more() -> Held:
        return {what: number for what, number in held(cluster).items() if number > before.get(what, 0)}

    poll(lambda: not more(), lambda: f"still held: {more()}\n{cluster.log()[-3000:]}", within_s)
    return time.monotonic() - left_at
