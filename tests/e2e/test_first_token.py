"""Answers that end at their first token, or near it: P has sampled it, D may or may not be needed any more.

Every way to ask (both routes, whole and streamed) gives the same text, finish and usage, and leaves nothing behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support_answers import CHAT, COMPLETIONS, Seen, see_body, see_stream
from tests.support_client import body_of
from tests.support_cluster import RealCluster
from tests.support_text import text_model

EOS = 2
SENTENCE = "The sky is"
FINISHED = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris."
)
"""A transcript whose answer is complete: the likeliest next token ends it."""


@dataclass(frozen=True)
class Way:
    route: str
    stream: bool
    cluster: RealCluster

    def ask(self, path: str = "remote", **body: Any) -> Seen:
        """Greedy and strictly by `path`, with everything Baton tells about it."""
        baton = {"path": path, "strict": True, "timings": True}
        asked = {"messages": [{"role": "user", "content": SENTENCE}]} if self.route == CHAT else {"prompt": SENTENCE}
        full = body_of(baton=baton, **(asked | body))
        url = self.cluster.url + self.route
        if not self.stream:
            answer = httpx.post(url, json=full, timeout=120.0)
            seen = see_body(answer.status_code, answer.headers["x-baton-path"], answer.json())
        else:
            streaming = full | {"stream": True, "stream_options": {"include_usage": True}}
            with httpx.stream("POST", url, json=streaming, timeout=120.0) as answer:
                seen = see_stream(answer.status_code, answer.headers["x-baton-path"], answer.iter_lines())
        assert seen.error is None, seen.error
        assert seen.ended
        assert seen.path == path
        return seen


WAYS = [(CHAT, False), (CHAT, True), (COMPLETIONS, False), (COMPLETIONS, True)]


@pytest.fixture(params=WAYS, ids=["chat", "chat-stream", "completions", "completions-stream"])
def way(request: pytest.FixtureRequest, cluster: RealCluster) -> Iterator[Way]:
    route, stream = request.param
    yield Way(route, stream, cluster)
    cluster.settled()


def transfers(cluster: RealCluster) -> dict[str, float]:
    """What all sidecars have ever counted of transfers: any byte that moves changes it. A connection that ends, because
    nobody has used it for a while, is none."""
    cluster.settled(files=False)
    return {
        f"{sidecar['id']}.{name}": count
        for sidecar in cluster.workers("sidecar")
        for name, count in sidecar["counters"].items()
        if name != "connections_ended"
    }


def text_of(*tokens: int) -> str:
    return text_model().decode(tokens, skip_special=True)


def usage(seen: Seen) -> int:
    assert seen.usage is not None
    prompt_len = len(seen.choices[0].prompt_ids)
    completion = seen.usage["completion_tokens"]
    assert seen.usage == {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion,
        "total_tokens": prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert completion == sum(len(tokens) for tokens in seen.tokens)
    return completion


def test_one_token_is_all_that_was_asked_for(way: Way) -> None:
    expected = way.ask(path="local", max_tokens=3).tokens[0][0]
    before = transfers(way.cluster)
    seen = way.ask(max_tokens=1)
    assert seen.tokens == [[expected]]
    assert seen.texts == [text_of(expected)]
    assert seen.finishes == ["length"]
    assert usage(seen) == 1
    assert seen.bytes_moved == 0
    assert transfers(way.cluster) == before


def test_one_token_after_a_prompt_of_several_chunks_moves_nothing(cluster: RealCluster) -> None:
    prompt = [(i * 37) % 40_000 + 100 for i in range(300)]
    before = transfers(cluster)
    seen = Way(COMPLETIONS, False, cluster).ask(prompt=prompt, max_tokens=1)
    assert seen.finishes == ["length"]
    assert usage(seen) == 1
    assert seen.bytes_moved == 0
    assert transfers(cluster) == before


def test_end_of_text_is_the_first_token(way: Way) -> None:
    before = transfers(way.cluster)
    seen = way.ask(max_tokens=8, logit_bias={str(EOS): 100})
    assert seen.texts == [""]
    assert seen.tokens == [[EOS]]
    assert seen.finishes == ["stop"]
    assert usage(seen) == 1
    assert seen.bytes_moved == 0
    assert transfers(way.cluster) == before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_model_itself_ends_at_its_first_token(stream: bool, cluster: RealCluster) -> None:
    before = transfers(cluster)
    seen = Way(COMPLETIONS, stream, cluster).ask(prompt=FINISHED, max_tokens=8)
    assert (seen.texts, seen.tokens, seen.finishes) == ([""], [[EOS]], ["stop"])
    assert usage(seen) == 1
    assert seen.bytes_moved == 0
    assert transfers(cluster) == before


def test_a_stop_string_inside_the_first_token(way: Way) -> None:
    """P and D know ids only, and P has begun to send by the time the gateway has seen the text: bytes may have moved.
    What is guaranteed is the answer, and that everybody lets go."""
    first = way.ask(max_tokens=1).tokens[0][0]
    text = text_of(first)
    seen = way.ask(max_tokens=64, stop=[text[1:]])
    assert seen.texts == [text[:1]]
    assert seen.tokens == [[first]]
    assert seen.finishes == ["stop"]
    assert usage(seen) == 1


@pytest.mark.parametrize("path", ["remote", "local"])
@pytest.mark.parametrize("begin", [0, 1], ids=["over-the-handoff", "after-it"])
def test_a_stop_string_across_two_tokens(way: Way, begin: int, path: str) -> None:
    """begin 0: its first half comes from P, the other from D."""
    tokens = way.ask(path=path, max_tokens=4).tokens[0]
    here, there = text_of(tokens[begin]), text_of(tokens[begin + 1])
    stop = here[-1:] + there[:2]
    shown = text_of(*tokens[: begin + 2]).split(stop)[0]
    assert shown == text_of(*tokens[:begin]) + here[:-1], "the stop string occurs where the two tokens meet"
    seen = way.ask(path=path, max_tokens=64, stop=["never said", stop])
    assert seen.texts == [shown]
    assert seen.tokens == [tokens[: begin + 2]]
    assert seen.finishes == ["stop"]
    assert usage(seen) == begin + 2
    assert (seen.bytes_moved > 0) == (path == "remote")


@dataclass(frozen=True)
class Pair:
    """Two choices that begin differently, neither with what the other one begins with."""

    seed: int
    tokens: list[list[int]]

    @property
    def body(self) -> dict[str, Any]:
        return {"n": 2, "temperature": 1.0, "seed": self.seed, "max_tokens": 4, "ignore_eos": True}


def find_pair(way: Way) -> Pair:
    for seed in range(20):
        pair = Pair(seed, [])
        tokens = way.ask(path="local", **pair.body).tokens
        if tokens[0][0] not in tokens[1] and tokens[1][0] not in tokens[0]:
            return Pair(seed, tokens)
    raise AssertionError("no seed whose two choices begin differently")


def test_the_first_token_ends_one_of_two_choices(way: Way) -> None:
    pair = find_pair(way)
    ends, goes_on = pair.tokens
    seen = way.ask(**pair.body, stop_token_ids=[ends[0]])
    assert seen.tokens == [ends[:1], goes_on]
    assert seen.texts == ["", text_of(*goes_on)]
    assert seen.finishes == ["stop", "length"]
    assert usage(seen) == 5
    assert seen.bytes_moved > 0, "the other choice needs the prompt's state"


def test_the_first_tokens_end_both_choices(way: Way) -> None:
    pair = find_pair(way)
    before = transfers(way.cluster)
    seen = way.ask(**pair.body, stop_token_ids=[tokens[0] for tokens in pair.tokens])
    assert seen.tokens == [tokens[:1] for tokens in pair.tokens]
    assert seen.texts == ["", ""]
    assert seen.finishes == ["stop", "stop"]
    assert usage(seen) == 2
    assert seen.bytes_moved == 0
    assert transfers(way.cluster) == before


def test_a_stop_string_in_its_first_token_ends_one_of_two_choices(way: Way) -> None:
    pair = find_pair(way)
    ends, goes_on = pair.tokens
    stop = text_of(ends[0])
    assert stop not in text_of(*goes_on)
    seen = way.ask(**pair.body, stop=[stop])
    assert seen.tokens == [ends[:1], goes_on]
    assert seen.texts == ["", text_of(*goes_on)]
    assert seen.finishes == ["stop", "length"]
    assert usage(seen) == 5
