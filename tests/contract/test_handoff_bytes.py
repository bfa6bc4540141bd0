"""The baton itself: what a prefill engine computed lies in a decode engine's pool byte for byte, moved by real
sidecars, and is all that the decode engine needs. Engines, models and sidecars are the real ones; there is no bus."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from shared.engine.executor import ThreadExecutor
from shared.engine.models.base import Model
from shared.engine.models.toy import Toy
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.runtime.overlap import BY_CHUNKS, Cut
from shared.state.components import IndexKind
from shared.transfer.link import TicketKey
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import NIXL
from tests.support_engine import EngineBench, running, undivided
from tests.support_model import real_model

KINDS = ["shm", "tcp"]
SECRET = b"a secret of the ticket, 32 bytes"
GREEDY = SamplingSpec(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingSpec(temperature=0.9, seed=7, n=3, max_tokens=9, ignore_eos=True)
TOY_LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)  # around a page of 4, a ring of 8, a chunk of 16
REAL_LENGTHS = (1, 15, 16, 17, 33)  # around a page of 16, a chunk of 32
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden" / "smollm2.json").read_text())
REAL_TEXT: tuple[int, ...] = tuple(next(c["prompt_ids"] for c in GOLDEN["text"] if len(c["prompt_ids"]) == 33))
RowPlace = tuple[int | slice, ...]

rooms: Iterator[int] = count(1)


@dataclass
class Pair:
    """P and D, each an engine and its sidecar. D's free units are scattered between others that are taken."""

    p: EngineBench
    p_link: SidecarLink
    d: EngineBench
    d_link: SidecarLink
    model: Model
    cut: Cut

    def reserve(self, prompt: tuple[int, ...], sampling: SamplingSpec = GREEDY) -> TicketKey:
        key = TicketKey(next(rooms), 1)
        self.d.engine.reserve(key, prompt, sampling, decodes=True)
        self.p.engine.reserve(key, prompt, sampling, decodes=False)
        return key

    async def move(self, key: TicketKey) -> tuple[FirstToken, ...]:
        """P's prefill, what is done sent while the rest is computed. Returns the handoff tokens."""
        first: tuple[FirstToken, ...] = ()
        await self.d_link.open(key, SECRET, self.d.engine.unit_tables(key), lambda _key: None)
        async for chunk in self.p.engine.prefill(key, self.cut):
            if chunk.pieces:
                await self.p_link.send(key, SECRET, self.d_link.address, chunk.pieces)
            first = chunk.first
        return first

    async def go_on(self, key: TicketKey, first: tuple[FirstToken, ...]) -> list[list[int]]:
        """D decodes to the end. All tokens of each choice; both sides have let go of the ticket."""
        self.d.engine.start_prefilled(key, first)
        await self.d.finish(key, len(first))
        tokens = [[token.token, *self.d.text_of(key, token.choice)] for token in first]
        await self.d_link.fence(key)
        await self.p_link.forget(key)
        await self.d.engine.retire(key)
        await self.p.engine.retire(key)
        return tokens


@asynccontextmanager
async def handoff(
    kind: str,
    directory: Path,
    model: Model,
    page_tokens: int,
    chunk: int,
    cut: Cut = BY_CHUNKS,
    prefill_page_tokens: int | None = None,
) -> AsyncIterator[Pair]:
    """page_tokens: D's, and P's unless it has its own."""
    sizes = {"prefill_chunk": chunk, "growth_tokens": 4}
    pages = {"p": prefill_page_tokens or page_tokens, "d": page_tokens}
    options = SidecarOptions("s", directory, transfer=kind)
    async with (
        running(model, ThreadExecutor(1), num_pages=60, max_running=12, page_tokens=pages["p"], **sizes) as p,
        running(model, ThreadExecutor(1), num_pages=91, max_running=15, page_tokens=pages["d"], **sizes) as d,
    ):
        p_link, d_link = await asyncio.gather(
            *(SidecarLink.start(options, bench.pool.fd, bench.pool.layout) for bench in (p, d))
        )
        try:
            others = [TicketKey(next(rooms), 1) for _ in range(6)]
            for key in others:
                d.engine.reserve(key, (1,) * (page_tokens + 1), GREEDY, decodes=True)
            for key in others[::2]:
                await d.engine.retire(key)
            yield Pair(p, p_link, d, d_link, model, cut)
            for key in others:
                await d.engine.retire(key)
            assert p.is_empty()
            assert d.is_empty()
        finally:
            await asyncio.gather(p_link.close(), d_link.close())


def rows_of(bench: EngineBench, key: TicketKey, prompt_len: int) -> Iterator[tuple[int, RowPlace]]:
    """(component, where one row of one layer lies) for all that a prompt of this length leaves, in logical order."""
    layout = bench.pool.layout
    for index, table in enumerate(bench.engine.unit_tables(key)):
        component = layout.components[index]
        places: list[tuple[int, int | slice]]
        if component.index is IndexKind.REQUEST:
            places = [(table[0], slice(None))]
        elif component.index is IndexKind.RING:
            places = [(table[0], at) for at in range(min(prompt_len, component.unit_tokens))]
        else:
            size = component.unit_tokens
            places = [(table[at // size], at % size) for at in range(prompt_len)]
        for layer in range(component.num_layers):
            for unit, row in places:
                yield index, (layer, unit, *(slice(None) for _ in component.outer), row)


def picture(bench: EngineBench) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in bench.pool.tensors]


async def check_bytes(pair: Pair, prompt: tuple[int, ...], sampling: SamplingSpec = GREEDY) -> list[int]:
    """Moves a prompt, compares all of D's pool with what it must be, and lets D go on. Returns the tokens."""
    key = pair.reserve(prompt, sampling)
    expected = picture(pair.d)
    first = await pair.move(key)
    source = picture(pair.p)
    num_bytes = [0] * len(source)
    both = zip(rows_of(pair.p, key, len(prompt)), rows_of(pair.d, key, len(prompt)), strict=True)
    for (index, here), (_, there) in both:
        expected[index][there] = source[index][here]
        num_bytes[index] += source[index][here].nbytes
    for index, (ours, theirs) in enumerate(zip(picture(pair.d), expected, strict=True)):
        assert ours.tobytes() == theirs.tobytes(), f"component {index} of a prompt of {len(prompt)}"
    sent, received = await pair.p_link.sent(key), await pair.d_link.received(key)
    assert sent == received
    assert [component.num_bytes for component in sent] == num_bytes
    assert all(num_bytes)
    return (await pair.go_on(key, first))[0]


def toy_prompt(length: int) -> tuple[int, ...]:
    return tuple((k * k * 31 + 7 * length) % 250 for k in range(length))


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("shm", BY_CHUNKS),
        ("tcp", BY_CHUNKS),
        pytest.param("nixl", BY_CHUNKS, marks=NIXL.marks),
        ("tcp", Cut(layers=1)),
    ],
)
async def test_every_component_of_the_toy_crosses(kind: str, cut: Cut, tmp_path: Path) -> None:
    async with handoff(kind, tmp_path, Toy(), page_tokens=4, chunk=16, cut=cut) as pair:
        for length in TOY_LENGTHS:
            prompt = toy_prompt(length)
            assert await check_bytes(pair, prompt) == undivided(prompt, GREEDY)[0], f"prompt of {length}"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_state_of_the_real_model_crosses(kind: str, tmp_path: Path) -> None:
    short = GREEDY.model_copy(update={"max_tokens": 5})
    cut = Cut(layers=7) if kind == "tcp" else BY_CHUNKS
    async with handoff(kind, tmp_path, real_model(), page_tokens=16, chunk=32, cut=cut) as pair:
        for length in REAL_LENGTHS:
            prompt = REAL_TEXT[:length]
            alone = (await pair.p.local(TicketKey(next(rooms), 1), prompt, short))[0]
            assert await check_bytes(pair, prompt, short) == alone, f"prompt of {length}"


@pytest.mark.parametrize(("kind", "prefill", "decode"), [("shm", 4, 6), ("tcp", 6, 4), ("tcp", 4, 8)])
async def test_pages_of_other_sizes_are_regrouped(kind: str, prefill: int, decode: int, tmp_path: Path) -> None:
    cut = Cut(layers=1) if prefill < decode else BY_CHUNKS
    async with handoff(kind, tmp_path, Toy(), decode, 16, cut, prefill_page_tokens=prefill) as pair:
        for length in TOY_LENGTHS:
            prompt = toy_prompt(length)
            assert await check_bytes(pair, prompt) == undivided(prompt, GREEDY)[0], f"prompt of {length}"


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"), [("shm", 16, 32), ("shm", 32, 16), ("tcp", 16, 32), ("tcp", 32, 16)]
)
async def test_the_real_models_pages_are_regrouped(kind: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """The golden text goes on as ever."""
    async with handoff(kind, tmp_path, real_model(), decode, 32, prefill_page_tokens=prefill) as pair:
        prompt, expected = next(
            (c["prompt_ids"], c["output_ids"]) for c in GOLDEN["text"] if len(c["prompt_ids"]) == 33
        )
        greedy = GREEDY.model_copy(update={"max_tokens": 16})
        assert await check_bytes(pair, tuple(prompt), greedy) == expected[:16]


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("float16", 128), ("fp8", 68)])
async def test_narrow_keys_and_values_cross_as_they_are(kv_dtype: str, row_bytes: int, tmp_path: Path) -> None:
    """Half the bytes of float32 in float16, and with its scales a little more than a quarter in fp8."""
    short, model = GREEDY.model_copy(update={"max_tokens": 5}), real_model(kv_dtype)
    async with handoff("shm", tmp_path, model, page_tokens=16, chunk=32) as pair:
        (component,) = pair.p.pool.layout.components
        assert component.row_bytes == 2 * 3 * row_bytes
        for length in (17, 33):
            prompt = REAL_TEXT[:length]
            alone = (await pair.p.local(TicketKey(next(rooms), 1), prompt, short))[0]
            assert await check_bytes(pair, prompt, short) == alone, f"prompt of {length}"


@pytest.mark.parametrize("component", ["history", "memory", "window"])
async def test_the_toy_needs_every_component(component: str, tmp_path: Path) -> None:
    async with handoff("shm", tmp_path, Toy(), page_tokens=4, chunk=16) as pair:
        index = [c.name for c in pair.d.pool.layout.components].index(component)
        for length in (1, 9, 17):
            prompt = toy_prompt(length)
            key = pair.reserve(prompt)
            first = await pair.move(key)
            for at, cut in rows_of(pair.d, key, length):
                if at == index:
                    pair.d.pool.tensors[at][cut] = 0
            tokens = (await pair.go_on(key, first))[0]
            assert tokens != undivided(prompt, GREEDY)[0], f"{component} of a prompt of {length} was not needed"


async def test_the_real_model_needs_every_row(tmp_path: Path) -> None:
    """The oldest and the newest row: D's next tokens, or at least their probabilities, depend on each."""
    scored = GREEDY.model_copy(update={"logprobs": 0, "max_tokens": 4})
    prompt = REAL_TEXT[:17]
    async with handoff("shm", tmp_path, real_model(), page_tokens=16, chunk=32) as pair:

        async def scores(zeroed: int | None) -> list[float]:
            key = pair.reserve(prompt, scored)
            first = await pair.move(key)
            places = list(rows_of(pair.d, key, len(prompt)))
            for layer in range(0 if zeroed is None else len(places) // len(prompt)):
                index, cut = places[layer * len(prompt) + (zeroed or 0)]
                pair.d.pool.tensors[index][cut] = 0
            await pair.go_on(key, first)
            return [out.logprob.logprob for out in pair.d.tokens if out.key == key and out.logprob is not None]

        whole = await scores(None)
        assert await scores(None) == whole, "the same again, bit for bit"
        for row in (0, 8, 15, 16):
            assert abs((await scores(row))[0] - whole[0]) > 0.01, f"row {row} was not needed"


@pytest.mark.parametrize("kind", KINDS)
async def test_neighbours_keep_their_state_and_choices_share_a_prompt(kind: str, tmp_path: Path) -> None:
    """Many handoffs of several choices at once, into an engine that decodes prompts of its own meanwhile."""
    async with handoff(kind, tmp_path, Toy(), page_tokens=4, chunk=16) as pair:

        async def baton(length: int) -> None:
            prompt = toy_prompt(length)
            key = pair.reserve(prompt, DRAWN)
            assert await pair.go_on(key, await pair.move(key)) == undivided(prompt, DRAWN), f"prompt of {length}"

        async def neighbour(length: int) -> None:
            prompt, long = toy_prompt(length), GREEDY.model_copy(update={"max_tokens": 60})
            assert await pair.d.local(TicketKey(next(rooms), 1), prompt, long) == undivided(prompt, long)

        async with asyncio.TaskGroup() as tasks:
            for length in (6, 17):
                tasks.create_task(neighbour(length))
            for length in (5, 9, 23):
                tasks.create_task(baton(length))
