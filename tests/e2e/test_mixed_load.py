"""Everything at once: two hundred requests of all kinds, 32 at a time, every tenth client leaving at a moment of its
own. Each answer is that of the request alone, and afterwards nothing is left of any of them."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support_answers import CHAT, COMPLETIONS, Seen, StreamSeen, see_body
from tests.support_client import body_of, poll
from tests.support_cluster import RealCluster
from tests.support_processes import Files, more_files, open_files
from tests.support_replay import Asked, Given, judge
from tests.support_text import text_model

SEED = 20_250_211
CONCURRENCY = 32
STOPS = ("\n", ".", ",", " the", "e")
SAYING = "Who knows why rivers bend, ships sink, cats sleep and old maps lie about the shape of every coast?"


class MonitoredCluster(RealCluster):
    """Its nats-server says what it holds."""

    entry = (str(Path(__file__).with_name("monitored_cluster.py")),)

    def num_subscriptions(self) -> int:
        """At the server, of all processes."""
        ports = max((self.state_dir / "nats").glob("*.ports"), key=lambda path: path.stat().st_mtime)
        monitoring = json.loads(ports.read_text())["monitoring"][0]
        return int(httpx.get(f"{monitoring}/subsz", timeout=60.0).json()["num_subscriptions"])


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


@dataclass(frozen=True)
class Prompt:
    """A prompt of either route; body is how it is asked."""

    route: str
    body: dict[str, Any]
    ids: tuple[int, ...]


def make_prompts(rng: random.Random, count: int, longest: int) -> list[Prompt]:
    """Of 1 to `longest` tokens, most of them short."""
    short = [rng.randint(1, 40) for _ in range(count - count // 5)]
    middle = [rng.randint(40, 120) for _ in range(count // 5 - 2)]
    return [
        make_prompt(rng, length) for length in (1, *short[1:], *middle, rng.randint(longest // 2, longest), longest)
    ]


def make_prompt(rng: random.Random, length: int) -> Prompt:
    if length < 24 or rng.random() < 0.5:
        ids = tuple(rng.randrange(100, 40_000) for _ in range(length))
        return Prompt(COMPLETIONS, {"prompt": list(ids)}, ids)
    said = SAYING.split()
    words = " ".join(rng.choice(said) for _ in range(length - 20))
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": words}]
    return Prompt(CHAT, {"messages": messages}, tuple(text_model().apply_chat_template(messages)))


def orders(count: int, longest: int) -> list[Order]:
    """The same ones every time."""
    rng = random.Random(SEED)
    prompts = make_prompts(rng, count // 5, longest)
    weights = [1.0 if len(prompt.ids) <= 130 else 0.8 for prompt in prompts]
    leavers = set(rng.sample(range(count), count // 10))
    return [
        make_order(rng, number, rng.choices(prompts, weights)[0], rng.uniform(0.0, 4.0) if number in leavers else None)
        for number in range(count)
    ]


def make_order(rng: random.Random, number: int, prompt: Prompt, leaves_after_s: float | None) -> Order:
    n = 1 if len(prompt.ids) > 130 else rng.choice((1, 1, 1, 2, 3))
    temperature, seed = rng.choice((0.0, 0.7, 1.0)), rng.randrange(1 << 63)
    max_tokens, stop = rng.randint(1, 16), rng.choice((None, None, rng.choice(STOPS)))
    body = prompt.body | {"max_tokens": max_tokens, "n": n, "temperature": temperature, "seed": seed, "stop": stop}
    if rng.random() < 0.3:
        body |= {"logprobs": True} if prompt.route == CHAT else {"logprobs": 2}
    asked = Asked(prompt.ids, max_tokens, temperature, seed, stop)
    return Order(number, prompt.route, rng.random() < 0.5, body, n, asked, leaves_after_s)


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


def judge_all(all_orders: list[Order]) -> tuple[int, int]:
    """How many tokens all answers have, and how many of them are excused."""
    by_prompt: dict[tuple[int, ...], list[Given]] = {}
    for order in all_orders:
        given = by_prompt.setdefault(order.asked.prompt, [])
        if order.seen is not None:
            given += [Given(order.asked, choice, i, not order.left) for i, choice in order.seen.choices.items()]
    num_tokens = sum(len(one.seen.token_ids) for given in by_prompt.values() for one in given)
    return num_tokens, sum(judge(prompt, given) for prompt, given in by_prompt.items())


def check_complete(order: Order) -> None:
    seen = order.seen
    assert seen is not None, order
    assert seen.error is None, order
    assert seen.ended, order
    assert sorted(seen.choices) == list(range(order.n)), order
    for choice in seen.choices.values():
        assert choice.prompt_ids == list(order.asked.prompt), order
        assert len(choice.logprobs) == (len(choice.token_ids) if "logprobs" in order.body else 0), order
    check_usage(order, seen)


def check_usage(order: Order, seen: Seen) -> None:
    prompt_len, completion = len(order.asked.prompt), sum(map(len, seen.tokens))
    assert seen.usage == {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
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
        judge(order.asked.prompt, [Given(order.asked, choice, i) for i, choice in solo.choices.items()])
        loaded = [(c.text, c.finish, c.token_ids) for _, c in sorted(order.seen.choices.items())]
        alone = [(c.text, c.finish, c.token_ids) for _, c in sorted(solo.choices.items())]
        differing += loaded != alone
    return differing


def run(cluster: MonitoredCluster, all_orders: list[Order], num_solo: int) -> None:
    files, subscriptions = open_files(cluster), cluster.num_subscriptions()
    began = time.monotonic()
    asyncio.run(play(cluster.url, all_orders))
    played_s = time.monotonic() - began
    check_nothing_is_left(cluster, files, subscriptions)
    stayed, left = [o for o in all_orders if not o.left], [o for o in all_orders if o.left]
    for order in stayed:
        check_complete(order)
    assert len(left) > len(all_orders) // 20, "most clients that meant to leave had their answer before"
    began = time.monotonic()
    num_tokens, excused = judge_all(all_orders)
    judged_s = time.monotonic() - began
    differing = compare_with_solo_runs(cluster, stayed[:: max(1, len(stayed) // num_solo)][:num_solo])
    took = sorted(order.took_s for order in stayed)
    print(
        f"\n{len(all_orders)} requests in {played_s:.1f} s (median {took[len(took) // 2]:.2f} s,"
        f" longest {took[-1]:.2f} s), {len(left)} left early; {num_tokens} tokens judged in {judged_s:.1f} s,"
        f" {excused} of them excused; {differing} of {num_solo} solo runs differ by excused tokens;"
        f" {cluster.counter('decode', 'preemptions'):.0f} preemptions,"
        f" {cluster.counter('gateway', 'attempts_retried'):.0f} attempts retried"
    )
    assert excused <= 1 + num_tokens // 200
    assert differing <= 1 + num_solo // 10


def check_nothing_is_left(cluster: MonitoredCluster, files: Files, subscriptions: int) -> None:
    cluster.settled(files=False)
    poll(lambda: not more_files(cluster, files), lambda: f"{more_files(cluster, files)}", 60.0)
    poll(lambda: open_files(cluster).keys() == files.keys(), "a process has died", 15.0)
    poll(
        lambda: cluster.num_subscriptions() == subscriptions,
        lambda: f"{cluster.num_subscriptions()} subscriptions, {subscriptions} before",
        60.0,
    )
    for role in ("gateway", "prefill", "decode"):
        assert cluster.counter(role, "task_failures") == 0


def test_two_hundred_requests_of_all_kinds(cluster: MonitoredCluster) -> None:
    run(cluster, orders(200, longest=400), num_solo=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_six_hundred_requests_of_all_kinds(cluster: MonitoredCluster) -> None:
    run(cluster, orders(600, longest=600), num_solo=30)
