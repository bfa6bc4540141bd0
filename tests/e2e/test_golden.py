"""Greedy tokens through the whole path (P, sidecars, D) are golden, whatever the pages, chunks, backend and number of
workers."""

import asyncio
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.support_client import complete
from tests.support_cluster import RealCluster
from tests.support_golden import GoldenCase, golden_cases

SHORT, LONG = 130, 520


@dataclass(frozen=True)
class Setup:
    """prompts_up_to: longer golden prompts are left to other setups. decode_page_tokens: D's, where it has others than
    P."""

    page_tokens: int
    prefill_chunk: int
    transfer: str
    workers: int
    prompts_up_to: int = 4096
    decode_page_tokens: int | None = None
    overlap: str = "auto"

    def __str__(self) -> str:
        pages = f"page{self.page_tokens}" + (f"to{self.decode_page_tokens}" if self.decode_page_tokens else "")
        return f"{pages}-chunk{self.prefill_chunk}-{self.transfer}-{self.workers}P{self.workers}D"

    @property
    def cases(self) -> list[GoldenCase]:
        return [case for case in golden_cases() if len(case.prompt) <= self.prompts_up_to]


PAIRS = (
    Setup(16, 32, "shm", 1, SHORT),
    Setup(16, 512, "tcp", 2, LONG),
    Setup(64, 32, "tcp", 2),
    Setup(64, 512, "shm", 2, SHORT),
    Setup(64, 512, "tcp", 1, SHORT),
)
"""Every two values of any two settings occur together; every golden prompt occurs."""
UNEVEN = (
    Setup(16, 32, "shm", 1, SHORT, decode_page_tokens=32, overlap="layers"),
    Setup(32, 64, "tcp", 1, SHORT, decode_page_tokens=16),
)
"""P and D cut their state into pages of different sizes."""
MORE_UNEVEN = (
    Setup(16, 64, "tcp", 2, decode_page_tokens=32, overlap="layers"),
    Setup(32, 32, "shm", 2, decode_page_tokens=16),
    Setup(64, 512, "shm", 1, decode_page_tokens=16, overlap="layers"),
)
ALL = tuple(Setup(*values) for values in product((16, 64), (32, 512), ("shm", "tcp"), (1, 2)))


async def run_golden(setup: Setup, directory: Path) -> None:
    settings = {
        "prefill.page_tokens": setup.page_tokens,
        "decode.page_tokens": setup.decode_page_tokens or setup.page_tokens,
        "prefill.overlap": setup.overlap,
        "common.prefill_chunk": setup.prefill_chunk,
        "sidecar.transfer": setup.transfer,
    }
    cases, num_tokens = setup.cases, 0
    excused, wrong = [], []
    with RealCluster(directory, prefill=setup.workers, decode=setup.workers, settings=settings) as cluster:
        async with cluster.async_client() as http:
            options = {"path": "remote", "strict": True, "timings": True}
            answers = await asyncio.gather(*(complete(http, baton=options, **case.body()) for case in cases))
        for case, answer in zip(cases, answers, strict=True):
            tokens = answer.token_ids
            assert answer.path == "remote"
            assert answer.body["baton"]["timings"]["backend"] == setup.transfer
            assert answer.choices[0]["prompt_token_ids"] == list(case.prompt)
            num_tokens += len(tokens)
            if (first := case.difference(tokens)) is not None:
                (excused if case.excuses(first) else wrong).append((case.name, first, tokens[first:][:4]))
            elif case.text is not None:
                choice = answer.choices[0]
                assert (choice["text"] if case.user is None else choice["message"]["content"]) == case.text
                assert choice["finish_reason"] == ("stop" if len(tokens) < 64 else "length")
        used = [worker for role in ("prefill", "decode") for worker in cluster.workers(role)]
        assert len(used) == 2 * setup.workers
        cluster.settled()
    print(f"{setup}: {len(cases)} requests, {num_tokens} tokens, {len(excused)} near ties excused: {excused}")
    assert not wrong


@pytest.mark.parametrize("setup", PAIRS + UNEVEN, ids=str)
async def test_golden_through_the_whole_path(setup: Setup, tmp_path: Path) -> None:
    await run_golden(setup, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setup", ALL + MORE_UNEVEN, ids=str)
async def test_golden_in_every_setup(setup: Setup, tmp_path: Path) -> None:
    await run_golden(setup, tmp_path)


def test_setups_cover_all_pairs_and_prompts() -> None:
    values = [(s.page_tokens, s.prefill_chunk, s.transfer, s.workers) for s in PAIRS]
    wanted = [(s.page_tokens, s.prefill_chunk, s.transfer, s.workers) for s in ALL]
    for a in range(4):
        for b in range(a):
            assert {(row[a], row[b]) for row in values} == {(row[a], row[b]) for row in wanted}
    assert {case.name for setup in PAIRS for case in setup.cases} == {case.name for case in golden_cases()}
