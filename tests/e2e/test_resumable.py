"""Streams that outlive their connection: a client leaves, or loses its gateway, or that and the decode worker, and
reads the rest at whichever gateway it likes. Together it has what nobody disturbed would have got, each token once."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.test_recovery import check_near_tie, num_common
from tests.support_answers import CHAT, COMPLETIONS, ChoiceSeen
from tests.support_client import MODEL, poll
from tests.support_cluster import RealCluster
from tests.support_streams import Connection, Read, finishes_of, logprobs_of, texts_of, tokens_of, usage_of
from tests.support_visitor import prompt_of, tickets

GRACE_S = 8.0
MAX_TOKENS = 64
RESUMABLE = {"resumable": True, "token_ids": True, "timings": True}
BODY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "baton": RESUMABLE,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"common.kv_bytes": "256MiB", "gateway.orphan_grace_s": GRACE_S, "gateway.shutdown_timeout_s": 1.0}
    with RealCluster(tmp_path_factory.mktemp("streams"), decode=2, gateway=2, settings=settings) as running:
        running.expect_trouble = True
        for url in urls(running):  # the journal's files are open from the first stream on
            assert Connection(url, COMPLETIONS, BODY | {"prompt": [1, 2, 3], "max_tokens": 2}).stay().ended
        running.mark()
        yield running


@pytest.fixture(autouse=True)
def all_is_released(cluster: RealCluster) -> Iterator[None]:
    yield
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)
    for name in ("gateway-0", "gateway-1", "decode-0", "decode-1"):
        cluster.wait_ready(name)
    cluster.settled(within_s=GRACE_S + 30.0, files=False)


def urls(cluster: RealCluster) -> list[str]:
    """Of the gateways, the one that the cluster is known by first."""
    return [f"http://127.0.0.1:{worker['http_port']}" for worker in cluster.workers("gateway")]


def pid_of(cluster: RealCluster, name: str) -> int:
    return int(next(worker["pid"] for worker in cluster.workers() if worker["id"] == name))


def adopted_by(cluster: RealCluster, gateway: str) -> float:
    return sum(one["counters"].get("tickets_adopted", 0.0) for one in cluster.workers() if one["id"] == gateway)


def begin(cluster: RealCluster, body: dict[str, Any], until: int, path: str = COMPLETIONS) -> tuple[Connection, Read]:
    connection = Connection(cluster.url, path, body)
    connection.wait_tokens(until)
    assert connection.read is not None
    assert connection.read.status == 200
    return connection, connection.read


def resume(url: str, stream: str, after: str | None, **headers: str) -> Connection:
    query = "" if after is None else f"?after={after}"
    return Connection(url, f"/v1/streams/{stream}{query}", headers=headers)


def alone(cluster: RealCluster, body: dict[str, Any], path: str = COMPLETIONS) -> Read:
    read = Connection(cluster.url, path, body).stay()
    assert (read.status, read.ended) == (200, True), read
    return read


def check(body: dict[str, Any], whole: Read, reads: list[Read], *, exact: bool = False) -> None:
    """Together they are the whole: every token once, the text that belongs to them, and one end. A token of another
    attempt may be another one only where the two best were as good as equal."""
    assert reads[-1].ended, reads[-1]
    assert [read.error for read in reads] == [None] * len(reads)
    assert len({event["id"] for read in [*reads] for event in read.events}) == 1
    assert len({event["created"] for read in [*reads] for event in read.events}) == 1
    ours, right = tokens_of(reads), tokens_of([whole])
    assert ours.keys() == right.keys()
    for choice, tokens in right.items():
        if ours[choice] == tokens:
            continue
        assert not exact, f"choice {choice}: {ours[choice]} for {tokens}"
        common = num_common(ours[choice], tokens)
        check_near_tie(body, choice, ChoiceSeen(token_ids=ours[choice]), ChoiceSeen(token_ids=tokens), common)
        return
    assert texts_of(reads) == texts_of([whole])
    assert finishes_of(reads) == finishes_of([whole])
    assert logprobs_of(reads).keys() == logprobs_of([whole]).keys()
    assert usage_of(reads[-1]) == usage_of(whole)
    assert reads[-1].events[-1]["baton"].keys() == whole.events[-1]["baton"].keys()


def check_again(cluster: RealCluster, reads: list[Read]) -> None:
    """Whoever reads it all once more, at any gateway, reads the same."""
    for url in urls(cluster):
        again = resume(url, reads[0].stream, None).stay()
        assert (again.status, again.ended) == (200, True), again
        assert tokens_of([again]) == tokens_of(reads)
        assert texts_of([again]) == texts_of(reads)
        assert usage_of(again) == usage_of(reads[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1], ids=["same", "other"])
def test_a_client_that_lost_its_connection_reads_the_rest(cluster: RealCluster, number: int) -> None:
    body = BODY | {"prompt": prompt_of(70, number), "logprobs": 2}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 15)
    connection.leave()
    second = resume(urls(cluster)[number], first.stream, first.ids[-1]).stay()
    check(body, whole, [first, second], exact=True)
    check_again(cluster, [first, second])


@pytest.mark.timeout(300)
def test_it_goes_on_while_nobody_reads(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(30, 7), "max_tokens": 32}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 4)
    connection.leave()
    poll(lambda: sum(tickets(cluster, d) for d in ("decode-0", "decode-1")) == 0, "it does not finish", 60.0)
    second = resume(urls(cluster)[1], first.stream, None, **{"Last-Event-ID": first.ids[-1]}).stay()
    check(body, whole, [first, second], exact=True)


@pytest.mark.timeout(300)
def test_the_gateway_is_killed(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(90, 3)}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 15)
    other, adopted = urls(cluster)[1], adopted_by(cluster, "gateway-1")
    cluster.kill("gateway-0")
    assert connection.stay().broken
    second = resume(other, first.stream, first.ids[-1]).stay()
    check(body, whole, [first, second], exact=True)
    assert tokens_of([first])[0] == tokens_of([first, second])[0][: len(tokens_of([first])[0])]
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)
    check_again(cluster, [first, second])
    poll(lambda: adopted_by(cluster, "gateway-1") == adopted + 1, "not adopted", 15.0)
    assert cluster.counter("decode", "tickets_given_over") >= 1


@pytest.mark.timeout(300)
def test_the_gateway_comes_back_under_its_address(cluster: RealCluster) -> None:
    """A client that knows one address only goes on there, with the next process."""
    body = BODY | {"prompt": prompt_of(40, 5)}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 10)
    cluster.kill("gateway-0")
    assert connection.stay().broken
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)
    second = resume(cluster.url, first.stream, first.ids[-1]).stay()
    check(body, whole, [first, second])


@pytest.mark.timeout(300)
def test_the_gateway_is_told_to_end(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(50, 8)}
    whole = alone(cluster, body)
    connection, _ = begin(cluster, body, 10)
    other, adopted = urls(cluster)[1], adopted_by(cluster, "gateway-1")
    cluster.signal("gateway-0", signal.SIGTERM)
    first = connection.stay()
    assert (first.error or {}).get("code") == "shutting_down", first
    second = resume(other, first.stream, first.ids[-1]).stay()
    first.error = None
    check(body, whole, [first, second], exact=True)
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)
    poll(lambda: adopted_by(cluster, "gateway-1") == adopted + 1, "not adopted", 15.0)


@pytest.mark.timeout(300)
def test_the_gateway_and_the_decode_worker_are_killed(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(60, 9), "n": 2, "temperature": 0.9, "seed": 11}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 30)
    serving = poll(
        lambda: next((d for d in ("decode-0", "decode-1") if tickets(cluster, d, "started")), None), "", 20.0
    )
    other = urls(cluster)[1]
    worker = pid_of(cluster, serving)
    cluster.kill("gateway-0")
    os.kill(worker, signal.SIGKILL)
    assert connection.stay().broken
    second = resume(other, first.stream, first.ids[-1]).stay()
    check(body, whole, [first, second])
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)


@pytest.mark.timeout(300)
def test_nats_is_killed(cluster: RealCluster) -> None:
    """It has kept what was written down: the stream pauses and goes on, and another gateway finds it."""
    body = BODY | {"prompt": prompt_of(44, 4)}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 10)
    cluster.kill("nats-server")
    connection.wait_tokens(first.num_tokens + 5)
    first = connection.leave()
    second = resume(urls(cluster)[1], first.stream, first.ids[-1]).stay()
    check(body, whole, [first, second])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_several_choices_and_stop_strings(cluster: RealCluster, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "Once upon a time"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "Tell me of rivers, with emoji."}]}
    body = BODY | prompt | {"n": 2, "temperature": 0.9, "seed": 3, "max_tokens": 48}
    free = texts_of([alone(cluster, body, path)])
    stop = free[0][len(free[0]) * 2 // 3 :][:5]
    body |= {"stop": [stop, "never to be seen"]}
    whole = alone(cluster, body, path)
    assert finishes_of([whole])[0] == "stop"
    connection, first = begin(cluster, body, 24, path)
    connection.leave()
    second = resume(urls(cluster)[1], first.stream, first.ids[-1])
    second.wait_tokens(8)
    middle = second.leave()
    last = resume(urls(cluster)[0], first.stream, (first.ids + middle.ids)[-1]).stay()
    assert texts_of([first, middle, last]) == texts_of([whole])
    assert finishes_of([first, middle, last]) == finishes_of([whole])
    assert usage_of(last) == usage_of(whole)
    beyond = resume(cluster.url, first.stream, "4000.0").stay()
    assert (beyond.status, (beyond.error or {}).get("param")) == (400, "after")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1], ids=["same", "other"])
def test_a_second_connection_takes_it_from_the_first(cluster: RealCluster, number: int) -> None:
    body = BODY | {"prompt": prompt_of(25, 2)}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 10)
    at = first.ids[-1]
    second = resume(urls(cluster)[number], first.stream, at).stay()
    ended = connection.stay()
    assert (ended.ended, (ended.error or {}).get("code")) == (False, "stream_moved"), ended
    cut = Read(200, first.headers, first.ids[: int(at)], first.events[: int(at)])
    check(body, whole, [cut, second])


@pytest.mark.timeout(300)
def test_who_did_not_ask_for_it_is_cancelled_at_once(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(33), "max_tokens": 400, "baton": {"token_ids": True}}
    connection = Connection(cluster.url, COMPLETIONS, body)
    poll(lambda: sum(tickets(cluster, d, "started") for d in ("decode-0", "decode-1")), "nothing runs", 30.0)
    assert "x-baton-stream-id" not in connection.leave().headers
    left_at = time.monotonic()
    poll(lambda: not sum(tickets(cluster, d) for d in ("decode-0", "decode-1")), "still there", GRACE_S)
    assert time.monotonic() - left_at < GRACE_S / 2


@pytest.mark.timeout(300)
def test_nobody_comes_back(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(33), "max_tokens": 800}
    expired = cluster.counter("gateway", "streams_expired")
    connection, first = begin(cluster, body, 5)
    connection.leave()
    left_at = time.monotonic()
    poll(lambda: cluster.counter("gateway", "streams_expired") > expired, "it never expires", 3 * GRACE_S)
    assert time.monotonic() - left_at > GRACE_S / 2
    cluster.settled(files=False)
    for url in urls(cluster):
        gone = resume(url, first.stream, first.ids[-1]).stay()
        assert (gone.status, (gone.error or {}).get("code")) == (404, "stream_not_found")


@pytest.mark.timeout(300)
def test_the_gateway_dies_and_nobody_comes_back(cluster: RealCluster) -> None:
    body = BODY | {"prompt": prompt_of(33), "max_tokens": 800}
    connection, first = begin(cluster, body, 5)
    other = urls(cluster)[1]
    cluster.kill("gateway-0")
    connection.stay()
    died_at = time.monotonic()
    poll(lambda: _answers(cluster.url), "no gateway", 60.0)
    cluster.settled(within_s=3 * GRACE_S, files=False)  # its tickets end
    time.sleep(max(0.0, 1.5 * GRACE_S - (time.monotonic() - died_at)))
    assert resume(other, first.stream, None).stay().status == 404


@pytest.mark.timeout(300)
def test_a_gateway_that_stood_still_sends_nothing_more(cluster: RealCluster) -> None:
    """Its stream was taken up elsewhere meanwhile: when it wakes up, its client is told so and gets no other token."""
    body = BODY | {"prompt": prompt_of(28, 6)}
    whole = alone(cluster, body)
    connection, first = begin(cluster, body, 10)
    other = urls(cluster)[1]
    pid = cluster.signal("gateway-0", signal.SIGSTOP)
    try:
        stood = first.num_tokens
        second = resume(other, first.stream, first.ids[stood - 1]).stay()
    finally:
        os.kill(pid, signal.SIGCONT)
    late = connection.stay()
    assert (late.ended, (late.error or {}).get("code")) == (False, "stream_moved"), late
    assert late.num_tokens <= stood + 3  # what it had written down before it stopped it may send
    told = Read(200, first.headers, first.ids[:stood], first.events[:stood])
    check(body, whole, [told, second])
    assert tokens_of([late])[0] == tokens_of([told, second])[0][: late.num_tokens]


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
