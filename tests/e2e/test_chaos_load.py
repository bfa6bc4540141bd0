"""Chaos under load: a random process is killed whenever all are ready again, and everything the clients get is compared
with a quiet run of the same requests. The long run is `slow`; CHAOS_REQUESTS sets its size."""

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.support_chaos import DEADLINE_S, RIGHT, Battle, Order, check_ends, check_serves, is_whole, judge_all
from tests.support_client import Report, poll
from tests.support_cluster import RealCluster
from tests.support_processes import open_files
from tests.support_replay import Asked

SEED = 20_251_130
CONCURRENCY = 16
LONG = int(os.environ.get("CHAOS_REQUESTS", "500"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"gateway.request_timeout_s": DEADLINE_S, "common.kv_bytes": "256MiB"}
    with RealCluster(tmp_path_factory.mktemp("chaos"), prefill=2, decode=2, settings=settings, store=True) as running:
        running.expect_trouble = True
        yield running


def make_orders(number: int) -> list[Order]:
    """The same ones every time: short prompts and answers, greedy and sampled, streamed and whole."""
    rng = random.Random(SEED)
    prompts = [tuple(rng.randrange(100, 40_000) for _ in range(rng.randint(1, 60))) for _ in range(number // 6)]
    prompts.append(tuple(rng.randrange(100, 40_000) for _ in range(300)))  # several chunks
    return [make_order(rng, prompts[number % len(prompts)]) for number in range(number)]


def make_order(rng: random.Random, prompt: tuple[int, ...]) -> Order:
    temperature, seed = rng.choice((0.0, 0.7, 1.0)), rng.randrange(1 << 63)
    asked = Asked(prompt, rng.randint(2, 24), temperature, seed, ignore_eos=rng.random() < 0.5)
    return Order(asked, stream=rng.random() < 0.5, n=rng.choice((1, 1, 1, 2)))


def chaos(
    cluster: RealCluster, victims: Iterable[str], num_requests: int, *, calm: int = 0, endless: bool = False
) -> Counter[str]:
    """Quiet run, run with kills, comparison, and what is left. The kills by role."""
    orders = make_orders(num_requests)
    poll(lambda: is_whole(cluster), lambda: f"not whole: {cluster.workers()}", 90.0)
    quiet = Battle(cluster, orders, (), random.Random(), concurrency=CONCURRENCY)
    quiet.fight()
    assert {order.outcome for order in quiet.sent} == {RIGHT}
    cluster.settled(files=False)
    files, before = open_files(cluster), cluster.worker("gateway")
    battle = Battle(
        cluster, orders, victims, random.Random(SEED), concurrency=CONCURRENCY, calm=calm, endless=endless, patient=True
    )
    battle.fight()
    assert before is not None
    outcomes = report(battle, before)
    check_ends(battle.sent, may_break=bool(battle.kills["gateway"]))
    compare(battle.sent, quiet.sent)
    may_fail = battle.kills["gateway"] or battle.kills["nats-server"]
    assert outcomes[RIGHT] >= (0.6 if may_fail else 1.0) * len(battle.sent), outcomes
    check_serves(cluster, files, orders[0].asked.prompt)
    return battle.kills


def report(battle: Battle, before: Report) -> Counter[str]:
    outcomes = Counter(order.outcome for order in battle.sent)
    longest = max(order.took_s or 0.0 for order in battle.sent)
    gateway = battle.cluster.worker("gateway")
    assert gateway is not None
    known = before["counters"] if gateway["boot_id"] == before["boot_id"] else {}
    retried, recoveries = (
        gateway["counters"].get(name, 0.0) - known.get(name, 0.0) for name in ("attempts_retried", "recoveries")
    )
    rows = [
        ("requests", f"{len(battle.sent)} in {battle.took_s:.0f} s, the longest {longest:.1f} s"),
        ("killed", ", ".join(f"{number} {role}" for role, number in sorted(battle.kills.items()))),
        ("complete", f"{outcomes[RIGHT]} ({100 * outcomes[RIGHT] / len(battle.sent):.1f} %)"),
        ("attempts tried again", f"{retried:.0f}, {recoveries:.0f} of them behind tokens"),
        *((f"  {code}", str(number)) for code, number in sorted(outcomes.items()) if code != RIGHT),
    ]
    print("\n" + "\n".join(f"{name:<24}{value}" for name, value in rows))
    return outcomes


def compare(sent: list[Order], quiet: list[Order]) -> None:
    """What a client got is what the quiet run's got, or the beginning of it. Rounding may change a token; then the
    model itself is asked (`judge`), and must find the token as good as its own."""
    by_asked = {(order.asked, order.n): order for order in quiet}
    differing = []
    for order in sent:
        alone = by_asked[order.asked, order.n]
        assert alone.seen is not None
        for index, choice in (order.seen.choices if order.seen is not None else {}).items():
            whole = alone.seen.choices[index]
            end = len(whole.token_ids) if order.complete else len(choice.token_ids)
            if choice.token_ids != whole.token_ids[:end]:
                differing.append((order, alone))
    excused = judge_all(sent)
    num_tokens = sum(order.num_tokens for order in sent)
    print(f"{num_tokens} tokens judged, {len(differing)} answers differ from the quiet run, {excused} tokens excused")
    for order, alone in differing:
        assert judge_all([order]) + judge_all([alone]), f"{order} differs from {alone}"
    assert excused <= 1 + num_tokens // 200


def randomly(*roles: str) -> Iterator[str]:
    rng = random.Random(SEED + 1)
    while True:
        yield rng.choice(roles)


@pytest.mark.timeout(900)
def test_every_role_is_killed_under_load(cluster: RealCluster) -> None:
    victims = ("sidecar", "prefill", "kvstore", "decode")
    assert chaos(cluster, victims, 40).total() == len(victims)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_processes_are_killed_under_five_hundred_requests(cluster: RealCluster) -> None:
    kills = chaos(cluster, randomly("prefill", "decode", "sidecar", "kvstore"), LONG, endless=True)
    assert kills.total() >= LONG // 50, kills


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gateway_is_killed_again_and_again(cluster: RealCluster) -> None:
    """Each kill costs what is in hand, sixteen requests at most: thrice as many are answered in between."""
    kills = chaos(cluster, randomly("gateway"), LONG // 2, calm=3 * CONCURRENCY, endless=True)
    assert kills.total() >= LONG // 200, kills


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nats_is_killed_again_and_again(cluster: RealCluster) -> None:
    kills = chaos(cluster, randomly("nats-server"), LONG // 2, endless=True)
    assert kills.total() >= LONG // 100, kills
