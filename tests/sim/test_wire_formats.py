"""What a request's precision does on its way, as far as links that only know raw rows can show it."""

import pytest

from shared.protocol.wire import KvPrecision
from shared.runtime.errors import Corrupt
from shared.transfer.fake import Mishap
from shared.transfer.link import Piece, TicketKey
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracle
from tests.sim.virtual_time import run_virtual

SAMPLING = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 11}


def test_a_block_that_is_damaged_on_the_way_costs_one_attempt() -> None:
    """P hears of it while it computes: nothing has reached the client, so the request is tried again."""

    async def scenario() -> None:
        damaged: list[TicketKey] = []

        def policy(key: TicketKey, pieces: tuple[Piece, ...]) -> Mishap:
            damaged.append(key)
            return (
                Mishap(error=Corrupt("component 'kv': the block's digest disagrees")) if len(damaged) == 1 else Mishap()
            )

        prompt = prompt_of(30)
        async with Cluster(prefills=2, decodes=2) as cluster:
            cluster.network.policy = policy
            answer = await cluster.ask(prompt, path="remote", strict=True, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            assert answer.timings["attempts"] == 2
            assert len({key.room for key in damaged}) == 2
            breakers = cluster.gateway.flow.rooms.breakers
            assert breakers.num_opened == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("asked", ["raw", "lossless", "fp8", "auto"])
def test_what_ran_is_told_and_counted(asked: KvPrecision) -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            answer = await cluster.ask(prompt_of(13), path="remote", strict=True, kv_precision=asked, **SAMPLING)
            assert answer.error is None
            told = answer.timings
            assert (told["kv_precision"], told["wire_format"]) == (asked, "raw")
            assert told["wire_bytes"] == told["bytes"] != {}
            counters = cluster.prefills[0].deps.counters
            assert counters[f"kv_precision_{asked}"] == counters["wire_format_raw"] == 1
            assert counters["wire_format_fallbacks"] == (asked in ("lossless", "fp8"))
            await cluster.settle()

    run_virtual(scenario())
