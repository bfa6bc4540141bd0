"""Processes that are told to end, and parts that stop without dying: what is in hand is finished or ends with a typed
error, never as if it were done; the exit is in order; nothing is held afterwards."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shared.engine.weights.hub import hub_name
from tests.support_answers import COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import Report, body_of, is_alive, poll
from tests.support_cluster import RealCluster
from tests.support_visitor import Visitor

DRAIN_S = 8.0
"""shutdown_timeout_s of gateway and decode worker."""
SHORT, LONG = 12, 1500
"""Tokens of an answer that is complete within DRAIN_S, and of one that is not."""
PROMPT = [(k * 37) % 40_000 + 100 for k in range(40)]
MANY = [(k * 41) % 40_000 + 100 for k in range(400)]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """State moves by TCP, and the prefill worker's sidecar is always at the same address."""
    settings = {
        "gateway.shutdown_timeout_s": DRAIN_S,
        "decode.shutdown_timeout_s": DRAIN_S,
        "prefill.shutdown_timeout_s": 60,
        "common.transfer": "tcp",
        "prefill.tcp_port": free_port(),
        "common.kv_bytes": "256MiB",
    }
    with RealCluster(tmp_path_factory.mktemp("lifecycle"), settings=settings) as running:
        running.expect_trouble = True
        yield running


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves a cluster behind that serves and holds nothing."""
    yield
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        wait_served(cluster)
        answer = cluster.complete(prompt=PROMPT, max_tokens=2, baton={"path": "remote", "strict": True})
        assert answer.status == 200, answer.body
        cluster.settled(files=False)


class Request(threading.Thread):
    """One streamed request in a thread of its own, and what its client has seen so far."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.seen = Seen(0)
        self.failure: BaseException | None = None
        self._url = url
        self._body = body_of(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=True)
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=120.0) as http,
                http.stream("POST", COMPLETIONS, json=self._body) as answer,
            ):
                if answer.status_code != 200:
                    self.seen = see_body(answer.status_code, "", json.loads(answer.read()))
                    return
                stream = StreamSeen(200, answer.headers["x-baton-path"])
                self.seen = stream.seen
                for line in answer.iter_lines():
                    stream.take(line)
        except BaseException as error:
            self.failure = error

    @property
    def tokens(self) -> list[int]:
        return self.seen.tokens[0] if self.seen.choices else []

    def wait_tokens(self, count: int) -> None:
        poll(lambda: len(self.tokens) >= count, lambda: f"{self.seen} {self.failure}", 60.0)

    def result(self, within_s: float = 120.0) -> Seen:
        self.join(within_s)
        assert not self.is_alive(), f"still waiting: {self.seen}"
        assert self.failure is None, self.failure
        return self.seen


def wait_served(cluster: RealCluster) -> None:
    def served() -> bool:
        try:
            ready = [w["role"] for w in cluster.workers() if w["state"] == "ready"]
            return cluster.health() == 200 and {"prefill", "decode"} <= set(ready)
        except httpx.TransportError:
            return False

    poll(served, lambda: f"not served again:\n{cluster.log()[-3000:]}", 90.0)


def check_ended_as_error(seen: Seen, code: str) -> None:
    assert seen.error is not None, seen
    assert seen.error["code"] == code, seen.error
    assert seen.finishes in ([], [None]), "an error is never a finish"
    assert not seen.ended or seen.status != 200


def exit_line(cluster: RealCluster, name: str, times: int) -> None:
    """The launcher has seen `name` end with status 0 so many times."""

    def seen() -> bool:
        lines = [line for line in cluster.log().splitlines() if line.startswith(name) and "died: ended with" in line]
        assert all("status 0;" in line for line in lines), lines
        return len(lines) == times

    poll(seen, lambda: cluster.log()[-3000:], 60.0)


def reference(cluster: RealCluster, prompt: list[int], max_tokens: int) -> list[int]:
    return cluster.complete(prompt=prompt, max_tokens=max_tokens, ignore_eos=True).token_ids


def test_a_prefill_worker_hands_over_before_it_goes(cluster: RealCluster) -> None:
    """Told to end in the middle of a prompt, it computes, sends and waits for the commit; only then it goes."""
    expected = reference(cluster, MANY, SHORT)
    cluster.settled(files=False)
    request = Request(cluster.url, MANY, SHORT)
    poll(lambda: tickets_of(cluster, "prefill-0"), "P gets no ticket", 30.0)
    pid = cluster.signal("prefill-0", signal.SIGTERM)
    assert request.result().tokens == [expected]
    assert request.seen.ended
    exit_line(cluster, "prefill-0", 1)
    after = cluster.wait_ready("prefill-0", other_than=pid)
    answer = cluster.complete(prompt=PROMPT, max_tokens=2, baton={"path": "remote", "strict": True})
    assert answer.status == 200, "the same address is a new peer"
    assert after["link"]["port"] == int(cluster.worker("prefill-0")["link"]["port"])  # type: ignore[index]


def tickets_of(cluster: RealCluster, name: str) -> dict[str, int]:
    report = cluster.worker(name)
    return {} if report is None else {state: n for state, n in report["tickets"].items() if n}


def test_a_decode_worker_finishes_what_it_can_and_its_successor_the_rest(cluster: RealCluster) -> None:
    expected = reference(cluster, PROMPT, SHORT)
    short = Request(cluster.url, PROMPT, SHORT)
    with Visitor(cluster, prompt=PROMPT, max_tokens=LONG, ignore_eos=True) as long:
        short.wait_tokens(1)
        poll(lambda: long.num_tokens, "no token comes", 60.0)
        began = time.monotonic()
        pid = cluster.signal("decode-0", signal.SIGTERM)
        poll(lambda: worker_state(cluster, pid) == "draining", "it says that it goes", 10.0)
        assert short.result().tokens == [expected]
        exit_line(cluster, "decode-0", 1)
        assert time.monotonic() - began > DRAIN_S - 1.0, "it has had its time"
        reached = long.num_tokens
        cluster.wait_ready("decode-0", other_than=pid)
        poll(lambda: long.num_tokens > reached + 1, lambda: f"it does not go on: {long.seen}", 60.0)
        assert long.seen is not None
        assert long.seen.error is None
        assert long.seen.tokens[0][:SHORT] == expected


def worker_state(cluster: RealCluster, pid: int) -> str | None:
    return next((str(worker["state"]) for worker in cluster.workers() if worker["pid"] == pid), None)


def test_a_gateway_lets_streams_finish_and_nobody_in(cluster: RealCluster) -> None:
    expected = reference(cluster, PROMPT, SHORT)
    short, long = Request(cluster.url, PROMPT, SHORT), Request(cluster.url, PROMPT, LONG)
    short.wait_tokens(1)
    long.wait_tokens(1)
    pid = cluster.signal("gateway", signal.SIGTERM)
    body = body_of(prompt=PROMPT, max_tokens=1)

    def refused() -> httpx.Response | None:
        answer = httpx.post(cluster.url + COMPLETIONS, json=body, timeout=60.0)
        return answer if answer.status_code != 200 else None

    answer: httpx.Response = poll(refused, "it goes on letting requests in", DRAIN_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["Retry-After"]) >= 1
    health = httpx.get(f"{cluster.url}/health", timeout=60.0)
    assert (health.status_code, health.json()["reason"]) == (503, "the gateway is draining")
    assert short.result().tokens == [expected]
    assert short.seen.ended
    check_ended_as_error(long.result(), "shutting_down")
    exit_line(cluster, "gateway", 1)
    poll(lambda: not psutil.pid_exists(pid), "it is still there", 60.0)


def test_a_frozen_sidecar_is_replaced_and_its_tickets_end(cluster: RealCluster) -> None:
    """The decode worker's own sidecar does not die, it just stops: the worker says that it is ill, kills it and starts
    another; nothing that waited for it is held."""
    before = cluster.worker("decode-0")
    assert before is not None
    pid = cluster.signal("decode-0-sidecar", signal.SIGSTOP)
    requests = [Request(cluster.url, PROMPT, SHORT) for _ in range(3)]
    try:
        health = f"http://127.0.0.1:{before['http_port']}/health"
        poll(
            lambda: "has not answered" in httpx.get(health, timeout=60.0).text,
            "the worker takes itself for healthy",
            15.0,
        )
        poll(lambda: not psutil.pid_exists(pid), "the sidecar is still there", 30.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for request in requests:
        seen = request.result()
        typed = seen.error is not None and seen.error["code"] in ("peer_lost", "transfer_timeout", "no_worker")
        assert typed or (seen.error is None and seen.ended), seen
    poll(lambda: httpx.get(health, timeout=60.0).status_code == 200, "the worker does not get well", 60.0)
    after = cluster.worker("decode-0")
    assert after is not None
    assert after["boot_id"] == before["boot_id"], "the worker itself lives on"
    assert after["link"]["boot_id"] != before["link"]["boot_id"]


@pytest.mark.slow
def test_a_prefill_worker_that_dies_comes_back_at_its_address_as_another_peer(cluster: RealCluster) -> None:
    before = cluster.worker("prefill-0")
    assert before is not None
    expected = reference(cluster, MANY, SHORT)
    cluster.settled(files=False)
    request = Request(cluster.url, MANY, SHORT)
    poll(lambda: tickets_of(cluster, "prefill-0"), "P gets no ticket", 30.0)
    pid = cluster.kill("prefill-0")
    seen = request.result()
    assert seen.tokens == [expected], "it had no token yet, so it was tried again"
    after: Report = cluster.wait_ready("prefill-0", other_than=pid)
    assert after["link"]["port"] == before["link"]["port"]
    assert after["link"]["boot_id"] != before["link"]["boot_id"]
    answer = cluster.complete(prompt=MANY, max_tokens=SHORT, ignore_eos=True, baton={"path": "remote", "strict": True})
    assert answer.token_ids == expected


def test_no_password_is_in_a_list_of_processes(cluster: RealCluster) -> None:
    password = (cluster.state_dir / "nats.url").read_text().split(":")[2].split("@")[0]
    for worker in cluster.workers():
        process = psutil.Process(worker["pid"])
        assert password not in " ".join(process.cmdline())
        assert password in json.dumps(process.environ()), "it is told by the environment"
        assert password not in json.dumps(worker)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_an_end_while_the_model_is_prepared(role: str, nats_url: str, tmp_path: Path) -> None:
    """Another process prepares the same model, for ever, and ours waits for it in a thread."""
    named = hub_name("some/model")
    assert named is not None
    lock = tmp_path / "models" / f".hub-{named.slug}.lock"
    flags: list[Any] = ["--nats-url", nats_url, "--model", "some/model", "--cache-dir", tmp_path]
    flags += ["--state-dir", tmp_path / "state", *(["--port", "0"] if role == "gateway" else [])]
    with locked(lock):
        command = [sys.executable, "-m", f"services.{role}", *map(str, flags)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            try:
                seen = psutil.Process(process.pid)
                poll(lambda: str(lock) in [file.path for file in seen.open_files()], "it does not prepare", 120.0)
                process.send_signal(signal.SIGTERM)
                assert process.wait(60.0) == 0
            finally:
                process.kill()
                assert process.stderr is not None
                said = process.stderr.read().decode()
        assert "SIGTERM: ending in order" in said
        assert "Traceback" not in said, said
        assert not is_alive(seen)
