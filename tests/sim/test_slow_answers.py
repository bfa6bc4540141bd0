"""On a host that has too much to do every round trip takes long: questions that are repeated still get their answer."""

from collections.abc import Iterable

import pytest

from shared.bus.memory import Envelope
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracle
from tests.sim.virtual_time import run_virtual


@pytest.mark.parametrize("late_s", [0.7, 1.5])
def test_every_answer_comes_later_than_a_question_is_repeated(late_s: float) -> None:
    def slow(envelope: Envelope) -> Iterable[float]:
        return (late_s,) if envelope.kind == "reply" else (0.0,)

    async def scenario() -> None:
        prompt = prompt_of(13)
        async with Cluster(policy=slow) as cluster:
            answer = await cluster.ask(prompt, timeout_s=60, max_tokens=12, ignore_eos=True)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, max_tokens=12, ignore_eos=True)
            await cluster.settle(60.0)

    run_virtual(scenario())
