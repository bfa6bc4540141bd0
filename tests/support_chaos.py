"""Requests to a cluster whose processes die, freeze and come back: sent, timed, and judged afterwards.

A request may end with the right answer or with an error that says what happened; never with a wrong answer, never late.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.runtime.errors import BatonError
from tests.support_answers import COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import Report, body_of, poll
from tests.support_cluster import RealCluster
from tests.support_processes import Files, more_files
from tests.support_replay import Asked, Given, judge

DEADLINE_S = 60.0
"""Of each request, to be set at the gateway as request_timeout_s."""
LATE_S = 20.0
"""How much later than that a client may hear of its end."""
CONNECTION_LOST = "connection lost"
RIGHT = "right answer"


@dataclass
class Order:
    """A request, and what its client has seen so far. broken: the connection ended without an answer."""

    asked: Asked
    stream: bool
    n: int = 1
    baton: dict[str, object] = field(default_factory=dict)
    seen: Seen | None = None
    broken: httpx.TransportError | None = None
    took_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.seen is None else sum(map(len, self.seen.tokens))

    @property
    def outcome(self) -> str:
        if self.broken is not None:
            return CONNECTION_LOST
        assert self.seen is not None, self
        return RIGHT if self.seen.error is None else str(self.seen.error["code"])

    @property
    def complete(self) -> bool:
        return self.broken is None and self.seen is not None and self.seen.error is None

    def send(self, url: str, *, patient: bool = False) -> None:
        """patient: where nobody accepts the connection, nothing was sent, and the client tries again."""
        body = body_of(
            baton=self.baton,
            prompt=list(self.asked.prompt),
            max_tokens=self.asked.max_tokens,
            temperature=self.asked.temperature,
            seed=self.asked.seed,
            ignore_eos=self.asked.ignore_eos,
            n=self.n,
        )
        began = time.monotonic()
        try:
            with httpx.Client(base_url=url, timeout=DEADLINE_S + LATE_S) as http:
                while patient and time.monotonic() < began + DEADLINE_S:
                    try:
                        return self._send(http, body)
                    except httpx.ConnectError:
                        time.sleep(0.1)
                self._send(http, body)
        except httpx.TransportError as error:
            self.broken = error
        finally:
            self.took_s = time.monotonic() - began

    def _send(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self._stream(http, body) if self.stream else self._whole(http, body)

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

    def given(self) -> list[Given]:
        """Its choices as far as they came, for `judge`."""
        choices = {} if self.seen is None else self.seen.choices
        return [Given(self.asked, choice, index, self.complete) for index, choice in choices.items()]


class Load:
    """`with Load(url, orders):` all orders are under way inside, at most `concurrency` at once, and ended after."""

    def __init__(self, url: str, orders: list[Order], concurrency: int | None = None) -> None:
        self.url, self.orders = url, orders
        self._threads = ThreadPoolExecutor(concurrency or len(orders))
        self._running: list[Future[None]] = []

    def __enter__(self) -> "Load":
        self._running = [self._threads.submit(order.send, self.url) for order in self.orders]
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)
        for running in self._running:
            running.result()

    @property
    def ended(self) -> bool:
        return all(running.done() for running in self._running)

    def wait_for_tokens(self, number: int) -> None:
        """Until the streams have brought so many, all together."""
        poll(lambda: sum(order.num_tokens for order in self.orders) >= number, "no tokens come", DEADLINE_S)

    def check(self, *, may_break: bool = False) -> Counter[str]:
        """Everything ended in time, and each end is a right answer or a typed error. The outcomes."""
        check_ends(self.orders, may_break=may_break)
        excused = judge_all(self.orders)
        outcomes = Counter(order.outcome for order in self.orders)
        longest = max(order.took_s or 0.0 for order in self.orders)
        num_tokens = sum(order.num_tokens for order in self.orders)
        print(f"\n{dict(outcomes)}, the last after {longest:.1f} s, {excused} of {num_tokens} tokens excused")
        assert excused <= 3 + num_tokens // 200  # a draw into the tail often lies a millionth from a border
        return outcomes


def check_ends(orders: Sequence[Order], *, may_break: bool = False) -> None:
    """In time, and with an answer or a typed error. may_break: the gateway itself dies, so clients may lose it."""
    for order in orders:
        assert order.took_s is not None, order
        assert order.took_s < DEADLINE_S + LATE_S, order
        assert order.broken is None or may_break, order
        if order.broken is not None:
            assert not isinstance(order.broken, httpx.TimeoutException), f"hangs: {order}"
            continue
        assert order.seen is not None, order
        if order.seen.error is not None:
            check_error(order.seen)
        assert order.seen.ended == order.complete or order.seen.status != 200, order
        if order.complete:
            assert sorted(order.seen.choices) == list(range(order.n)), order


def judge_all(orders: Sequence[Order]) -> int:
    """Every token that reached a client is the model's; how many of them are excused. Cut answers count as far as they
    came."""
    given: dict[tuple[int, ...], list[Given]] = {}
    for order in orders:
        given.setdefault(order.asked.prompt, []).extend(order.given())
    return sum(judge(prompt, answers) for prompt, answers in given.items())


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


def is_whole(cluster: RealCluster, gone: Sequence[int] = ()) -> bool:
    """Whether all processes are ready, none of them under a pid of `gone`, and requests are served."""
    pairs = cluster.num_prefill + cluster.num_decode
    expected = {"prefill": cluster.num_prefill, "decode": cluster.num_decode, "gateway": 1, "kvstore": 1}
    try:
        workers, health = cluster.workers(), cluster.health()
    except httpx.TransportError:
        return False
    ready = Counter(worker["role"] for worker in workers if worker["state"] == "ready")
    return (
        health == 200
        and ready.pop("sidecar", 0) in (pairs, pairs + 1)  # the kvstore's comes with the first block
        and ready == expected
        and not any(worker["pid"] in gone for worker in workers)
    )


def wait_whole(cluster: RealCluster, name: str = "", other_than: int = 0) -> Report | None:
    """Until all processes are ready, `name` under a new pid, and requests are served again."""
    poll(lambda: is_whole(cluster, [other_than]), lambda: f"not whole again:\n{cluster.log()[-3000:]}", 90.0)
    return cluster.worker(name) if name else None


def check_serves(cluster: RealCluster, files: Files, prompt: Sequence[int]) -> None:
    """Eight requests by the whole path, so that every worker gets some; then nothing is left of anything: no page, no
    slot, ticket or letterbox, and in the processes that lived on no open file."""
    with ThreadPoolExecutor(8) as threads:
        bodies = [body_of(prompt=list(prompt), max_tokens=2, baton={"path": "remote", "strict": True})] * 8
        answers = list(threads.map(lambda body: httpx.post(cluster.url + COMPLETIONS, json=body, timeout=60.0), bodies))
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    cluster.settled(files=False)
    poll(lambda: not more_files(cluster, files), lambda: f"{more_files(cluster, files)}", 15.0)


class Battle:
    """Orders like `orders`, sent over and over at `concurrency`, until all were sent and all victims are dead.

    victims: roles, of which a random process is killed (SIGKILL) whenever the cluster is whole again and `calm` more
    answers have come; `nats-server` is a role, too. endless: as many victims as the orders leave time for. patient:
    clients wait for a gateway that does not accept their connection.
    """

    def __init__(
        self,
        cluster: RealCluster,
        orders: Sequence[Order],
        victims: Iterable[str],
        rng: random.Random,
        *,
        concurrency: int,
        calm: int = 0,
        endless: bool = False,
        patient: bool = False,
    ) -> None:
        self.cluster, self.orders, self.concurrency = cluster, orders, concurrency
        self.sent: list[Order] = []
        self.kills: Counter[str] = Counter()
        self.gone: list[int] = []
        self.took_s = 0.0
        self._victims, self._rng = iter(victims), rng
        self._calm, self._endless, self._patient = calm, endless, patient
        self._killed_all, self._played = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def fight(self) -> None:
        """Returns when every client has its answer, whatever it is, and the cluster is whole again."""
        began = time.monotonic()
        with ThreadPoolExecutor(self.concurrency + 1) as threads:
            killing = threads.submit(self._kill)
            clients = [threads.submit(self._client) for _ in range(self.concurrency)]
            for client in clients:
                client.result()
            self._played.set()
            killing.result()
        self.took_s = time.monotonic() - began
        poll(lambda: is_whole(self.cluster, self.gone), lambda: f"not whole:\n{self.cluster.log()[-3000:]}", 90.0)

    def _client(self) -> None:
        while (order := self._next()) is not None:
            order.send(self.cluster.url, patient=self._patient)

    def _next(self) -> Order | None:
        with self._lock:
            if len(self.sent) >= len(self.orders) and (self._endless or self._killed_all.is_set()):
                return None
            like = self.orders[len(self.sent) % len(self.orders)]
            self.sent.append(Order(like.asked, like.stream, like.n, like.baton))
            return self.sent[-1]

    def _kill(self) -> None:
        try:
            for victim in self._victims:
                answered = sum(order.complete for order in self.sent)
                poll(lambda least=answered + self._calm: self._may_kill(least), self._why_not, 300.0)
                # Not at the very moment when the last one says that it is ready.
                if self._played.wait(self._rng.uniform(0.0, 0.5)):
                    return
                name = victim
                if victim != "nats-server":
                    name = self._rng.choice([worker["id"] for worker in self.cluster.workers(victim)])
                self.gone.append(self.cluster.kill(name))
                self.kills[victim] += 1
        finally:
            self._killed_all.set()

    def _may_kill(self, least: int) -> bool:
        answered = sum(order.complete for order in self.sent)
        return self._played.is_set() or (answered >= least and is_whole(self.cluster, self.gone))

    def _why_not(self) -> str:
        return f"not whole, or no answers: {self.sent[-3:]}\n{self.cluster.log()[-3000:]}"
