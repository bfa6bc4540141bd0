"""Where prompts end just before, on and just behind the border of a page or a chunk, the handed-over request goes on
exactly as one that its decode worker computed alone."""

from collections.abc import Iterator

import pytest

from tests.support_cluster import Answer, RealCluster
from tests.support_golden import LONG_TEXT

LOGPROB_TOLERANCE = 5e-4
SETUPS = {"page16-chunk256": (16, 256), "page64-chunk32": (64, 32)}


@pytest.fixture(scope="module")
def large_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"common.page_tokens": 64, "common.prefill_chunk": 32}
    with RealCluster(tmp_path_factory.mktemp("large-pages"), settings=settings) as running:
        yield running


@pytest.fixture(params=SETUPS)
def bordered(request: pytest.FixtureRequest) -> tuple[RealCluster, int, int]:
    """A cluster, its page size and its chunk size."""
    page, chunk = SETUPS[request.param]
    cluster: RealCluster = request.getfixturevalue("cluster" if page == 16 else "large_pages")
    settings = cluster.workers("decode")[0]["settings"]
    assert (settings["page_tokens"], settings["prefill_chunk"]) == (page, chunk)
    return cluster, page, chunk


def both_ways(cluster: RealCluster, **body: object) -> tuple[Answer, Answer]:
    """The same request through P and on D alone, one after the other, so that each has its steps to itself."""
    paths = ("remote", "local")
    remote, local = (cluster.complete(baton={"path": path, "strict": True}, logprobs=2, **body) for path in paths)
    assert (remote.path, local.path) == paths
    return remote, local


def check_equal(remote: Answer, local: Answer) -> float:
    """Tokens, ends and texts are equal and logprobs close. Returns the largest difference of two logprobs."""
    largest = 0.0
    assert len(remote.choices) == len(local.choices)
    for ours, theirs in zip(remote.choices, local.choices, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
        for kind in ("tokens", "text_offset"):
            assert ours["logprobs"][kind] == theirs["logprobs"][kind]
        pairs = zip(ours["logprobs"]["top_logprobs"], theirs["logprobs"]["top_logprobs"], strict=True)
        for top, other in pairs:
            assert top.keys() == other.keys()
            largest = max([largest, *(abs(top[token] - other[token]) for token in top)])
    assert largest < LOGPROB_TOLERANCE
    return largest


def test_remote_equals_local_around_borders(bordered: tuple[RealCluster, int, int]) -> None:
    cluster, page, chunk = bordered
    lengths = {1, page - 1, page, page + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1}
    for length in sorted(lengths):
        prompt = list(LONG_TEXT[:length])
        largest = check_equal(*both_ways(cluster, prompt=prompt, max_tokens=18, ignore_eos=True))
        print(f"prompt of {length}: logprobs differ by at most {largest:g}")
    cluster.settled()


def test_several_drawn_choices_are_the_same_both_ways(bordered: tuple[RealCluster, int, int]) -> None:
    cluster, page, _ = bordered
    for length in (page - 1, page, page + 1):
        drawn = {"n": 3, "temperature": 0.9, "top_p": 0.95, "seed": 20 + length, "max_tokens": 16}
        remote, local = both_ways(cluster, prompt=list(LONG_TEXT[:length]), ignore_eos=True, **drawn)
        check_equal(remote, local)
        assert len({tuple(choice["token_ids"]) for choice in remote.choices}) == 3
    cluster.settled()
