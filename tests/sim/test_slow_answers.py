"""On a host that has too much to do every round trip takes long: questions that are repeated still get their answer."""

from collections.abc import Iterable
from typing import cast

import pytest

from shared.bus.ask import ask
from shared.bus.base import Bus, BusError
from shared.bus.memory import Envelope
from shared.protocol.messages import Ping, Verdict
from shared.protocol.wire import encode
from shared.runtime.clock import LoopClock
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


def test_a_question_outlives_any_number_of_tries() -> None:
    """A bus that cannot take anything says so at once, so that a long outage means very many tries."""

    class Refusing:
        num_tries = 0

        async def request(self, *_: object) -> bytes:
            self.num_tries += 1
            if self.num_tries < 3000:
                raise BusError("too much waits for the connection already")
            return encode(Verdict(ok=True))

    async def scenario() -> None:
        bus, clock = cast(Bus, Refusing()), LoopClock()
        message = Ping()
        assert (await ask(bus, clock, "x", message, Verdict, deadline=clock.now() + 1000)).ok

    run_virtual(scenario())
