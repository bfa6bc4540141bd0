"""A prompt's state leaves in one piece, by chunks or by layers: the answer is the same, each row is sent once, and what
is missing is never decoded."""

from typing import Any

import pytest

from services.decode import flow as decode_flow
from services.decode.ticket import DecodeTicket
from shared.engine.sharing import Held
from shared.runtime.errors import Corrupt, GeometryMismatch
from shared.runtime.overlap import Overlap
from shared.transfer.fake import FakeLink, Mishap
from shared.transfer.link import Piece
from tests.sim.asking import only_once
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracle
from tests.sim.virtual_time import run_virtual

SAMPLING: dict[str, Any] = {"n": 2, "max_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 11}
LAYERS = 2


@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 21, 32])
@pytest.mark.parametrize("overlap", ["auto", "chunks", "layers"])
def test_however_it_leaves_the_answer_is_the_same(length: int, overlap: Overlap) -> None:
    async def scenario() -> None:
        prompt = prompt_of(length, seed=length)
        async with Cluster(overlap=overlap) as cluster:
            sent: list[tuple[Piece, ...]] = []

            def policy(key: object, pieces: tuple[Piece, ...]) -> Mishap:
                sent.append(pieces)
                return Mishap()

            cluster.network.policy = policy
            answer = await cluster.ask(prompt, path="remote", strict=True, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            chunks = -(-length // 8)
            assert len(sent) == {"auto": 1, "chunks": chunks, "layers": LAYERS * chunks}[overlap]
            cells = [
                (piece.component, layer, piece.first_unit + k)
                for pieces in sent
                for piece in pieces
                for layer in piece.layers(LAYERS)
                for k in range(len(piece.units))
            ]
            assert len(cells) == len(set(cells)) == LAYERS * (-(-length // 4) + 2)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 4), (4, 6), (6, 4), (1, 5)])
@pytest.mark.parametrize("overlap", ["auto", "chunks", "layers"])
def test_pages_of_other_sizes_are_regrouped(prefill: int, decode: int, overlap: Overlap) -> None:
    async def scenario() -> None:
        prompts = [prompt_of(length, seed=length) for length in (1, 4, 7, 8, 9, 17, 24, 29)]
        async with Cluster(prefill_page_tokens=prefill, page_tokens=decode, overlap=overlap, num_pages=128) as cluster:
            for prompt in prompts:
                answer = await cluster.ask(prompt, path="remote", strict=True, **SAMPLING)
                assert answer.error is None
                assert answer.tokens == await oracle(prompt, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


def test_regrouped_state_that_was_spoiled_is_refused() -> None:
    async def scenario() -> None:
        async with Cluster(prefill_page_tokens=8, page_tokens=4) as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(corrupt=True)
            answer = await cluster.ask(prompt_of(13), path="remote", strict=True, **SAMPLING)
            assert isinstance(answer.error, Corrupt)
            assert cluster.decodes[0].engine.stats.tokens_generated == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("nth", [0, 3])
def test_a_layer_that_was_never_sent_is_missed_before_anything_is_decoded(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's and D's counts agree on what was moved: D must know itself what it needs."""

    async def scenario() -> None:
        async with Cluster(overlap="layers") as cluster:
            only_once(cluster)
            count = 0
            real = FakeLink.send

            async def forgetful(link: FakeLink, key: Any, secret: Any, peer: Any, pieces: Any, *rest: Any) -> None:
                nonlocal count
                count += 1
                if count != nth + 1:
                    await real(link, key, secret, peer, pieces, *rest)

            monkeypatch.setattr(FakeLink, "send", forgetful)
            answer = await cluster.ask(prompt_of(16), path="remote", strict=True, **SAMPLING)
            assert isinstance(answer.error, Corrupt)
            assert "'history', 1024)" in answer.error.message
            assert "'history', 768)" in answer.error.message
            assert cluster.decodes[0].engine.stats.tokens_generated == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("overlap", ["auto", "chunks", "layers"])
@pytest.mark.parametrize(
    ("prefill", "decode", "held"),
    [(4, 4, 8), (4, 4, 24), (4, 8, 8), (4, 8, 16), (8, 4, 16), (8, 4, 4), (8, 4, 12), (16, 8, 24), (5, 4, 12)],
)
def test_what_decode_has_already_is_not_sent(
    held: int, prefill: int, decode: int, overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D claims a prefix, whose rows come into its pages behind the link's back: no page of P's that has no others comes
    over the link."""

    async def scenario() -> None:
        prompt = prompt_of(29)
        async with Cluster(prefill_page_tokens=prefill, page_tokens=decode, overlap=overlap) as cluster:
            p, d = cluster.prefills[0], cluster.decodes[0]
            take_over = decode_flow._take_over

            def with_prefix(flow: Any, ticket: DecodeTicket, record: Any) -> None:
                ours, theirs = d.engine.unit_tables(ticket.key)[0], p.engine.unit_tables(ticket.key)[0]
                for k in range(held):
                    row = p.pool.tensors[0][:, theirs[k // prefill], :, k % prefill]
                    d.pool.tensors[0][:, ours[k // decode], :, k % decode] = row
                take_over(flow, ticket, record)

            monkeypatch.setattr(d.engine, "held", lambda key: Held(held))
            monkeypatch.setattr(decode_flow, "_take_over", with_prefix)
            sent: list[Piece] = []

            def policy(key: object, pieces: tuple[Piece, ...]) -> Mishap:
                sent.extend(pieces)
                return Mishap()

            cluster.network.policy = policy
            answer = await cluster.ask(prompt, path="remote", strict=True, **SAMPLING)
            monkeypatch.undo()
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            pages = {piece.first_unit + k for piece in sent if piece.component == 0 for k in range(len(piece.units))}
            assert pages == set(range(held // prefill, -(-len(prompt) // prefill)))
            row_bytes = p.pool.layout.components[0].row_bytes
            assert answer.timings["bytes"]["history"] == (len(prompt) - held // prefill * prefill) * LAYERS * row_bytes
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(("held", "message"), [(6, "decode has 6 of 29 tokens"), (32, "decode has 32 of 29 tokens")])
def test_a_prefix_that_cannot_be_left_out_is_refused(held: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            monkeypatch.setattr(cluster.decodes[0].engine, "held", lambda key: Held(held))
            answer = await cluster.ask(prompt_of(29), path="remote", strict=True, timeout_s=10, **SAMPLING)
            assert isinstance(answer.error, GeometryMismatch)
            assert message in str(answer.error)
            await cluster.settle()

    run_virtual(scenario())
