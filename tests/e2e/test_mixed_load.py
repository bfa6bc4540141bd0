"""Everything at once: two hundred requests of all kinds, 32 at a time, every tenth client leaving at a moment of its
own. Each answer is that of the request alone, and afterwards nothing is left of any of them."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support_answers import CHAT, COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import body_of, poll
from tests.support_cluster import RealCluster
from tests.support_replay import Asked, judge
from tests.support_text import text_model

SEED = 20_250_211
CONCURRENCY = 32
CHANNELS_PER_PEER = 2
STOPS = ("\n", ".", ",", " the", "e")
WORDS = "Who knows why rivers bend, ships sink, cats sleep and old maps lie about the shape of every coast? ".split()


class MonitoredCluster(RealCluster):
    """Its nats-server says what it holds."""

    entry = (str(Path(__file__).with_name("monitored_cluster.py")),)

    def num_subscriptions(self) -> int:
        """At the server, of all processes."""
        ports = max((self.state_dir / "nats").glob("*.ports"), key=lambda path: path.stat().st_mtime)
        monitoring = json.loads(ports.read_text())["monitoring"][0]
        return int(httpx.get(f"{monitoring}/subsz").json()["num_subscriptions"])

    def open_files(self) -> dict[str, int]:
        pids = {worker["id"]: worker["pid"] for worker in self.workers()}
        launcher = psutil.Process(pids["gateway"]).parent()
        assert launcher is not None
        pids |= {child.name(): child.pid for child in launcher.children() if child.name() == "nats-server"}
        return {name: psutil.Process(pid).num_fds() for name, pid in pids.items()} | {"baton": launcher.num_fds()}


@dataclass
class Order:
    """One request: its body, how it is sent, and when its client leaves (None: it stays)."""

    number: int
    route: str
    stream: bool
    body: dict[str, Any]
    n: int
    asked: Asked
    leaves_after_s: float | None
    seen: Seen | None = None
    took_s: float = 0.0
    left: bool = False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MonitoredCluster]:
    """Small pools, so that requests wait for room, and reservations that have to grow, so that some are preempted."""
    sizes = {"prefill.num_pages": 48, "decode.num_pages": 72, "decode.growth_tokens": 4}
    with MonitoredCluster(tmp_path, prefill=2, decode=2, settings=sizes) as running:
        yield running


def orders(count: int, longest: int) -> list[Order]:
    """The same ones every time."""
    rng = random.Random(SEED)
    leavers = set(rng.sample(range(count), count // 10))
    return [make_order(rng, number, longest, number in leavers) for number in range(count)]


def make_order(rng: random.Random, number: int, longest: int, leaves: bool) -> Order:
    route, stream = rng.choice((CHAT, COMPLETIONS)), rng.random() < 0.5
    prompt_len = rng.choice((rng.randint(1, 12), rng.randint(1, 40), rng.randint(20, 90)))
    if number % 25 == 7:
        prompt_len = rng.randint(longest // 2, longest)
    n = 1 if prompt_len > 100 else rng.choice((1, 1, 1, 2, 3))
    temperature = rng.choice((0.0, 0.7, 1.0))
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 16),
        "n": n,
        "temperature": temperature,
        "seed": rng.randrange(1 << 63),
        "stop": rng.choice((None, None, rng.choice(STOPS))),
    }
    wants_logprobs = rng.random() < 0.3
    if route == CHAT:
        text = " ".join(rng.choice(WORDS) for _ in range(max(1, prompt_len - 30)))
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": wants_logprobs}
        prompt = tuple(text_model().apply_chat_template(body["messages"]))
    else:
        prompt = tuple(rng.randrange(100, 40_000) for _ in range(prompt_len))
        body |= {"prompt": list(prompt), "logprobs": 2 if wants_logprobs else None}
    asked = Asked(prompt, body["max_tokens"], temperature, body["seed"], body["stop"])
    return Order(number, route, stream, body, n, asked, rng.uniform(0.0, 6.0) if leaves else None)


async def send(http: httpx.AsyncClient, order: Order, **baton: Any) -> Seen:
    """What the client saw; a client that leaves keeps what it had by then in `order.seen`."""
    body = body_of(baton=baton, **order.body)
    if not order.stream:
        answer = await http.post(order.route, json=body)
        return see_body(answer.status_code, answer.headers["x-baton-path"], answer.json())
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", order.route, json=streaming) as answer:
        if answer.status_code != 200:
            return see_body(answer.status_code, answer.headers["x-baton-path"], json.loads(await answer.aread()))
        stream = StreamSeen(answer.status_code, answer.headers["x-baton-path"])
        order.seen = stream.seen
        async for line in answer.aiter_lines():
            stream.take(line)
    return stream.seen


async def play(url: str, all_orders: list[Order]) -> None:
    """All orders, at most CONCURRENCY at once. A request that hangs fails the test by its client's timeout."""
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)

    async def one(http: httpx.AsyncClient, order: Order) -> None:
        async with gate:
            began = time.monotonic()
            try:
                async with asyncio.timeout(order.leaves_after_s):
                    order.seen = await send(http, order)
            except TimeoutError:
                order.left = True
            order.took_s = time.monotonic() - began

    async with httpx.AsyncClient(base_url=url, timeout=150.0, limits=limits) as http, asyncio.TaskGroup() as tasks:
        for order in all_orders:
            tasks.create_task(one(http, order))


@dataclass
class Verdicts:
    tokens: int = 0
    excused: Counter[str] = field(default_factory=Counter)


def judge_all(all_orders: list[Order]) -> Verdicts:
    verdicts = Verdicts()
    for order in all_orders:
        seen = order.seen
        if seen is None:
            continue
        whole = not order.left
        if whole:
            assert seen.error is None, f"order {order.number}: {seen.error}"
            assert seen.ended, f"order {order.number} broke off: {seen}"
            assert sorted(seen.choices) == list(range(order.n)), order.number
            check_usage(order, seen)
        for index, choice in seen.choices.items():
            assert choice.prompt_ids in ([], list(order.asked.prompt)), order.number
            kind = "greedy" if order.asked.temperature == 0 else "sampled"
            verdicts.excused[kind] += judge(order.asked, choice, index, whole=whole)
            verdicts.tokens += len(choice.token_ids)
            if order.body["logprobs"] and whole:
                assert len(choice.logprobs) == len(choice.token_ids), order.number
    return verdicts


def check_usage(order: Order, seen: Seen) -> None:
    prompt_len, completion = len(order.asked.prompt), sum(map(len, seen.tokens))
    assert seen.usage == {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
    }, order.number


def compare_with_solo_runs(cluster: RealCluster, some: list[Order]) -> int:
    """Sends them again, one by one, computed wholly by a worker that does nothing else. How many differ (and are
    excused: `judge` looks at both)."""

    async def again() -> list[Seen]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as http:
            return [await send(http, order, path="local", strict=True) for order in some]

    differing = 0
    for order, solo in zip(some, asyncio.run(again()), strict=True):
        assert order.seen is not None
        for index, choice in solo.choices.items():
            judge(order.asked, choice, index)
        loaded = [(c.text, c.finish, c.token_ids) for _, c in sorted(order.seen.choices.items())]
        alone = [(c.text, c.finish, c.token_ids) for _, c in sorted(solo.choices.items())]
        differing += loaded != alone
    return differing


def run(cluster: MonitoredCluster, all_orders: list[Order], num_solo: int) -> None:
    files, subscriptions = cluster.open_files(), cluster.num_subscriptions()
    began = time.monotonic()
    asyncio.run(play(cluster.url, all_orders))
    played_s = time.monotonic() - began
    cluster.settled(files=False)
    check_nothing_is_left(cluster, files, subscriptions)
    left = [order for order in all_orders if order.left]
    assert len(left) > len(all_orders) // 20, "most clients that meant to leave had their answer before"
    began = time.monotonic()
    verdicts = judge_all(all_orders)
    judged_s = time.monotonic() - began
    stayed = [order for order in all_orders if not order.left]
    differing = compare_with_solo_runs(cluster, stayed[:: max(1, len(stayed) // num_solo)][:num_solo])
    took = sorted(order.took_s for order in stayed)
    print(
        f"\n{len(all_orders)} requests in {played_s:.1f} s (median {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s),"
        f" {len(left)} left early; {verdicts.tokens} tokens judged in {judged_s:.1f} s,"
        f" excused: {verdicts.excused['greedy']} greedy, {verdicts.excused['sampled']} sampled;"
        f" {differing} of {num_solo} solo runs differ by excused tokens;"
        f" {cluster.counter('decode', 'preemptions'):.0f} preemptions,"
        f" {cluster.counter('gateway', 'attempts_retried'):.0f} attempts retried"
    )
    assert sum(verdicts.excused.values()) <= 1 + verdicts.tokens // 500
    assert differing <= 1 + num_solo // 10


def check_nothing_is_left(cluster: MonitoredCluster, files: dict[str, int], subscriptions: int) -> None:
    """Sidecars keep a few channels to a peer open for the next transfer, as many as before or up to their bound."""
    peers = max(cluster.num_prefill, cluster.num_decode)
    allowed = {
        name: count + (CHANNELS_PER_PEER * peers if name.endswith("-sidecar") else 0) for name, count in files.items()
    }

    def more() -> dict[str, tuple[int, int]]:
        now = cluster.open_files()
        assert now.keys() == files.keys(), "a process has died"
        return {name: (files[name], now[name]) for name in files if now[name] > allowed[name]}

    poll(lambda: not more(), lambda: f"open files before and now: {more()}", 15.0)
    poll(
        lambda: cluster.num_subscriptions() == subscriptions,
        lambda: f"{cluster.num_subscriptions()} subscriptions, {subscriptions} before",
        10.0,
    )
    assert cluster.counter("gateway", "task_failures") == 0
    assert cluster.counter("prefill", "task_failures") == cluster.counter("decode", "task_failures") == 0


def test_two_hundred_requests_of_all_kinds(cluster: MonitoredCluster) -> None:
    run(cluster, orders(200, longest=400), num_solo=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_requests_of_all_kinds(cluster: MonitoredCluster) -> None:
    run(cluster, orders(1000, longest=800), num_solo=40)
