"""What a request has given out goes over with the prompt's state: real engines and sidecars, and real bytes."""

from pathlib import Path

import pytest

from shared.engine.models.toy import Toy
from shared.protocol.messages import SamplingSpec
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.transfer.link import TicketKey
from tests.contract.test_handoff_bytes import Pair, handoff, rooms, toy_prompt
from tests.support_engine import undivided
from tests.support_resume import Cut as CutOff
from tests.support_resume import given_out, uninterrupted

DRAWN = SamplingSpec(temperature=0.9, seed=7, max_tokens=20, frequency_penalty=0.6, logprobs=1, ignore_eos=True)


async def go_on(pair: Pair, cut: CutOff) -> None:
    key = TicketKey(next(rooms), 1)
    pair.d.engine.reserve(key, cut.prompt, cut.sampling, decodes=True, past=cut.past)
    pair.p.engine.reserve(key, cut.past.trunk(cut.prompt), cut.sampling, decodes=False)
    first = await pair.move(key)
    sent, received = await pair.p_link.sent(key), await pair.d_link.received(key)
    assert sent == received
    pair.d.engine.start_prefilled(key, first)
    await pair.d.finish(key, len(cut.live))
    assert given_out(pair.d, key, cut.sampling.n) == cut.rest
    await pair.d_link.fence(key)
    await pair.p_link.forget(key)
    await pair.d.engine.retire(key)
    await pair.p.engine.retire(key)


@pytest.mark.parametrize(("kind", "cut", "prefill_pages"), [("shm", BY_CHUNKS, 4), ("tcp", Cut(layers=1), 6)])
async def test_a_request_goes_on_from_the_bytes_that_crossed(
    kind: str, cut: Cut, prefill_pages: int, tmp_path: Path
) -> None:
    """Around the borders of pages of four, a ring of eight and chunks of sixteen."""
    async with handoff(kind, tmp_path, Toy(), 4, 16, cut, prefill_page_tokens=prefill_pages) as pair:
        for n, length, *at in ((1, 6, 1), (1, 6, 3), (1, 7, 10), (1, 16, 18), (3, 9, 5, 12, 20)):
            prompt, sampling = toy_prompt(length), DRAWN.model_copy(update={"n": n})
            whole = await uninterrupted(pair.p, TicketKey(next(rooms), 1), prompt, sampling)
            assert [[token for _, token, *_ in seen] for seen in whole] == undivided(prompt, sampling)
            await go_on(pair, CutOff(prompt, sampling, tuple(map(tuple, whole)), tuple(at)))
