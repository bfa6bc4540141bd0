"""Processes die, freeze and come back under load. A request ends with the right answer or with an error that says what
happened, never with a wrong answer; the cluster is whole again afterwards and holds nothing of what was lost."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from shared.runtime.errors import BatonError
from tests.support_answers import COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import Report, body_of, poll
from tests.support_cluster import RealCluster
from tests.support_processes import Files, launcher_of, more_files, open_files
from tests.support_replay import Asked, Given, judge

DEADLINE_S = 60.0
"""Of each request, set at the gateway."""
LATE_S = 20.0
"""How much later than that a client may hear of its end."""
FROZEN_S = 4.0
PROMPTS = [tuple((i * 31 + length) % 40_000 + 100 for i in range(length)) for length in (7, 30, 60, 260)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"gateway.request_timeout_s": DEADLINE_S, "common.kv_bytes": "256MiB"}
    with RealCluster(tmp_path_factory.mktemp("loss"), prefill=2, decode=2, settings=settings) as running:
        running.expect_trouble = True
        yield running


@pytest.fixture
def files(cluster: RealCluster) -> Files:
    """What is open before the test."""
    return open_files(cluster)


@dataclass
class Order:
    """A request, and what its client has seen so far. broken: the connection ended without an answer."""

    asked: Asked
    stream: bool
    seen: Seen | None = None
    broken: httpx.TransportError | None = None
    took_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.seen is None else sum(map(len, self.seen.tokens))

    @property
    def outcome(self) -> str:
        if self.broken is not None:
            return "connection lost"
        assert self.seen is not None, self
        return "right answer" if self.seen.error is None else str(self.seen.error["code"])

    def send(self, url: str) -> None:
        body = body_of(
            prompt=list(self.asked.prompt),
            max_tokens=self.asked.max_tokens,
            temperature=self.asked.temperature,
            seed=self.asked.seed,
            ignore_eos=True,
        )
        began = time.monotonic()
        try:
            with httpx.Client(base_url=url, timeout=DEADLINE_S + LATE_S) as http:
                self._stream(http, body) if self.stream else self._whole(http, body)
        except httpx.TransportError as error:
            self.broken = error
        self.took_s = time.monotonic() - began

    def _whole(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = http.post(COMPLETIONS, json=body)
        self.seen = see_body(answer.status_code, answer.headers["x-baton-path"], answer.json())

    def _stream(self, http: httpx.Client, body: dict[str, Any]) -> None:
        with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
            path = answer.headers["x-baton-path"]
            if answer.status_code != 200:
                self.seen = see_body(answer.status_code, path, json.loads(answer.read()))
                return
            stream = StreamSeen(answer.status_code, path)
            self.seen = stream.seen
            for line in answer.iter_lines():
                stream.take(line)


@dataclass
class Load:
    """Twelve requests of all lengths, greedy and sampled, whole and streamed, all at once."""

    cluster: RealCluster
    orders: list[Order] = field(default_factory=list)

    def __enter__(self) -> "Load":
        for number in range(12):
            temperature = 0.0 if number < 6 else 0.8
            asked = Asked(PROMPTS[number % 4], 48 + number, temperature, seed=number, ignore_eos=True)
            self.orders.append(Order(asked, stream=number % 8 < 4))
        self._threads = ThreadPoolExecutor(len(self.orders))
        self._running = [self._threads.submit(order.send, self.cluster.url) for order in self.orders]
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)
        for running in self._running:
            running.result()

    def wait_for_tokens(self, count: int) -> None:
        """Until the streams have brought so many, all together."""
        poll(lambda: sum(order.num_tokens for order in self.orders) >= count, "no tokens come", DEADLINE_S)

    def check(self, *, may_break: bool = False) -> Counter[str]:
        """Everything ended in time, and each end is a right answer or a typed error. The outcomes."""
        given: dict[tuple[int, ...], list[Given]] = {}
        for order in self.orders:
            assert order.took_s is not None
            assert order.took_s < DEADLINE_S + LATE_S, order
            assert order.broken is None or may_break, order
            complete = False
            if order.broken is None:
                assert order.seen is not None
                check_error(order.seen) if order.seen.error is not None else None
                complete = order.seen.error is None
                assert order.seen.ended == complete or not order.stream, order
            if order.seen is not None:
                given.setdefault(order.asked.prompt, []).extend(
                    Given(order.asked, choice, index, complete) for index, choice in order.seen.choices.items()
                )
        excused = sum(judge(prompt, answers) for prompt, answers in given.items())
        outcomes = Counter(order.outcome for order in self.orders)
        longest = max(order.took_s or 0.0 for order in self.orders)
        print(f"\n{dict(outcomes)}, the last after {longest:.1f} s, {excused} tokens excused")
        assert excused <= 2
        return outcomes


def codes(kind: type[BatonError] = BatonError) -> set[str]:
    return {kind.code}.union(*(codes(sub) for sub in kind.__subclasses__()))


def check_error(seen: Seen) -> None:
    """OpenAI's error body, with one of our codes; nothing internal."""
    error = seen.error
    assert error is not None
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    assert error["code"] in codes() - {"internal_error"}, error
    assert error["type"] in ("server_error", "rate_limit_error"), error
    assert seen.status in (200, 429, 500, 503, 504), seen


def wait_whole(cluster: RealCluster, name: str = "", other_than: int = 0) -> Report | None:
    """Until all processes are ready, `name` under a new pid, and requests are served again."""
    expected = {"prefill": 2, "decode": 2, "sidecar": 4, "gateway": 1, "kvstore": 1}

    def is_whole() -> bool:
        try:
            workers, health = cluster.workers(), cluster.health()
        except httpx.TransportError:
            return False
        ready = Counter(worker["role"] for worker in workers if worker["state"] == "ready")
        gone = [worker for worker in workers if worker["pid"] == other_than]
        return health == 200 and ready == expected and not gone

    poll(is_whole, lambda: f"not whole again:\n{cluster.log()[-3000:]}", 90.0)
    return cluster.worker(name) if name else None


def check_serves(cluster: RealCluster, files: Files) -> None:
    """Eight requests by the whole path, so that every worker gets some; then nothing is left of anything: no page, no
    slot, ticket or letterbox, and in the processes that lived on no open file."""
    with ThreadPoolExecutor(8) as threads:
        bodies = [body_of(prompt=list(PROMPTS[1]), max_tokens=2, baton={"path": "remote", "strict": True})] * 8
        answers = list(threads.map(lambda body: httpx.post(cluster.url + COMPLETIONS, json=body, timeout=60.0), bodies))
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    cluster.settled(files=False)
    poll(lambda: not more_files(cluster, files), lambda: f"{more_files(cluster, files)}", 15.0)


def wait_until_busy(cluster: RealCluster, name: str) -> None:
    """Until the worker, or the one this sidecar belongs to, has work in hand; D itself: three requests that decode."""

    def is_busy() -> bool:
        report = cluster.worker(name.removesuffix("-sidecar"))
        tickets: dict[str, int] = {} if report is None else report["tickets"]
        return tickets.get("started", 0) >= 3 if name in ("decode-0", "decode-1") else any(tickets.values())

    poll(is_busy, f"{name} gets nothing to do", DEADLINE_S)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "prefill-1-sidecar", "decode-1-sidecar"])
def test_killed_and_started_again(cluster: RealCluster, name: str, files: Files) -> None:
    before = cluster.worker(name)
    assert before is not None
    with Load(cluster) as load:
        wait_until_busy(cluster, name)
        pid = cluster.kill(name)
    after = wait_whole(cluster, name, other_than=pid)
    assert after is not None
    assert after["boot_id"] != before["boot_id"]
    outcomes = load.check()
    assert outcomes["right answer"] >= 4, outcomes
    for order in load.orders:
        if order.stream and order.outcome != "right answer":
            assert order.num_tokens, "what had no token yet is tried again elsewhere"
    check_serves(cluster, files)


def test_the_gateway_is_killed(cluster: RealCluster, files: Files) -> None:
    """Its clients cannot be told anything; the workers notice that nobody waits for their work."""
    before = cluster.worker("gateway")
    assert before is not None
    with Load(cluster) as load:
        load.wait_for_tokens(8)
        pid = cluster.kill("gateway")
    after = wait_whole(cluster, "gateway", other_than=pid)
    assert after is not None
    assert after["boot_id"] != before["boot_id"]
    outcomes = load.check(may_break=True)
    assert outcomes["connection lost"] >= 6, outcomes
    check_serves(cluster, files)


@pytest.mark.parametrize("away_s", [2.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_nats_is_killed(cluster: RealCluster, files: Files, away_s: float) -> None:
    """It comes back on its port, and all processes with it; nobody takes a worker for lost meanwhile."""
    boots = {worker["id"]: worker["boot_id"] for worker in cluster.workers()}
    launcher = launcher_of(cluster)
    with Load(cluster) as load:
        load.wait_for_tokens(8)
        launcher.suspend()  # so that it starts no other one yet
        try:
            cluster.kill("nats-server")
            time.sleep(away_s)
        finally:
            launcher.resume()
    wait_whole(cluster)
    outcomes = load.check()
    assert outcomes["right answer"] >= 9, outcomes
    check_serves(cluster, files)
    assert {worker["id"]: worker["boot_id"] for worker in cluster.workers()} == boots


@pytest.mark.parametrize(
    "name",
    [
        "prefill-0",
        pytest.param("decode-1", marks=pytest.mark.slow),
        pytest.param("nats-server", marks=pytest.mark.slow),
    ],
)
def test_frozen_for_a_while(cluster: RealCluster, name: str, files: Files) -> None:
    """Longer than a worker may be silent. What waits for it goes elsewhere or ends; woken, it lets go of all that was
    taken from it."""
    boots = {worker["id"]: worker["boot_id"] for worker in cluster.workers()}
    with Load(cluster) as load:
        load.wait_for_tokens(4) if name == "nats-server" else wait_until_busy(cluster, name)
        pid = cluster.signal(name, signal.SIGSTOP)
        try:
            time.sleep(FROZEN_S)
        finally:
            os.kill(pid, signal.SIGCONT)
    wait_whole(cluster)
    load.check()
    check_serves(cluster, files)
    assert {worker["id"]: worker["boot_id"] for worker in cluster.workers()} == boots
