"""A model directory of one's own through real processes: what `transformers` says, from P and D and over the wire."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support_cluster import RealCluster
from tests.support_families import build, reference_tokens, write_hf

PROMPT = [(i * 37 + 11) % 256 for i in range(83)]


def small(cache: Path) -> Mapping[str, object]:
    sizes = {"common.page_tokens": 8, "common.kv_bytes": "16MiB", "common.prefill_chunk": 24}
    return {**sizes, "common.cache_dir": cache}


def test_a_directory_is_served_as_transformers_computes_it(tmp_path: Path) -> None:
    model = build("qwen3", head_dim=32, tie_word_embeddings=True)
    source = write_hf(model, tmp_path / "Tiny Qwen3", num_shards=2)
    with RealCluster(tmp_path / "cluster", model=str(source), settings=small(tmp_path)) as cluster:
        answer = cluster.complete(model="tiny-qwen3", prompt=PROMPT, max_tokens=64, baton={"path": "remote"})
        assert answer.path == "remote"
        assert answer.token_ids == reference_tokens(model, PROMPT, 64)
        cluster.settled(files=False)


@pytest.mark.slow
def test_workers_that_keep_state_in_different_types_do_not_hand_over(tmp_path: Path) -> None:
    source = write_hf(build("llama"), tmp_path / "tiny")
    with RealCluster(
        tmp_path / "cluster", model=str(source), settings={**small(tmp_path), "decode.kv_dtype": "float16"}
    ) as cluster:
        refused = cluster.complete(model="tiny", prompt=PROMPT, max_tokens=4, baton={"path": "remote", "strict": True})
        assert refused.status == 503
        assert ":kv-float32" in str(refused.body)
        assert ":kv-float16" in str(refused.body)


@pytest.mark.slow
def test_workers_that_compute_in_different_types_do_not_hand_over(tmp_path: Path) -> None:
    source = write_hf(build("llama"), tmp_path / "tiny")
    with RealCluster(
        tmp_path / "cluster", model=str(source), settings={**small(tmp_path), "decode.dtype": "bfloat16"}
    ) as cluster:
        prefill, decode = cluster.workers("prefill")[0], cluster.workers("decode")[0]
        assert prefill["identity"] != decode["identity"]
        refused = cluster.complete(model="tiny", prompt=PROMPT, max_tokens=4, baton={"path": "remote", "strict": True})
        assert refused.status == 503
        local = cluster.complete(model="tiny", prompt=PROMPT, max_tokens=4, baton={"path": "local"})
        assert (local.path, len(local.token_ids)) == ("local", 4)
