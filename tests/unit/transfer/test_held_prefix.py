"""A receiver that holds the beginning of a prompt gets all the rows it lacks, whatever pages either side has, and keeps
those it holds."""

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.pieces import chunk_pieces
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.fake import FakeLink, FakeNetwork
from shared.transfer.ledger import state_bytes
from shared.transfer.link import Receipt
from tests.contract.transfer_links import new_ticket

KV = StateComponent("kv", IndexKind.PAGE, 1, (2,), (3,), "uint8", (0, 1))
INDEX = StateComponent("index", IndexKind.PAGE, 1, (), (2,), "uint8", (1,))
WINDOW = StateComponent("window", IndexKind.RING, 4, (), (2,), "uint8", (0,))
LONGEST = 40


def in_pages(page_tokens: int) -> PoolLayout:
    pages = -(-LONGEST // page_tokens)
    paged = tuple(replace(one, unit_tokens=page_tokens) for one in (KV, INDEX))
    return PoolLayout((*paged, WINDOW), pages + 2, 2)


class End:
    """A worker with a prompt of `num_tokens` in shuffled pages, full of noise."""

    def __init__(self, network: FakeNetwork, page_tokens: int, num_tokens: int, seed: int) -> None:
        self.layout, random = in_pages(page_tokens), np.random.default_rng(seed)
        self.bytes = memoryview(bytearray(random.bytes(self.layout.total_bytes)))
        pages = random.permutation(self.layout.num_pages)[: -(-num_tokens // page_tokens)].tolist()
        self.pages, self.slot = tuple(pages), 1
        self.link = FakeLink(network, self.layout, self.bytes)

    def rows(self, component: int, begin: int, end: int) -> list[bytes]:
        """Of these positions, by layer."""
        array, size = self.layout.view(self.bytes, component), self.layout.page_tokens
        at = [(self.pages[k // size], k % size) for k in range(begin, end)]
        return [array[layer, page, ..., row, :].tobytes() for layer in range(len(array)) for page, row in at]


async def hand_over(source: End, target: End, held: int, ends: list[int]) -> Receipt:
    """In chunks, as the engine cuts them for somebody who has `held` positions."""
    key, secret = new_ticket()
    await target.link.open(key, secret, (target.pages, target.pages, (target.slot,)), lambda key: None, held)
    told = held
    for end in ends:
        if end > told or end == ends[-1]:
            pieces = chunk_pieces(source.layout, told, end, end == ends[-1], source.pages, source.slot)
            await source.link.send(key, secret, target.link.address, pieces)
            told = end
    receipt = await target.link.received(key)
    assert receipt == await source.link.sent(key)
    await target.link.fence(key)
    await source.link.forget(key)
    return receipt


@given(st.integers(1, 17), st.integers(1, 17), st.data())
def test_every_row_that_it_lacks_comes_and_those_it_holds_stay(prefill: int, decode: int, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(2, LONGEST))
    held = data.draw(st.integers(0, (num_tokens - 1) // decode)) * decode
    ends = sorted({*data.draw(st.lists(st.integers(1, num_tokens), max_size=4)), num_tokens})
    network = FakeNetwork()
    source, target = End(network, prefill, num_tokens, 1), End(network, decode, num_tokens, 2)
    before, untouched = End(network, decode, num_tokens, 2), target.layout.view(target.bytes, 0).copy()
    receipt = asyncio.run(hand_over(source, target, held, ends))
    for component in (0, 1):
        assert target.rows(component, held, num_tokens) == source.rows(component, held, num_tokens)
        assert target.rows(component, 0, held) == before.rows(component, 0, held)
    others = [page for page in range(target.layout.num_pages) if page not in target.pages]
    assert (target.layout.view(target.bytes, 0)[:, others] == untouched[:, others]).all()
    for component, found in zip(source.layout.components, receipt, strict=True):
        sent_from = held // prefill * prefill
        assert found.num_bytes == state_bytes(component, num_tokens, sent_from)
        assert found.unit_tokens == component.unit_tokens
