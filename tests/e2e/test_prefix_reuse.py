"""Later requests have the state of earlier ones: out of the pools of both workers, and out of the store. What is moved
and what is computed is counted, and no answer changes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.test_recovery import differs
from tests.support_answers import Seen, see_body
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_visitor import prompt_of, report_of

BLOCK = 64
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Keys and values of SmolLM2-135M in float32."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    directory, settings = tmp_path_factory.mktemp("reuse"), {"common.kv_bytes": "96MiB", "sidecar.transfer": "tcp"}
    with RealCluster(directory, prefill=2, decode=2, settings=settings, reuse=True, store=True) as running:
        running.expect_trouble = True
        yield running


def ask(cluster: RealCluster, prompt: list[int], *, salt: str | None, **more: Any) -> Seen:
    baton = {"timings": True} | ({"cache_salt": salt} if salt else {}) | more.pop("baton", {})
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "logprobs": 0} | more
    answer = cluster.complete(baton=baton, **body)
    assert answer.status == 200, answer.body
    return see_body(answer.status, answer.path, answer.body)


def same(cluster: RealCluster, prompt: list[int], seen: Seen, *, salt: str, **more: Any) -> None:
    """As the answer of somebody who shares state with nobody."""
    alone = ask(cluster, prompt, salt=salt, **more)
    assert cached(alone) == 0
    differs({"prompt": prompt} | more, alone, seen)


def cached(seen: Seen) -> int:
    assert seen.usage is not None
    return int(seen.usage["prompt_tokens_details"]["cached_tokens"])  # type: ignore[index]


def timings(seen: Seen) -> dict[str, Any]:
    assert seen.baton is not None
    return dict(seen.baton["timings"])


def stored(cluster: RealCluster) -> float:
    """Blocks that the store has."""
    return float(report_of(cluster, "kvstore")["counters"]["blocks_known"])


def test_the_second_turn_of_a_conversation_moves_only_what_is_new(cluster: RealCluster) -> None:
    """P has the prompt of the first turn, and D its answer as well; the question behind it is long."""
    prompt = prompt_of(300, 1)
    first = ask(cluster, prompt, salt="turns", max_tokens=100)
    assert (first.path, cached(first)) == ("remote", 0)
    assert timings(first)["bytes"] == {"kv": 300 * TOKEN_BYTES}
    turn = [*prompt, *first.tokens[0], *prompt_of(150, 2)]
    second = ask(cluster, turn, salt="turns")
    told = timings(second)
    assert (second.path, told["held_tokens"]) == ("remote", 384)  # whole blocks of the 399 that D has state of
    assert told["bytes"] == {"kv": (len(turn) - 384) * TOKEN_BYTES}
    assert cached(second) >= 256  # from P's pool, or what the store has of it
    same(cluster, turn, second, salt="turns-alone")


def test_a_prompt_that_was_there_before_moves_nothing(cluster: RealCluster) -> None:
    prompt = prompt_of(300, 3)
    first = ask(cluster, prompt, salt="again")
    again = ask(cluster, prompt, salt="again")
    assert (first.path, again.path) == ("remote", "local")
    assert (cached(again), timings(again)["bytes"]) == (256, {})
    differs({"prompt": prompt}, first, again)
    strict = ask(cluster, prompt, salt="again", baton={"path": "remote", "strict": True})
    assert (strict.path, cached(strict)) == ("remote", 256)
    assert timings(strict)["bytes"] == {"kv": (300 - 256) * TOKEN_BYTES}
    differs({"prompt": prompt}, first, strict)


def test_nobody_else_has_any_of_it(cluster: RealCluster) -> None:
    prompt = prompt_of(200, 4)
    ask(cluster, prompt, salt="mine")
    assert cached(ask(cluster, prompt, salt="yours")) == 0
    assert cached(ask(cluster, prompt, salt=None)) == 0
    assert cached(ask(cluster, prompt, salt="mine")) == 192


@pytest.mark.parametrize("more", [{"n": 3, "temperature": 0.9, "seed": 5}, {"temperature": 1.0, "seed": 6}])
def test_sampling_is_the_same_behind_a_beginning_that_was_there(cluster: RealCluster, more: dict[str, Any]) -> None:
    prompt = prompt_of(170, 5)
    first = ask(cluster, prompt, salt="draws", **more)
    for path in ("auto", "remote", "local"):
        again = ask(cluster, prompt, salt="draws", baton={"path": path}, **more)
        assert cached(again) == 128, path
        differs({"prompt": prompt} | more, first, again)
    cluster.settled(files=False)


def test_what_came_lossy_serves_nobody_who_did_not_ask_for_it(cluster: RealCluster) -> None:
    prompt = prompt_of(200, 6)
    lossy, exact = {"kv_precision": "int8", "path": "remote"}, {"path": "remote"}
    first = ask(cluster, prompt, salt="lossy", baton=lossy)
    assert timings(first)["wire_format"] == "int8", timings(first)
    assert timings(ask(cluster, prompt, salt="lossy", baton=lossy))["held_tokens"] == 192
    seen = ask(cluster, prompt, salt="lossy", baton=exact)
    assert (timings(seen)["held_tokens"], cached(seen)) == (0, 192)  # P's own is exact
    same(cluster, prompt, seen, salt="lossy-alone", baton=exact)


def test_a_prefill_worker_that_was_away_loads_the_beginning(cluster: RealCluster) -> None:
    """Both are killed, and the store has what they had computed."""
    prompt = prompt_of(400, 7)
    before = stored(cluster)
    first = ask(cluster, prompt, salt="away", max_tokens=8)
    poll(lambda: stored(cluster) >= before + 6, "nothing is stored", 30.0)
    pids = {name: cluster.kill(name) for name in ("prefill-0", "prefill-1")}
    for name, pid in pids.items():
        cluster.wait_ready(name, other_than=pid)
    again = ask(cluster, prompt, salt="away", max_tokens=8, baton={"path": "remote"})
    assert cached(again) >= 4 * BLOCK
    assert sum(w["counters"].get("blocks_loaded", 0) for w in cluster.workers("prefill")) > 0
    differs({"prompt": prompt, "max_tokens": 8}, first, again)


def test_the_stores_bring_the_history_while_prefill_computes_the_rest(cluster: RealCluster) -> None:
    """Both decode workers are killed; P has the prompt, and the store has it too."""
    prompt = prompt_of(330, 10)
    before = stored(cluster)
    first = ask(cluster, prompt, salt="hybrid")
    poll(lambda: stored(cluster) >= before + 5, "nothing is stored", 30.0)
    pids = {name: cluster.kill(name) for name in ("decode-0", "decode-1")}
    for name, pid in pids.items():
        cluster.wait_ready(name, other_than=pid)
    turn = [*prompt, *first.tokens[0], *prompt_of(90, 11)]
    seen = ask(cluster, turn, salt="hybrid", baton={"path": "hybrid"})
    told = timings(seen)
    assert seen.path == "hybrid", told
    assert told["attempts"] == 1
    assert told["loaded_tokens"] == 320  # the five blocks of the prompt; its answer ends none
    assert told["loaded_bytes"] == told["loaded_tokens"] * TOKEN_BYTES
    assert told["bytes"] == {"kv": (len(turn) - told["loaded_tokens"]) * TOKEN_BYTES}
    same(cluster, turn, seen, salt="hybrid-alone")


def test_a_decode_worker_that_has_less_than_was_thought_costs_an_attempt_and_no_more(cluster: RealCluster) -> None:
    """Its pool is filled with others' prompts meanwhile."""
    prompt = prompt_of(200, 9)
    first = ask(cluster, prompt, salt="gone")
    tokens = report_of(cluster, "decode-0")["pages"]["total"] * 16
    fill = lambda number: ask(cluster, prompt_of(700, number), salt="others", max_tokens=1, baton={"path": "local"})  # noqa: E731
    with ThreadPoolExecutor(2) as both:  # one at each, since each counts what it has ahead
        list(both.map(fill, range(100, 100 + 2 * (tokens // 700 + 1))))
    again = ask(cluster, prompt, salt="gone")
    assert again.path in ("remote", "hybrid")
    assert timings(again)["attempts"] == 2
    assert timings(again)["recoveries"] == 0
    differs({"prompt": prompt}, first, again)


def test_nothing_is_held_for_anybody_afterwards(cluster: RealCluster) -> None:
    cluster.settled(files=False)
