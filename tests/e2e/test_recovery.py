"""A decode worker is killed in the middle of its streams: each of them goes on with another worker, and gets what it
got from a cluster that nobody disturbed, whatever its sampling."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from shared.engine.sampler import SampleRow, sample
from shared.protocol.messages import SamplingSpec
from tests.support_answers import ChoiceSeen, Seen
from tests.support_chaos import check_serves, wait_whole
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_processes import open_files
from tests.support_replay import EOS, LOGIT_ROUNDING, solo_logits
from tests.support_visitor import Visitor, prompt_of, tickets

MAX_TOKENS = 96
BATON = {"timings": True}
BASE: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "baton": BATON}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "seed": 3, "top_k": 40, "min_p": 0.05},
    PENALTIES,
    PENALTIES | {"temperature": 0.9, "seed": 4},
    {"n": 2, "temperature": 0.9, "seed": 5},
    {"n": 2, "temperature": 0.7, "seed": 6, "logprobs": 0, **PENALTIES},
    {"temperature": 0.9, "seed": 7, "min_tokens": 40, "ignore_eos": False},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with RealCluster(tmp_path_factory.mktemp("recovery"), decode=2, settings={"common.kv_bytes": "256MiB"}) as running:
        running.expect_trouble = True
        yield running


@pytest.fixture(scope="module")
def bodies(cluster: RealCluster) -> list[dict[str, Any]]:
    """One request of each kind; of those with stop strings one stops behind the middle, and one never."""
    made = [BASE | {"prompt": prompt_of(17 + 29 * k, k)} | sampling for k, sampling in enumerate(SAMPLINGS)]
    whole = run(cluster, [made[2]])[0].texts[0]
    stop = whole[len(whole) * 2 // 3 :][:5]
    return [*made, made[2] | {"stop": stop}, made[0] | {"stop": ["never to be seen"]}]


@pytest.fixture(scope="module")
def quiet(cluster: RealCluster, bodies: list[dict[str, Any]]) -> list[Seen]:
    answers = run(cluster, bodies)
    assert {seen.baton["timings"]["recoveries"] for seen in answers if seen.baton is not None} == {0}
    return answers


def run(cluster: RealCluster, bodies: list[dict[str, Any]]) -> list[Seen]:
    """All of them at once."""
    with ExitStack() as stack:
        visitors = [stack.enter_context(Visitor(cluster, **body)) for body in bodies]
        return [visitor.stay(240.0) for visitor in visitors]


def run_and_kill(cluster: RealCluster, bodies: list[dict[str, Any]], at_tokens: int) -> tuple[list[Seen], str, int]:
    """The same; but when they have so many tokens together, one that streams to several of them is killed. Its name and
    pid."""
    with ExitStack() as stack:
        visitors = [stack.enter_context(Visitor(cluster, **body)) for body in bodies]

        def busy() -> str | None:
            has_tokens = sum(visitor.num_tokens for visitor in visitors) >= at_tokens
            workers = ("decode-0", "decode-1")
            return next((w for w in workers if has_tokens and tickets(cluster, w, "started") >= 2), None)

        victim: str = poll(busy, "nobody streams to several", 120.0)
        pid = cluster.kill(victim)
        return [visitor.stay(240.0) for visitor in visitors], victim, pid


@pytest.mark.timeout(600)
@pytest.mark.parametrize("at_tokens", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_the_streams_of_a_killed_decode_worker_go_on(
    cluster: RealCluster, bodies: list[dict[str, Any]], quiet: list[Seen], at_tokens: int
) -> None:
    files = open_files(cluster)
    seen, victim, pid = run_and_kill(cluster, bodies, at_tokens)
    excused = sum(differs(*triple) for triple in zip(bodies, quiet, seen, strict=True))
    recovered = [one.baton["timings"]["recovery"] for one in seen if one.baton is not None]
    gaps = sorted(loss["resumed_s"] - loss["detected_s"] for losses in recovered for loss in losses)
    print(f"{len(gaps)} recoveries in {gaps[:1]} to {gaps[-1:]} s, {excused} answers with a near tie")
    assert len(gaps) >= 2, recovered
    assert {loss["cause"] for losses in recovered for loss in losses} == {"peer_lost"}
    assert max(map(len, recovered)) == 1
    assert excused <= 2
    wait_whole(cluster, victim, other_than=pid)
    check_serves(cluster, files, bodies[0]["prompt"])
    assert cluster.counter("gateway", "recoveries_given_up") == 0
    assert cluster.counter("gateway", "recoveries_resumed") >= len(gaps)


def differs(body: dict[str, Any], alone: Seen, seen: Seen) -> bool:
    """False where the answers are equal, True where a token that might as well have been the other one parts them;
    else AssertionError."""
    assert (seen.error, seen.ended) == (None, True), seen
    assert sorted(seen.choices) == sorted(alone.choices)
    parted = False
    for index, choice in seen.choices.items():
        whole = alone.choices[index]
        common = num_common(choice.token_ids, whole.token_ids)
        for given, right in zip(choice.logprobs[:common], whole.logprobs, strict=False):
            assert abs(given - right) < 4 * LOGIT_ROUNDING, f"{body}: {given} for {right}"
        if choice.token_ids != whole.token_ids:
            check_near_tie(body, index, choice, whole, common)
            parted = True
        else:
            assert (choice.text, choice.finish) == (whole.text, whole.finish)
    return parted


def num_common(ours: list[int], theirs: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def check_near_tie(body: dict[str, Any], index: int, ours: ChoiceSeen, theirs: ChoiceSeen, common: int) -> None:
    """Both tokens are what the sampler takes from the model's own logits, if each of these is off by no more than
    rounding."""
    assert common < min(len(ours.token_ids), len(theirs.token_ids)), f"{body}: {ours} ends otherwise than {theirs}"
    both, before = {ours.token_ids[common], theirs.token_ids[common]}, ours.token_ids[:common]
    prompt = tuple(body["prompt"])
    logits = torch.from_numpy(solo_logits(prompt, [[*before, 0]])[0][-1]).float()
    names = SamplingSpec.model_fields.keys() & body.keys()
    sampling = SamplingSpec(**{"temperature": 0.0} | {name: body[name] for name in names})
    row = SampleRow(sampling, index, len(prompt) + common, prompt, before, frozenset({EOS}))
    impossible = {token for token in both if not _may_be_drawn(token, max(both), logits, row)}
    assert not impossible, f"{body}: choice {index}, token {common}: of {both} {impossible} could not be drawn"
    print(f"near tie: choice {index}, token {common} of {body}: {both}")


def _may_be_drawn(token: int, border: int, logits: torch.Tensor, row: SampleRow) -> bool:
    """Whether logits that are off by rounding alone let the sampler take it: the token's own by itself, or all below
    `border` one way and all above the other, by which the borders of a draw move most. The larger such a shift the
    lower the token that is drawn; intervals may be narrow, so the right one is looked for. One narrower than the
    logits' resolution is passed over: then tokens on both of its sides are drawn."""
    alone = logits - LOGIT_ROUNDING
    alone[token] += 2 * LOGIT_ROUNDING
    if sample(alone[None], [row])[0].token == token:
        return True
    low, high, sides = -LOGIT_ROUNDING, LOGIT_ROUNDING, set()
    for _ in range(40):
        step = (low + high) / 2
        moved = logits.double() + step
        moved[border:] -= 2 * step
        drawn = sample(moved.float()[None], [row])[0].token
        if drawn == token:
            return True
        sides.add(drawn > token)
        low, high = (step, high) if drawn > token else (low, step)
    return len(sides) == 2
