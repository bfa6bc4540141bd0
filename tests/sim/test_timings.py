"""What a request's timings say, on virtual time: a step takes a second and messages take none."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from services.gateway.generation import PathPolicy
from services.prefill.wire_choice import WireChoice
from shared.bus.memory import Envelope
from shared.protocol import subjects
from shared.runtime.errors import PeerLost
from shared.runtime.mode import Mode
from shared.transfer.fake import Mishap
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.virtual_time import run_virtual

CLUSTER: dict[str, Any] = {"num_pages": 256, "prefill_chunk": 8, "step_tokens": 32, "step_s": 1.0}


def late_by(late_s: float) -> Callable[[Envelope], Iterable[float]]:
    """P hears so much later where the state goes."""

    def policy(envelope: Envelope) -> Iterable[float]:
        is_destination = envelope.subject.endswith(f".{subjects.DESTINATION}") and envelope.kind == "request"
        return (late_s if is_destination else 0.0,)

    return policy


@pytest.mark.parametrize(
    ("path", "mode", "prefill_s"),
    [
        ("remote", "separated", 4.0),
        ("local", "separated", 4.0),
        ("local", "colocated", 1.0),
        ("local", "chunked", 2.0),
    ],
)
def test_what_a_prompt_waits_for_its_turn_is_queue_wherever_it_is_computed(
    path: PathPolicy, mode: Mode, prefill_s: float
) -> None:
    """It comes while a step is under way, and begins with the next one."""

    async def scenario() -> None:
        async with Cluster(prefills=int(mode == "separated"), mode=mode, **CLUSTER) as cluster:
            ahead = asyncio.get_running_loop().create_task(
                cluster.ask(prompt_of(24), path=path, max_tokens=2, ignore_eos=True)
            )
            await asyncio.sleep(0.25)
            answer = await cluster.ask(prompt_of(32, seed=1), path=path, max_tokens=2, ignore_eos=True)
            assert (answer.error, answer.path, (await ahead).error) == (None, path, None)
            found = answer.timings
            assert found["prefill_queue_s"] == pytest.approx(0.75, abs=0.02)
            assert found["prefill_s"] == pytest.approx(prefill_s, abs=0.02)
            assert found["first_token_s"] == pytest.approx(0.75 + prefill_s, abs=0.05)
            assert ahead.result().timings["prefill_queue_s"] == pytest.approx(0.0, abs=0.02)

    run_virtual(scenario())


def test_of_two_alike_the_one_with_less_time_is_computed_first() -> None:
    """One step for each prompt; both come while another one is computed."""

    async def scenario() -> None:
        async with Cluster(prefills=0, mode="colocated", **CLUSTER) as cluster:
            tasks = []
            for seed, timeout_s in enumerate((60.0, 60.0, 30.0)):
                asking = cluster.ask(prompt_of(40, seed=seed), path="local", max_tokens=1, timeout_s=timeout_s)
                tasks.append(asyncio.get_running_loop().create_task(asking))
                await asyncio.sleep(0.25)
            waits = [(await task).timings["prefill_queue_s"] for task in tasks]
            assert waits == pytest.approx([0.0, 1.75, 0.5], abs=0.02)

    run_virtual(scenario())


def test_what_of_a_transfer_was_hidden_behind_the_compute() -> None:
    """Three chunks of a second; each takes half a second to move, the first two while the next is computed."""

    async def scenario() -> None:
        async with Cluster(**CLUSTER) as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(delay_s=0.5)
            answer = await cluster.ask(prompt_of(24), max_tokens=2, ignore_eos=True)
            assert (answer.error, answer.path) == (None, "remote")
            assert answer.timings["prefill_s"] == pytest.approx(3.0, abs=0.02)
            assert answer.timings["moved_s"] == pytest.approx(1.5, abs=0.02)
            assert answer.timings["transfer_s"] == pytest.approx(0.5, abs=0.02)
            assert answer.timings["overlap"] == pytest.approx(2 / 3, abs=0.02)
            local = await cluster.ask(prompt_of(24), path="local", max_tokens=2, ignore_eos=True)
            assert (local.timings["moved_s"], local.timings["overlap"]) == (0.0, None)

    run_virtual(scenario())


def test_the_first_token_leaves_while_earlier_chunks_still_travel() -> None:
    """Three chunks of a second; each takes one and a quarter to move, one after the other. What has not come when the
    last one is computed counts as transfer, and the client does not wait for it."""

    async def scenario() -> None:
        async with Cluster(**CLUSTER) as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(delay_s=1.25)
            answer = await cluster.ask(prompt_of(24), max_tokens=2, ignore_eos=True)
            assert (answer.error, answer.path) == (None, "remote")
            assert answer.timings["first_token_s"] == pytest.approx(3.0, abs=0.05)
            assert answer.timings["prefill_s"] == pytest.approx(3.0, abs=0.02)
            assert answer.timings["moved_s"] == pytest.approx(3.75, abs=0.02)
            assert answer.timings["transfer_s"] == pytest.approx(1.75, abs=0.02)
            assert answer.timings["overlap"] == pytest.approx(1 - 1.75 / 3, abs=0.02)
            await cluster.settle()

    run_virtual(scenario())


def test_a_chunk_that_fails_while_another_one_is_computed_ends_the_prompt() -> None:
    async def scenario() -> None:
        async with Cluster(**CLUSTER) as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(delay_s=0.5, error=PeerLost("cut off"))
            began = asyncio.get_running_loop().time()
            answer = await cluster.ask(prompt_of(80), path="remote", strict=True, max_tokens=2, ignore_eos=True)
            assert isinstance(answer.error, PeerLost)
            assert "cut off" in answer.error.message
            assert asyncio.get_running_loop().time() - began < 9.0, "the rest of the prompt is computed for nobody"
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("late_s", "ahead", "learned"), [(0.0, 0, [(16, 2.0)]), (1.5, 0, [(16, 2.0)]), (1.5, 1, []), (6.0, 1, [])]
)
def test_the_pace_of_a_prompt_is_learned_only_if_all_of_its_compute_was_seen(
    late_s: float, ahead: int, learned: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed ahead of the destination took nobody knows how long: P would seem faster than it is."""
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(WireChoice, "computed", lambda self, num_tokens, spent_s: told.append((num_tokens, spent_s)))

    async def scenario() -> None:
        async with Cluster(optimistic_attempts=ahead, policy=late_by(late_s), **CLUSTER) as cluster:
            answer = await cluster.ask(prompt_of(16), max_tokens=2, ignore_eos=True)
            assert (answer.error, answer.path) == (None, "remote")

    run_virtual(scenario())
    assert [num_tokens for num_tokens, _ in told] == [num_tokens for num_tokens, _ in learned]
    assert [spent_s for _, spent_s in told] == pytest.approx([spent_s for _, spent_s in learned], abs=0.02)


@pytest.mark.parametrize(("late_s", "queue_s", "prefill_s"), [(1.5, 1.5, 0.5), (6.0, 6.0, 0.0)])
def test_what_is_computed_ahead_of_the_destination_is_queue(late_s: float, queue_s: float, prefill_s: float) -> None:
    """Two steps of a second, begun at once."""

    async def scenario() -> None:
        async with Cluster(optimistic_attempts=1, policy=late_by(late_s), **CLUSTER) as cluster:
            answer = await cluster.ask(prompt_of(16), max_tokens=2, ignore_eos=True)
            assert (answer.error, answer.path) == (None, "remote")
            assert answer.timings["prefill_queue_s"] == pytest.approx(queue_s, abs=0.02)
            assert answer.timings["prefill_s"] == pytest.approx(prefill_s, abs=0.02)

    run_virtual(scenario())
